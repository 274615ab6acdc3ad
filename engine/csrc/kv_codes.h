// Keys and values in eight bits, to the bit as kvpool/quant.py defines them: a cell holds the codes of all kv heads, then
// a half-float scale for each. Strides of a quantized pool are in bytes.
#pragma once
#include <cmath>
#include <type_traits>

#include "simd.h"

namespace quire {

struct Int8Code { int8_t bits; };
struct Float8Code { uint8_t bits; };  // e4m3: sign, 4 bits of exponent (bias 7), 3 of mantissa; largest 448

template <typename KV>
constexpr bool is_code = std::is_same_v<KV, Int8Code> || std::is_same_v<KV, Float8Code>;

constexpr float kMaxScale = 65504.0f;
inline float largest_code(Int8Code) { return 127.0f; }
inline float largest_code(Float8Code) { return 448.0f; }

template <typename Code>
Float16* scale_of(Code* cell, int num_kv_heads, int head_dim, int kv_head) {
  return reinterpret_cast<Float16*>(cell + num_kv_heads * head_dim) + kv_head;
}
template <typename Code>
const Float16* scale_of(const Code* cell, int num_kv_heads, int head_dim, int kv_head) {
  return reinterpret_cast<const Float16*>(cell + num_kv_heads * head_dim) + kv_head;
}

// kLanes codes as floats, to be multiplied with kUnit of them and their scale.
template <typename Code>
constexpr float kUnit = 1.0f;
inline vfloat load_floats(const Int8Code* p) { return widen_int8(&p->bits); }
#if defined(__F16C__)
template <>
constexpr float kUnit<Float8Code> = 256.0f;  // as a half float's bits: the exponent's bias from 7 to 15
inline vfloat load_floats(const Float8Code* p) {
  typedef int8_t vbyte __attribute__((vector_size(kLanes), aligned(1), may_alias));
  typedef int16_t vword __attribute__((vector_size(2 * kLanes)));
  const vword code = __builtin_convertvector(*reinterpret_cast<const vbyte*>(p), vword);
  const vword half = (code << 7) & static_cast<int16_t>(0xbfff);  // the sign is also where an exponent's bit belongs
  return load_half(reinterpret_cast<const Float16*>(&half));
}
#else
inline vfloat load_floats(const Float8Code* p) {
  const vint code = widen_uint8(&p->bits), magnitude = code & 127;
  const vint normal = (magnitude << 20) + (120 << 23);  // the exponent's bias from 7 to 127
  const vint small = reinterpret_cast<vint>(__builtin_convertvector(magnitude, vfloat) * splat(0x1p-9f));
  return reinterpret_cast<vfloat>((magnitude < 8 ? small : normal) | (code & 128) << 24);
}
#endif

inline void to_code(float x, Int8Code* out) { out->bits = static_cast<int8_t>(std::nearbyint(x)); }
inline void to_code(float x, Float8Code* out) {  // |x| <= 448; ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 24 & 128u, magnitude = bits & 0x7fffffffu;
  uint32_t code;
  if (magnitude < 0x3c800000u) {  // below 2^-6: steps of 2^-9
    float y;
    std::memcpy(&y, &magnitude, 4);
    code = static_cast<uint32_t>(std::nearbyint(y * 512.0f));
  } else {
    code = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  }
  out->bits = static_cast<uint8_t>(sign | code);
}

// `quant.quantize` for one head.
template <typename Code>
void quantize_head(const float* x, Code* codes, Float16* scale, int count) {
  const float limit = largest_code(Code{});
  float top = 0.0f;
  int num_nan = 0;
  for (int i = 0; i < count; ++i) {
    const float magnitude = std::fabs(x[i]);
    num_nan += magnitude != magnitude;
    top = magnitude > top ? magnitude : top;
  }
  const float wanted = top * (1.0f / limit);
  from_float(num_nan ? NAN : wanted < kMaxScale ? wanted : kMaxScale, scale);
  const float stored = to_float(*scale), inverse = stored == 0.0f ? 0.0f : 1.0f / stored;
  for (int i = 0; i < count; ++i) {
    float y = x[i] * inverse;
    y = y > limit ? limit : y < -limit ? -limit : y;
    to_code(y == y ? y : 0.0f, codes + i);
  }
}

}  // namespace quire
