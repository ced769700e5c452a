// SPDX-License-Identifier: Apache-2.0
// Cache elements as operands of the matrix products of append_attention on the CPU, and vector
// operations that common/simd.h lacks.
#pragma once

#include <cmath>
#include <cstring>

#include "common/dtype.h"
#include "common/simd.h"

namespace specops::SPECOPS_ISA {
namespace {

// Inlines all calls inside a function. The compiler would otherwise leave some of these small loops
// as calls that pass their vectors through memory.
#define SPECOPS_FLATTEN __attribute__((noinline, flatten))

// Operand types for a cache element type. One step of P V multiplies kStep tokens, and each of the
// 16 lanes of Vec holds kStep elements.
template <typename T>
struct Element {
  using Prob = float;
  using Vec = F32x16;
  static constexpr int kStep = 1;
};
template <>
struct Element<bfloat16> {
  using Prob = bfloat16;
  using Vec = BF16x32;
  static constexpr int kStep = 2;
};

// Without 16-bit products, the CPU widens a row's query once for all tokens of a leaf. Of each 32
// bf16 columns, the even ones are stored first, then the odd ones.
template <typename T>
constexpr bool kWidensQueries = sizeof(T) == 2;
#if defined(SPECOPS_ISA_avx512_bf16) || defined(SPECOPS_ISA_neon_bf16)
template <>
constexpr bool kWidensQueries<bfloat16> = false;
#endif
template <int D>
inline void widen_query(const bfloat16* q, float* wide) {
  for (int i = 0; i < D; i += 32) {
    BF16x32 pairs = load_pairs(q + i);
    store(wide + i, even_floats(pairs));
    store(wide + i + kLanes, odd_floats(pairs));
  }
}
template <int D>
inline void widen_query(const float16* q, float* wide) {
  for (int i = 0; i < D; i += kLanes) store(wide + i, load(q + i));
}

inline F32x16 accumulate(F32x16 acc, BF16x32 a, BF16x32 b) { return dot_pairs(acc, a, b); }
inline F32x16 accumulate(F32x16 acc, F32x16 a, F32x16 b) { return fma(a, b, acc); }
inline BF16x32 broadcast_step(const bfloat16* p) { return broadcast_pair(p); }
inline F32x16 broadcast_step(const float* p) { return set1(*p); }

#if !defined(SPECOPS_AVX512)
// Loads 16 columns of one step of V, like columns() below. Used with many rows, when no registers
// are left for 32 columns.
inline F32x16 half_columns(const float* a, const float*) { return load(a); }
inline F32x16 half_columns(const float16* a, const float16*) { return load(a); }
inline BF16x32 half_columns(const bfloat16* a, const bfloat16* b) {
#if defined(SPECOPS_AVX2)
  __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
  __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
  return {_mm256_unpacklo_epi16(x, y), _mm256_unpackhi_epi16(x, y)};
#elif defined(SPECOPS_NEON)
  BF16x32 out;
  for (int i = 0; i < 2; ++i) {
    uint16x8_t x = vld1q_u16(&a[8 * i].bits), y = vld1q_u16(&b[8 * i].bits);
    out.q[2 * i] = vreinterpretq_u32_u16(vzip1q_u16(x, y));
    out.q[2 * i + 1] = vreinterpretq_u32_u16(vzip2q_u16(x, y));
  }
  return out;
#else
  BF16x32 out;
  for (int i = 0; i < 16; ++i) out.v[i] = a[i].bits | static_cast<uint32_t>(b[i].bits) << 16;
  return out;
#endif
}
#endif

// Loads 32 columns of one step of V as two vectors. For bf16, the rows a and b are interleaved, and
// the columns come in the order that needs no extra instructions; order_columns restores their
// order.
inline void columns(const float* a, const float*, F32x16 out[2]) {
  out[0] = load(a);
  out[1] = load(a + 16);
}
inline void columns(const float16* a, const float16*, F32x16 out[2]) {
  out[0] = load(a);
  out[1] = load(a + 16);
}
inline void columns(const bfloat16* a, const bfloat16* b, BF16x32 out[2]) {
#if defined(SPECOPS_AVX512)
  __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
  out[0].v = _mm512_unpacklo_epi16(x, y);
  out[1].v = _mm512_unpackhi_epi16(x, y);
#else
  out[0] = half_columns(a, b);
  out[1] = half_columns(a + kLanes, b + kLanes);
#endif
}

// Restores the column order in accumulators of 32 columns that columns() loaded.
template <typename T>
inline void order_columns([[maybe_unused]] F32x16* x) {
  if (Element<T>::kStep == 1) return;
#if defined(SPECOPS_AVX512)
  __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  __m512 a = x[0].v, b = x[1].v;
  x[0].v = _mm512_permutex2var_ps(a, first, b);
  x[1].v = _mm512_permutex2var_ps(a, second, b);
#elif defined(SPECOPS_AVX2)
  for (int i = 0; i < 2; ++i) {
    __m256 a = x[i].lo, b = x[i].hi;
    x[i].lo = _mm256_permute2f128_ps(a, b, 0x20);
    x[i].hi = _mm256_permute2f128_ps(a, b, 0x31);
  }
#endif
}

// Keeps the first (second) element of each pair if `first` (`second`) is set, and zeros the others.
inline BF16x32 keep_halves(BF16x32 x, bool first, bool second) {
  uint32_t bits = (first ? 0xffffu : 0u) | (second ? 0xffff0000u : 0u);
#if defined(SPECOPS_AVX512)
  return {_mm512_and_si512(x.v, _mm512_set1_epi32(static_cast<int>(bits)))};
#elif defined(SPECOPS_AVX2)
  __m256i mask = _mm256_set1_epi32(static_cast<int>(bits));
  return {_mm256_and_si256(x.lo, mask), _mm256_and_si256(x.hi, mask)};
#elif defined(SPECOPS_NEON)
  return quarters<BF16x32>([&](int i) { return vandq_u32(x.q[i], vdupq_n_u32(bits)); });
#else
  for (int i = 0; i < 16; ++i) x.v[i] &= bits;
  return x;
#endif
}
inline F32x16 keep_halves(F32x16 x, bool, bool) { return x; }

// Returns x in the lanes with a set bit, `other` elsewhere.
inline F32x16 keep_lanes(F32x16 x, uint32_t bits, float other = -INFINITY) {
#if defined(SPECOPS_AVX512)
  return {_mm512_mask_mov_ps(_mm512_set1_ps(other), static_cast<__mmask16>(bits), x.v)};
#elif defined(SPECOPS_AVX2)
  const __m256i low = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i word = _mm256_set1_epi32(static_cast<int>(bits));
  const __m256 rest = _mm256_set1_ps(other);
  auto kept = [&](__m256 v, __m256i lanes) {
    __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(word, lanes), lanes);
    return _mm256_blendv_ps(rest, v, _mm256_castsi256_ps(set));
  };
  return {kept(x.lo, low), kept(x.hi, _mm256_slli_epi32(low, 8))};
#elif defined(SPECOPS_NEON)
  const uint32x4_t low = {1, 2, 4, 8};
  return quarters<F32x16>([&](int i) {
    uint32x4_t set = vtstq_u32(vdupq_n_u32(bits >> (4 * i)), low);
    return vbslq_f32(set, x.q[i], vdupq_n_f32(other));
  });
#else
  float lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < kLanes; ++i) lanes[i] = bits >> i & 1 ? lanes[i] : other;
  return load(lanes);
#endif
}

inline void store_prob(float* p, F32x16 x) { store(p, x); }
inline void store_prob(bfloat16* p, F32x16 x) {
#if defined(SPECOPS_ISA_avx512_bf16)
  __m256bh rounded = _mm512_cvtneps_pbh(x.v);
  std::memcpy(static_cast<void*>(p), &rounded, 32);
#else
  store(p, x);
#endif
}

#if defined(SPECOPS_NEON)
// Returns the sums after the first two levels of the tree of reduce_add.
inline float32x4_t quarter_sums(F32x16 x) {
  return vaddq_f32(vaddq_f32(x.q[0], x.q[2]), vaddq_f32(x.q[1], x.q[3]));
}
#endif

// row_sum and row_max return what reduce_add and reduce_max return, in the same tree order but
// without going through memory.
inline float row_sum(F32x16 x) {
#if defined(SPECOPS_AVX512)
  __m256 t = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
#elif defined(SPECOPS_AVX2)
  __m256 t = _mm256_add_ps(x.lo, x.hi);
#endif
#if defined(SPECOPS_AVX512) || defined(SPECOPS_AVX2)
  __m128 u = _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
  u = _mm_add_ps(u, _mm_movehl_ps(u, u));
  return _mm_cvtss_f32(_mm_add_ss(u, _mm_movehdup_ps(u)));
#elif defined(SPECOPS_NEON)
  float32x4_t t = quarter_sums(x);
  return vpadds_f32(vadd_f32(vget_low_f32(t), vget_high_f32(t)));
#else
  return reduce_add(x);
#endif
}
inline float row_max(F32x16 x) {
#if defined(SPECOPS_AVX512)
  __m256 t = _mm256_max_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
#elif defined(SPECOPS_AVX2)
  __m256 t = _mm256_max_ps(x.lo, x.hi);
#endif
#if defined(SPECOPS_AVX512) || defined(SPECOPS_AVX2)
  __m128 u = _mm_max_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
  u = _mm_max_ps(u, _mm_movehl_ps(u, u));
  return _mm_cvtss_f32(_mm_max_ss(u, _mm_movehdup_ps(u)));
#elif defined(SPECOPS_NEON)
  float32x4_t t = max_quarter(max_quarter(x.q[0], x.q[2]), max_quarter(x.q[1], x.q[3]));
  t = max_quarter(t, vextq_f32(t, t, 2));
  return vgetq_lane_f32(max_quarter(t, vdupq_laneq_f32(t, 1)), 0);
#else
  return reduce_max(x);
#endif
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
