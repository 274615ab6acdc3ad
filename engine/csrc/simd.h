// Small vector vocabulary for all kernels: fixed-width float vectors, conversions of storage types, and exp.
// Knows nothing of models. The instruction set is chosen by compiler flags (one shared library per level), so the
// code is written once, in GCC vector extensions; only conversions and shuffles name intrinsics, behind feature macros.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__SSE__)
#include <immintrin.h>
#endif

namespace quire {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float vfloat __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t vint __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

inline vfloat load(const float* p) { return *reinterpret_cast<const vfloat*>(p); }
inline void store(float* p, vfloat v) { *reinterpret_cast<vfloat*>(p) = v; }
inline vfloat splat(float x) { return x - vfloat{}; }

// a > b ? a : b, so b where either is not a number.
inline vfloat max(vfloat a, vfloat b) {
#if defined(__AVX512F__)
  return reinterpret_cast<vfloat>(_mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#elif defined(__AVX__)
  return reinterpret_cast<vfloat>(_mm256_max_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#else
  return a > b ? a : b;
#endif
}

// Horizontal sums and maxima, always added up in the same order. `reduce_add4` takes four vectors to four sums.
#if defined(__AVX__)
inline __m256 fold(vfloat v) {
#if defined(__AVX512F__)
  const __m512 whole = reinterpret_cast<__m512>(v);
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(whole), 1));
  return _mm256_add_ps(_mm512_castps512_ps256(whole), high);
#else
  return reinterpret_cast<__m256>(v);
#endif
}
inline void reduce_add4(const vfloat* v, float* out) {
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(fold(v[0]), fold(v[1])), _mm256_hadd_ps(fold(v[2]), fold(v[3])));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
}
inline float reduce_add(vfloat v) {
  const __m256 eight = fold(v);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#else
inline float reduce_add(vfloat v) {
  float sum = v[0];
  for (int i = 1; i < kLanes; ++i) sum += v[i];
  return sum;
}
inline void reduce_add4(const vfloat* v, float* out) {
  for (int i = 0; i < 4; ++i) out[i] = reduce_add(v[i]);
}
#endif
// None of v may be NaN.
inline float reduce_max(vfloat v) {
#if defined(__AVX__)
#if defined(__AVX512F__)
  const __m512 whole = reinterpret_cast<__m512>(v);
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(whole), 1));
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(whole), high);
#else
  const __m256 eight = reinterpret_cast<__m256>(v);
#endif
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
  float top = v[0];
  for (int i = 1; i < kLanes; ++i) top = v[i] > top ? v[i] : top;
  return top;
#endif
}

// exp(x) for x <= 0 (softmax arguments): 2^n * p(r), |relative error| < 3e-7; exactly 0 below -87.
inline vfloat exp_nonpositive(vfloat x) {
  const vfloat log2e = splat(1.44269504f);
  const vfloat clamped = max(splat(-87.0f), x);
  vint whole = __builtin_convertvector(clamped * log2e - splat(0.5f), vint);  // truncation of a negative: nearest
  vfloat n = __builtin_convertvector(whole, vfloat);
  vfloat r = clamped - n * splat(0.693359375f) + n * splat(2.12194440e-4f);  // Cody-Waite split of ln 2
  vfloat p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * r * r + r + splat(1.0f);
  vfloat y = reinterpret_cast<vfloat>(reinterpret_cast<vint>(p) + (whole << 23));
  return x < splat(-87.0f) ? vfloat{} : y;
}

// kLanes signed bytes as floats.
inline vfloat widen_int8(const int8_t* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<vfloat>(
      _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))));
#elif defined(__AVX2__)
  return reinterpret_cast<vfloat>(
      _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))));
#else
  vfloat y;
  for (int i = 0; i < kLanes; ++i) y[i] = p[i];
  return y;
#endif
}

// kLanes unsigned bytes as words.
inline vint widen_uint8(const uint8_t* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<vint>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return reinterpret_cast<vint>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  vint y;
  for (int i = 0; i < kLanes; ++i) y[i] = p[i];
  return y;
#endif
}

// Storage element types, as the caller numbers them.
enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kInt8 = 3, kFloat8E4M3 = 4 };

struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
inline float to_float(Float16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  uint32_t sign = (x.bits & 0x8000u) << 16, exponent = (x.bits >> 10) & 31u, mantissa = x.bits & 1023u, bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000u | (mantissa << 13);
  } else if (exponent == 0) {
    float y = static_cast<float>(mantissa) * 5.9604644775390625e-8f;  // subnormal: mantissa * 2^-24
    return sign ? -y : y;
  } else {
    bits = sign | ((exponent + 112u) << 23) | (mantissa << 13);
  }
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
#endif
}

inline void from_float(float x, float* out) { *out = x; }
inline void from_float(float x, BFloat16* out) {  // round to nearest even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    out->bits = static_cast<uint16_t>((bits >> 16) | 64u);
  } else {
    out->bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
}
inline void from_float(float x, Float16* out) {
#if defined(__F16C__)
  out->bits = _cvtss_sh(x, 0);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude >= 0x7f800000u) {
    out->bits = static_cast<uint16_t>(sign | 0x7c00u | (magnitude > 0x7f800000u ? 0x200u : 0u));
  } else if (magnitude >= 0x477ff000u) {
    out->bits = static_cast<uint16_t>(sign | 0x7c00u);
  } else if (magnitude < 0x38800000u) {  // subnormal or zero: let float addition round at 2^-24
    float y;
    std::memcpy(&y, &magnitude, 4);
    y += 0.5f;
    uint32_t rounded;
    std::memcpy(&rounded, &y, 4);
    out->bits = static_cast<uint16_t>(sign | (rounded - 0x3f000000u));
  } else {
    uint32_t rounded = magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u);
    out->bits = static_cast<uint16_t>(sign | (rounded >> 13));
  }
#endif
}

// kLanes half floats.
inline vfloat load_half(const Float16* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<vfloat>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__F16C__)
  return reinterpret_cast<vfloat>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  vfloat y;
  for (int i = 0; i < kLanes; ++i) y[i] = to_float(p[i]);
  return y;
#endif
}

// kLanes elements of any storage type as floats; the first `count` < kLanes of them, and zeros; many.
inline vfloat load_floats(const float* p) { return load(p); }
inline vfloat load_floats(const Float16* p) { return load_half(p); }
inline vfloat load_floats(const BFloat16* p) {
  typedef uint16_t vshort __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));
  return reinterpret_cast<vfloat>(__builtin_convertvector(*reinterpret_cast<const vshort*>(p), vint) << 16);
}
template <typename T>
vfloat load_some(const T* p, int count) {
  T some[kLanes] = {};
  std::memcpy(some, p, sizeof(T) * count);
  return load_floats(some);
}
template <typename T>
void widen(const T* source, float* target, int count) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) store(target + i, load_floats(source + i));
  if (i == count) return;
  const vfloat rest = load_some(source + i, count - i);
  std::memcpy(target + i, &rest, sizeof(float) * (count - i));
}

// Four floats from index d on of each of kLanes rows: those of rows 0, 4, 8, ... side by side.
inline vfloat load_quads(const float* const* rows, int d) {
#if defined(__AVX512F__)
  __m512 quads = _mm512_castps128_ps512(_mm_loadu_ps(rows[0] + d));
  quads = _mm512_insertf32x4(quads, _mm_loadu_ps(rows[4] + d), 1);
  quads = _mm512_insertf32x4(quads, _mm_loadu_ps(rows[8] + d), 2);
  return reinterpret_cast<vfloat>(_mm512_insertf32x4(quads, _mm_loadu_ps(rows[12] + d), 3));
#elif defined(__AVX__)
  const __m256 quads = _mm256_castps128_ps256(_mm_loadu_ps(rows[0] + d));
  return reinterpret_cast<vfloat>(_mm256_insertf128_ps(quads, _mm_loadu_ps(rows[4] + d), 1));
#else
  return load(rows[0] + d);
#endif
}

// Of four vectors of quads: every four quads, as the rows of a 4 x 4 matrix, become its columns.
inline void transpose_quads(vfloat* v) {
#if defined(__AVX512F__)
  typedef __m512 quads;
#define QUIRE_LANES(name) _mm512_##name##_ps
#elif defined(__AVX__)
  typedef __m256 quads;
#define QUIRE_LANES(name) _mm256_##name##_ps
#elif defined(__SSE__)
  typedef __m128 quads;
#define QUIRE_LANES(name) _mm_##name##_ps
#endif
#if defined(QUIRE_LANES)
  const quads a = reinterpret_cast<quads>(v[0]), b = reinterpret_cast<quads>(v[1]);
  const quads c = reinterpret_cast<quads>(v[2]), d = reinterpret_cast<quads>(v[3]);
  const quads low_ab = QUIRE_LANES(unpacklo)(a, b), high_ab = QUIRE_LANES(unpackhi)(a, b);
  const quads low_cd = QUIRE_LANES(unpacklo)(c, d), high_cd = QUIRE_LANES(unpackhi)(c, d);
  v[0] = reinterpret_cast<vfloat>(QUIRE_LANES(shuffle)(low_ab, low_cd, 0x44));
  v[1] = reinterpret_cast<vfloat>(QUIRE_LANES(shuffle)(low_ab, low_cd, 0xee));
  v[2] = reinterpret_cast<vfloat>(QUIRE_LANES(shuffle)(high_ab, high_cd, 0x44));
  v[3] = reinterpret_cast<vfloat>(QUIRE_LANES(shuffle)(high_ab, high_cd, 0xee));
#undef QUIRE_LANES
#else
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < i; ++j) {
      const float upper = v[j][i];
      v[j][i] = v[i][j], v[i][j] = upper;
    }
#endif
}

}  // namespace quire
