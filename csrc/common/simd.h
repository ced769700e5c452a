// SPDX-License-Identifier: Apache-2.0
// Vectors of sixteen floats, and of thirty-two bf16 in sixteen pairs, implemented for every
// instruction set. CPU kernels are written once against these types. Reductions use one fixed tree.
// Included only by *_cpu.cpp files, which are compiled once per instruction set with SPECOPS_ISA
// set to the name of the set.
#pragma once

#ifndef SPECOPS_ISA
#error "simd.h belongs to CPU kernel files, which CMake compiles once per instruction set"
#endif

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/dtype.h"

#if defined(SPECOPS_ISA_avx512) || defined(SPECOPS_ISA_avx512_vnni) || \
    defined(SPECOPS_ISA_avx512_bf16) || defined(SPECOPS_ISA_amx)
#define SPECOPS_AVX512 1
#elif defined(SPECOPS_ISA_avx2) || defined(SPECOPS_ISA_avx2_vnni)
#define SPECOPS_AVX2 1
#elif defined(SPECOPS_ISA_neon) || defined(SPECOPS_ISA_neon_dot) || defined(SPECOPS_ISA_neon_bf16)
#define SPECOPS_NEON 1
#endif

#if defined(SPECOPS_AVX512) || defined(SPECOPS_AVX2)
#include <immintrin.h>
#elif defined(SPECOPS_NEON)
#include <arm_neon.h>
#endif

namespace specops::SPECOPS_ISA {

constexpr int kLanes = 16;

#if defined(SPECOPS_AVX512)
struct F32x16 {
  __m512 v;
};
struct BF16x32 {  // lane i holds elements 2i (low half) and 2i + 1 (high half)
  __m512i v;
};
#elif defined(SPECOPS_AVX2)
struct F32x16 {
  __m256 lo, hi;
};
struct BF16x32 {
  __m256i lo, hi;
};
#elif defined(SPECOPS_NEON)
struct F32x16 {
  float32x4_t q[4];
};
struct BF16x32 {
  uint32x4_t q[4];
};

// Calls fn for each of the four quarters of a vector. The indices are compile-time constants, so
// that the quarters stay in registers.
template <typename Vec, typename Fn>
__attribute__((always_inline)) inline Vec quarters(Fn&& fn) {
  return {fn(0), fn(1), fn(2), fn(3)};
}
inline float32x4_t max_quarter(float32x4_t a, float32x4_t b) {
  return vbslq_f32(vcgtq_f32(a, b), a, b);
}
inline float32x4_t min_quarter(float32x4_t a, float32x4_t b) {
  return vbslq_f32(vcltq_f32(a, b), a, b);
}
#else
struct F32x16 {
  float v[16];
};
struct BF16x32 {
  uint32_t v[16];
};
#endif

#if defined(SPECOPS_AVX512)
#define SPECOPS_LANEWISE(name, avx512, avx2, neon, portable) \
  inline F32x16 name(F32x16 a, F32x16 b) { return {avx512(a.v, b.v)}; }
#elif defined(SPECOPS_AVX2)
#define SPECOPS_LANEWISE(name, avx512, avx2, neon, portable) \
  inline F32x16 name(F32x16 a, F32x16 b) { return {avx2(a.lo, b.lo), avx2(a.hi, b.hi)}; }
#elif defined(SPECOPS_NEON)
#define SPECOPS_LANEWISE(name, avx512, avx2, neon, portable)              \
  inline F32x16 name(F32x16 a, F32x16 b) {                                \
    return quarters<F32x16>([&](int i) { return neon(a.q[i], b.q[i]); }); \
  }
#else
#define SPECOPS_LANEWISE(name, avx512, avx2, neon, portable) \
  inline F32x16 name(F32x16 a, F32x16 b) {                   \
    F32x16 out;                                              \
    for (int i = 0; i < 16; ++i) out.v[i] = portable;        \
    return out;                                              \
  }
#endif
SPECOPS_LANEWISE(add, _mm512_add_ps, _mm256_add_ps, vaddq_f32, (a.v[i] + b.v[i]))
SPECOPS_LANEWISE(sub, _mm512_sub_ps, _mm256_sub_ps, vsubq_f32, (a.v[i] - b.v[i]))
SPECOPS_LANEWISE(mul, _mm512_mul_ps, _mm256_mul_ps, vmulq_f32, (a.v[i] * b.v[i]))
SPECOPS_LANEWISE(div, _mm512_div_ps, _mm256_div_ps, vdivq_f32, (a.v[i] / b.v[i]))
// max and min return b if a is NaN, as the x86 instructions do.
SPECOPS_LANEWISE(
    max, _mm512_max_ps, _mm256_max_ps, max_quarter, (a.v[i] > b.v[i] ? a.v[i] : b.v[i]))
SPECOPS_LANEWISE(
    min, _mm512_min_ps, _mm256_min_ps, min_quarter, (a.v[i] < b.v[i] ? a.v[i] : b.v[i]))
#undef SPECOPS_LANEWISE

inline F32x16 set1(float x) {
#if defined(SPECOPS_AVX512)
  return {_mm512_set1_ps(x)};
#elif defined(SPECOPS_AVX2)
  return {_mm256_set1_ps(x), _mm256_set1_ps(x)};
#elif defined(SPECOPS_NEON)
  return quarters<F32x16>([&](int) { return vdupq_n_f32(x); });
#else
  F32x16 out;
  for (int i = 0; i < 16; ++i) out.v[i] = x;
  return out;
#endif
}

inline F32x16 zero() { return set1(0.0f); }

// Returns a * b + c, rounded once.
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
#if defined(SPECOPS_AVX512)
  return {_mm512_fmadd_ps(a.v, b.v, c.v)};
#elif defined(SPECOPS_AVX2)
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
#elif defined(SPECOPS_NEON)
  return quarters<F32x16>([&](int i) { return vfmaq_f32(c.q[i], a.q[i], b.q[i]); });
#else
  F32x16 out;
  for (int i = 0; i < 16; ++i) out.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
  return out;
#endif
}

inline float scalar_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

inline F32x16 load(const float* p) {
#if defined(SPECOPS_AVX512)
  return {_mm512_loadu_ps(p)};
#elif defined(SPECOPS_AVX2)
  return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
#elif defined(SPECOPS_NEON)
  return quarters<F32x16>([&](int i) { return vld1q_f32(p + 4 * i); });
#else
  F32x16 out;
  std::memcpy(out.v, p, 64);
  return out;
#endif
}

inline F32x16 load(const bfloat16* p) {
#if defined(SPECOPS_AVX512)
  __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
#elif defined(SPECOPS_AVX2)
  __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(a), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(b), 16))};
#elif defined(SPECOPS_NEON)
  auto* words = reinterpret_cast<const uint16_t*>(p);
  return quarters<F32x16>(
      [&](int i) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(words + 4 * i), 16)); });
#else
  F32x16 out;
  for (int i = 0; i < 16; ++i) out.v[i] = to_float(p[i]);
  return out;
#endif
}

inline F32x16 load(const float16* p) {
#if defined(SPECOPS_AVX512)
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
#elif defined(SPECOPS_AVX2)
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
#elif defined(SPECOPS_NEON)
  auto* words = reinterpret_cast<const uint16_t*>(p);
  return quarters<F32x16>(
      [&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(words + 4 * i))); });
#else
  F32x16 out;
  for (int i = 0; i < 16; ++i) out.v[i] = to_float(p[i]);
  return out;
#endif
}

inline void store(float* p, F32x16 x) {
#if defined(SPECOPS_AVX512)
  _mm512_storeu_ps(p, x.v);
#elif defined(SPECOPS_AVX2)
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
#elif defined(SPECOPS_NEON)
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.q[i]);
#else
  std::memcpy(p, x.v, 64);
#endif
}

// Rounds each lane to bfloat16 and returns it in the upper half of the lane: to nearest, ties to
// even; NaN stays NaN. The lower half is undefined.
#if defined(SPECOPS_AVX512)
inline __m512i bf16_words(F32x16 x) {
  __m512i word = _mm512_castps_si512(x.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(word, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(word, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(rounded, nan, word, _mm512_set1_epi32(0x400000));
}
#elif defined(SPECOPS_AVX2)
inline __m256i bf16_words(__m256 x) {
  __m256i word = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(word, 16), _mm256_set1_epi32(1));
  __m256i sum = _mm256_add_epi32(word, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i quiet = _mm256_or_si256(word, _mm256_set1_epi32(0x400000));
  __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  return _mm256_castps_si256(
      _mm256_blendv_ps(_mm256_castsi256_ps(sum), _mm256_castsi256_ps(quiet), nan));
}
#endif

// Stores lanes as bfloat16, rounded as in bf16_words.
inline void store(bfloat16* p, F32x16 x) {
#if defined(SPECOPS_AVX512)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(bf16_words(x), 16)));
#elif defined(SPECOPS_AVX2)
  // The pack instruction interleaves 128-bit halves, so the order is restored afterwards.
  __m256i words = _mm256_packus_epi32(_mm256_srli_epi32(bf16_words(x.lo), 16),
                                      _mm256_srli_epi32(bf16_words(x.hi), 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(words, 0xd8));
#elif defined(SPECOPS_NEON)
  auto* words = reinterpret_cast<uint16_t*>(p);
  for (int i = 0; i < 4; ++i) {
    uint32x4_t word = vreinterpretq_u32_f32(x.q[i]);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(word, 16), vdupq_n_u32(1));
    uint32x4_t sum = vaddq_u32(word, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    uint32x4_t quiet = vorrq_u32(word, vdupq_n_u32(0x400000));
    uint32x4_t number = vceqq_f32(x.q[i], x.q[i]);
    vst1_u16(words + 4 * i, vshrn_n_u32(vbslq_u32(number, sum, quiet), 16));
  }
#else
  float lanes[16];
  store(lanes, x);
  for (int i = 0; i < 16; ++i) p[i] = from_float<bfloat16>(lanes[i]);
#endif
}

inline void store(float16* p, F32x16 x) {
#if defined(SPECOPS_AVX512)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(SPECOPS_AVX2)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8),
                   _mm256_cvtps_ph(x.hi, _MM_FROUND_TO_NEAREST_INT));
#elif defined(SPECOPS_NEON)
  auto* words = reinterpret_cast<uint16_t*>(p);
  for (int i = 0; i < 4; ++i) vst1_u16(words + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.q[i])));
#else
  for (int i = 0; i < 16; ++i) p[i] = from_float<float16>(x.v[i]);
#endif
}

// Rounds each lane once to a value of T, like a store followed by a load.
template <typename T>
inline F32x16 round_to(F32x16 x) {
  T lanes[kLanes];
  store(lanes, x);
  return load(lanes);
}

template <>
inline F32x16 round_to<float>(F32x16 x) {
  return x;
}

#if defined(SPECOPS_AVX512)
template <>
inline F32x16 round_to<bfloat16>(F32x16 x) {
  return {_mm512_castsi512_ps(_mm512_and_si512(bf16_words(x), _mm512_set1_epi32(-65536)))};
}
#elif defined(SPECOPS_AVX2)
template <>
inline F32x16 round_to<bfloat16>(F32x16 x) {
  __m256i mask = _mm256_set1_epi32(-65536);
  return {_mm256_castsi256_ps(_mm256_and_si256(bf16_words(x.lo), mask)),
          _mm256_castsi256_ps(_mm256_and_si256(bf16_words(x.hi), mask))};
}
#endif

// Stores lanes whose values are exact in T, without rounding.
template <typename T>
inline void store_exact(T* p, F32x16 x) {
  store(p, x);
}

#if defined(SPECOPS_AVX512)
template <>
inline void store_exact<bfloat16>(bfloat16* p, F32x16 x) {
  __m512i words = _mm512_srli_epi32(_mm512_castps_si512(x.v), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(words));
}
#endif

// Loads the first n (0..16) elements; the other lanes are set to `fill`. Never reads memory past p
// + n.
template <typename T>
inline F32x16 load_partial(const T* p, int n, float fill = 0.0f) {
  if (n >= kLanes) return load(p);
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = i < n ? to_float(p[i]) : fill;
  return load(lanes);
}

template <typename T>
inline void store_partial(T* p, F32x16 x, int n) {
  if (n >= kLanes) return store(p, x);
  float lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < n; ++i) p[i] = from_float<T>(lanes[i]);
}

// Sums the lanes in a fixed tree: adds lanes i and i + 8, then i + 4, i + 2 and i + 1.
inline float reduce_add(F32x16 x) {
  float t[16];
  store(t, x);
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) t[i] = t[i] + t[i + width];
  }
  return t[0];
}

inline float reduce_max(F32x16 x) {
  float t[16];
  store(t, x);
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) t[i] = t[i] > t[i + width] ? t[i] : t[i + width];
  }
  return t[0];
}

// Returns e^x to about 1 ulp: 0 below -87.3 (so -inf gives exactly 0), inf above 88.7, and NaN for
// NaN.
inline F32x16 exp(F32x16 x) {
  constexpr float kLog2e = 1.44269504088896341f;
  constexpr float kLn2Hi = 0.693145751953125f, kLn2Lo = 1.42860682030941723212e-6f;
#if defined(SPECOPS_AVX512)
  F32x16 n{_mm512_roundscale_ps(_mm512_mul_ps(x.v, _mm512_set1_ps(kLog2e)),
                                _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
#elif defined(SPECOPS_AVX2)
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  F32x16 n{_mm256_round_ps(_mm256_mul_ps(x.lo, _mm256_set1_ps(kLog2e)), kNearest),
           _mm256_round_ps(_mm256_mul_ps(x.hi, _mm256_set1_ps(kLog2e)), kNearest)};
#elif defined(SPECOPS_NEON)
  F32x16 n = quarters<F32x16>([&](int i) { return vrndnq_f32(vmulq_n_f32(x.q[i], kLog2e)); });
#else
  F32x16 n;
  for (int i = 0; i < 16; ++i) n.v[i] = std::nearbyint(x.v[i] * kLog2e);
#endif
  F32x16 r = fma(n, set1(-kLn2Hi), x);
  r = fma(n, set1(-kLn2Lo), r);
  F32x16 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, set1(1.0f)));
#if defined(SPECOPS_AVX512)
  F32x16 out{_mm512_scalef_ps(p.v, n.v)};
  __mmask16 tiny = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-87.3f), _CMP_LT_OQ);
  __mmask16 huge = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(88.7f), _CMP_GT_OQ);
  out.v = _mm512_mask_mov_ps(out.v, tiny, _mm512_setzero_ps());
  out.v = _mm512_mask_mov_ps(out.v, huge, _mm512_set1_ps(INFINITY));
  return out;
#elif defined(SPECOPS_AVX2)
  // Scale in two steps, because 2^128 is not a float although the product may be.
  auto scaled = [](__m256 value, __m256 power, __m256 input) {
    __m256i exponent = _mm256_cvttps_epi32(power), bias = _mm256_set1_epi32(127);
    __m256i half =
        _mm256_srai_epi32(_mm256_sub_epi32(exponent, _mm256_srai_epi32(exponent, 31)), 1);
    __m256i rest = _mm256_sub_epi32(exponent, half);
    __m256i a = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
    __m256i b = _mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23);
    __m256 out =
        _mm256_mul_ps(_mm256_mul_ps(value, _mm256_castsi256_ps(a)), _mm256_castsi256_ps(b));
    __m256 tiny = _mm256_cmp_ps(input, _mm256_set1_ps(-87.3f), _CMP_LT_OQ);
    __m256 huge = _mm256_cmp_ps(input, _mm256_set1_ps(88.7f), _CMP_GT_OQ);
    __m256 nan = _mm256_cmp_ps(input, input, _CMP_UNORD_Q);
    out = _mm256_blendv_ps(out, value, nan);
    out = _mm256_andnot_ps(tiny, out);
    return _mm256_blendv_ps(out, _mm256_set1_ps(INFINITY), huge);
  };
  return {scaled(p.lo, n.lo, x.lo), scaled(p.hi, n.hi, x.hi)};
#elif defined(SPECOPS_NEON)
  return quarters<F32x16>([&](int i) {
    // Scale in two steps, as above.
    int32x4_t exponent = vcvtq_s32_f32(n.q[i]), bias = vdupq_n_s32(127);
    int32x4_t half = vshrq_n_s32(vsubq_s32(exponent, vshrq_n_s32(exponent, 31)), 1);
    int32x4_t rest = vsubq_s32(exponent, half);
    float32x4_t a = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(half, bias), 23));
    float32x4_t b = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(rest, bias), 23));
    float32x4_t out = vmulq_f32(vmulq_f32(p.q[i], a), b);
    uint32x4_t tiny = vcltq_f32(x.q[i], vdupq_n_f32(-87.3f));
    uint32x4_t huge = vcgtq_f32(x.q[i], vdupq_n_f32(88.7f));
    out = vbslq_f32(vceqq_f32(x.q[i], x.q[i]), out, p.q[i]);
    out = vbslq_f32(tiny, vdupq_n_f32(0.0f), out);
    return vbslq_f32(huge, vdupq_n_f32(INFINITY), out);
  });
#else
  float lanes[16], scale[16], input[16];
  store(lanes, p);
  store(scale, n);
  store(input, x);
  for (int i = 0; i < 16; ++i) {
    if (input[i] < -87.3f) {
      lanes[i] = 0.0f;
    } else if (input[i] > 88.7f) {
      lanes[i] = INFINITY;
    } else if (input[i] == input[i]) {
      int exponent = static_cast<int>(scale[i]);
      // Scale in two steps, because 2^128 is not a float although the product may be.
      int half = exponent / 2;
      uint32_t a = static_cast<uint32_t>(half + 127) << 23;
      uint32_t b = static_cast<uint32_t>(exponent - half + 127) << 23;
      float fa, fb;
      std::memcpy(&fa, &a, 4);
      std::memcpy(&fb, &b, 4);
      lanes[i] = lanes[i] * fa * fb;
    }
  }
  return load(lanes);
#endif
}

inline BF16x32 load_pairs(const void* p) {
#if defined(SPECOPS_AVX512)
  return {_mm512_loadu_si512(p)};
#elif defined(SPECOPS_AVX2)
  auto* words = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(words), _mm256_loadu_si256(words + 1)};
#elif defined(SPECOPS_NEON)
  auto* bytes = static_cast<const uint8_t*>(p);  // no alignment required
  return quarters<BF16x32>([&](int i) { return vreinterpretq_u32_u8(vld1q_u8(bytes + 16 * i)); });
#else
  BF16x32 out;
  std::memcpy(out.v, p, 64);
  return out;
#endif
}

// Returns the pair (p[0], p[1]) in every lane.
inline BF16x32 broadcast_pair(const bfloat16* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
#if defined(SPECOPS_AVX512)
  return {_mm512_set1_epi32(word)};
#elif defined(SPECOPS_AVX2)
  return {_mm256_set1_epi32(word), _mm256_set1_epi32(word)};
#elif defined(SPECOPS_NEON)
  return quarters<BF16x32>([&](int) { return vdupq_n_u32(static_cast<uint32_t>(word)); });
#else
  BF16x32 out;
  for (int i = 0; i < 16; ++i) out.v[i] = static_cast<uint32_t>(word);
  return out;
#endif
}

// Return the even or the odd elements of the pairs as floats.
inline F32x16 even_floats(BF16x32 x) {
#if defined(SPECOPS_AVX512)
  return {_mm512_castsi512_ps(_mm512_slli_epi32(x.v, 16))};
#elif defined(SPECOPS_AVX2)
  return {_mm256_castsi256_ps(_mm256_slli_epi32(x.lo, 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(x.hi, 16))};
#elif defined(SPECOPS_NEON)
  return quarters<F32x16>([&](int i) { return vreinterpretq_f32_u32(vshlq_n_u32(x.q[i], 16)); });
#else
  F32x16 out;
  for (int i = 0; i < 16; ++i) {
    uint32_t word = x.v[i] << 16;
    std::memcpy(&out.v[i], &word, 4);
  }
  return out;
#endif
}

inline F32x16 odd_floats(BF16x32 x) {
#if defined(SPECOPS_AVX512)
  return {_mm512_castsi512_ps(_mm512_and_si512(x.v, _mm512_set1_epi32(-65536)))};
#elif defined(SPECOPS_AVX2)
  __m256i mask = _mm256_set1_epi32(-65536);
  return {_mm256_castsi256_ps(_mm256_and_si256(x.lo, mask)),
          _mm256_castsi256_ps(_mm256_and_si256(x.hi, mask))};
#elif defined(SPECOPS_NEON)
  uint32x4_t mask = vdupq_n_u32(0xffff0000u);
  return quarters<F32x16>([&](int i) { return vreinterpretq_f32_u32(vandq_u32(x.q[i], mask)); });
#else
  F32x16 out;
  for (int i = 0; i < 16; ++i) {
    uint32_t word = x.v[i] & 0xffff0000u;
    std::memcpy(&out.v[i], &word, 4);
  }
  return out;
#endif
}

// Computes acc[i] += a[2i] * b[2i] + a[2i + 1] * b[2i + 1]. Uses vdpbf16ps or bfdot if the CPU has
// them; these flush denormals and round in their own way. Otherwise computes two fused
// multiply-adds, the odd element first as in vdpbf16ps.
inline F32x16 dot_pairs(F32x16 acc, BF16x32 a, BF16x32 b) {
#if defined(SPECOPS_ISA_avx512_bf16)
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)b.v)};
#elif defined(SPECOPS_ISA_neon_bf16)
  return quarters<F32x16>([&](int i) {
    return vbfdotq_f32(acc.q[i], vreinterpretq_bf16_u32(a.q[i]), vreinterpretq_bf16_u32(b.q[i]));
  });
#else
  acc = fma(odd_floats(a), odd_floats(b), acc);
  return fma(even_floats(a), even_floats(b), acc);
#endif
}

}  // namespace specops::SPECOPS_ISA
