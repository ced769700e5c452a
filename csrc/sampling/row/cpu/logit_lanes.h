// SPDX-License-Identifier: Apache-2.0
// Comparisons and weights of sixteen logits at once.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/simd.h"

namespace specops::SPECOPS_ISA {
namespace {

// Returns x with NaN as -inf and +inf as the largest finite float.
inline F32x16 clean(F32x16 x) { return min(max(x, set1(-INFINITY)), set1(FLT_MAX)); }

// Adds w to `sum` in the lanes with x >= threshold.
inline F32x16 add_where_ge(F32x16 sum, F32x16 w, F32x16 x, F32x16 threshold) {
#if defined(SPECOPS_AVX512)
  __mmask16 mask = _mm512_cmp_ps_mask(x.v, threshold.v, _CMP_GE_OQ);
  return {_mm512_mask_add_ps(sum.v, mask, sum.v, w.v)};
#elif defined(SPECOPS_AVX2)
  __m256 lo = _mm256_and_ps(_mm256_cmp_ps(x.lo, threshold.lo, _CMP_GE_OQ), w.lo);
  __m256 hi = _mm256_and_ps(_mm256_cmp_ps(x.hi, threshold.hi, _CMP_GE_OQ), w.hi);
  return {_mm256_add_ps(sum.lo, lo), _mm256_add_ps(sum.hi, hi)};
#elif defined(SPECOPS_NEON)
  return quarters<F32x16>([&](int i) {
    uint32x4_t kept = vandq_u32(vcgeq_f32(x.q[i], threshold.q[i]), vreinterpretq_u32_f32(w.q[i]));
    return vaddq_f32(sum.q[i], vreinterpretq_f32_u32(kept));
  });
#else
  F32x16 out;
  for (int i = 0; i < 16; ++i) {
    out.v[i] = sum.v[i] + (x.v[i] >= threshold.v[i] ? w.v[i] : 0.0f);
  }
  return out;
#endif
}

// Returns the mask of the lanes with low <= x < high.
inline uint32_t lanes_between(F32x16 x, float low, float high) {
#if defined(SPECOPS_AVX512)
  __mmask16 mask = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(low), _CMP_GE_OQ);
  return _mm512_mask_cmp_ps_mask(mask, x.v, _mm512_set1_ps(high), _CMP_LT_OQ);
#elif defined(SPECOPS_AVX2)
  __m256 lows = _mm256_set1_ps(low), highs = _mm256_set1_ps(high);
  int lo = _mm256_movemask_ps(
      _mm256_and_ps(_mm256_cmp_ps(x.lo, lows, _CMP_GE_OQ), _mm256_cmp_ps(x.lo, highs, _CMP_LT_OQ)));
  int hi = _mm256_movemask_ps(
      _mm256_and_ps(_mm256_cmp_ps(x.hi, lows, _CMP_GE_OQ), _mm256_cmp_ps(x.hi, highs, _CMP_LT_OQ)));
  return static_cast<uint32_t>(lo | hi << 8);
#elif defined(SPECOPS_NEON)
  const uint32x4_t first = {1, 2, 4, 8};
  uint32x4_t bits = vdupq_n_u32(0);
  for (int i = 0; i < 4; ++i) {
    uint32x4_t between =
        vandq_u32(vcgeq_f32(x.q[i], vdupq_n_f32(low)), vcltq_f32(x.q[i], vdupq_n_f32(high)));
    bits = vorrq_u32(bits, vandq_u32(between, vshlq_u32(first, vdupq_n_s32(4 * i))));
  }
  return vaddvq_u32(bits);
#else
  uint32_t mask = 0;
  for (int i = 0; i < 16; ++i) mask |= uint32_t{x.v[i] >= low && x.v[i] < high} << i;
  return mask;
#endif
}

// Returns e^((x - origin) * inverse) for x <= origin, given scale = inverse * log2(e). The result
// is at most 1, and exactly 1 if x is the origin. The relative error is about 2e-7, plus 1e-7 per
// unit of the exponent. Returns 0 for -inf, NaN and results below 2^-125. (Cheaper than exp in
// simd.h, because no argument is above 0.)
inline F32x16 weight(F32x16 x, F32x16 origin, F32x16 scale) {
  F32x16 t = mul(sub(x, origin), scale);
  t = min(max(t, set1(-200.0f)), zero());
  // Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits.
  F32x16 magic = set1(12582912.0f);
  F32x16 shifted = add(t, magic);
  F32x16 r = sub(t, sub(shifted, magic));
  F32x16 p = set1(1.326472731e-3f);
  p = fma(p, r, set1(9.671512991e-3f));
  p = fma(p, r, set1(5.550733581e-2f));
  p = fma(p, r, set1(2.402224243e-1f));
  p = fma(p, r, set1(6.931470037e-1f));
  p = fma(p, r, set1(1.0f));
#if defined(SPECOPS_AVX512)
  __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23);
  __mmask16 normal = _mm512_cmp_ps_mask(t.v, _mm512_set1_ps(-125.5f), _CMP_GE_OQ);
  __m512i word = _mm512_maskz_add_epi32(normal, _mm512_castps_si512(p.v), exponent);
  return {_mm512_castsi512_ps(word)};
#elif defined(SPECOPS_AVX2)
  auto half = [](__m256 t, __m256 shifted, __m256 p) {
    __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
    __m256i word = _mm256_add_epi32(_mm256_castps_si256(p), exponent);
    __m256 normal = _mm256_cmp_ps(t, _mm256_set1_ps(-125.5f), _CMP_GE_OQ);
    return _mm256_and_ps(_mm256_castsi256_ps(word), normal);
  };
  return {half(t.lo, shifted.lo, p.lo), half(t.hi, shifted.hi, p.hi)};
#elif defined(SPECOPS_NEON)
  return quarters<F32x16>([&](int i) {
    uint32x4_t exponent = vshlq_n_u32(vreinterpretq_u32_f32(shifted.q[i]), 23);
    uint32x4_t word = vaddq_u32(vreinterpretq_u32_f32(p.q[i]), exponent);
    uint32x4_t normal = vcgeq_f32(t.q[i], vdupq_n_f32(-125.5f));
    return vreinterpretq_f32_u32(vandq_u32(word, normal));
  });
#else
  F32x16 out;
  for (int i = 0; i < 16; ++i) {
    uint32_t word, exponent;
    std::memcpy(&word, &p.v[i], 4);
    std::memcpy(&exponent, &shifted.v[i], 4);
    word = t.v[i] >= -125.5f ? word + (exponent << 23) : 0u;
    std::memcpy(&out.v[i], &word, 4);
  }
  return out;
#endif
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
