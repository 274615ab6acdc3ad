// Dot products of small integers, exact: every word of `sum` grows by those of the pairs or fours in its words.
#pragma once
#include "simd.h"

namespace quire {

// Two columns of 16 bits. Any weights of 8 bits and x of 16 fit: a group of 128 stays below 2^31 / 4.
inline vint dot2(vint sum, vint weights, vint x) {
#if defined(__AVX512VNNI__)
  return reinterpret_cast<vint>(_mm512_dpwssd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(weights),
                                                    reinterpret_cast<__m512i>(x)));
#elif defined(__AVX512BW__)
  return sum + reinterpret_cast<vint>(_mm512_madd_epi16(reinterpret_cast<__m512i>(weights),
                                                        reinterpret_cast<__m512i>(x)));
#elif defined(__AVX2__)
  return sum + reinterpret_cast<vint>(_mm256_madd_epi16(reinterpret_cast<__m256i>(weights),
                                                        reinterpret_cast<__m256i>(x)));
#else
  return sum + (weights << 16 >> 16) * (x << 16 >> 16) + (weights >> 16) * (x >> 16);
#endif
}

// Four columns of 8 bits. A pair of products, at most 2 * 127 * 127, fits 16 bits with the sign: `weights` and `x` are in
// -127..127.
#if defined(__AVX512BW__)
inline vint dot4(vint sum, vint weights, vint x) {
  const __m512i w = reinterpret_cast<__m512i>(weights), y = reinterpret_cast<__m512i>(x);
  const __m512i signed_x = _mm512_mask_sub_epi8(y, _mm512_movepi8_mask(w), _mm512_setzero_si512(), y);
#if defined(__AVX512VNNI__)
  return reinterpret_cast<vint>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), _mm512_abs_epi8(w), signed_x));
#else
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), signed_x);
  return sum + reinterpret_cast<vint>(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#endif
}
#elif defined(__AVX2__)
inline vint dot4(vint sum, vint weights, vint x) {
  const __m256i w = reinterpret_cast<__m256i>(weights);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(reinterpret_cast<__m256i>(x), w));
  return sum + reinterpret_cast<vint>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#else
inline vint dot4(vint sum, vint weights, vint x) {
  for (int shift = 24; shift >= 0; shift -= 8) sum += (weights << shift >> 24) * (x << shift >> 24);
  return sum;
}
#endif

// The two columns of 8 bits that lie in the even bytes of every word, or in the odd ones, as columns of 16.
inline vint widen_bytes(vint words, bool odd) {
  typedef int16_t vshort __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
  const vshort halves = reinterpret_cast<vshort>(words);
  return reinterpret_cast<vint>(odd ? halves >> 8 : halves << 8 >> 8);
}

}  // namespace quire
