// SPDX-License-Identifier: Apache-2.0
// One step of a sum over inputs, for each pair of row type and weight type and each instruction
// set.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/simd.h"
#include "gemm/unrolled_cpu.h"
#include "gemm/weight.h"

namespace specops::SPECOPS_ISA {

// e4m3 values times 2^-8: shifted left by seven bits, the byte is a float16, for subnormal values
// as well.
struct E4M3 {
  uint8_t bits;
};
constexpr float kE4M3Unit = 0x1p8f;

inline F32x16 load(const E4M3* p) {
#if defined(SPECOPS_AVX512) || defined(SPECOPS_AVX2)
  __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  words = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(-0x4080));
#endif
#if defined(SPECOPS_AVX512)
  return {_mm512_cvtph_ps(words)};
#elif defined(SPECOPS_AVX2)
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(words)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(words, 1))};
#elif defined(SPECOPS_NEON)
  int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(&p->bits));
  auto half = [](int16x8_t words) {
    words = vandq_s16(vshlq_n_s16(words, 7), vdupq_n_s16(-0x4080));
    return vreinterpretq_f16_s16(words);
  };
  float16x8_t lo = half(vmovl_s8(vget_low_s8(bytes))), hi = half(vmovl_high_s8(bytes));
  return {vcvt_f32_f16(vget_low_f16(lo)),
          vcvt_high_f32_f16(lo),
          vcvt_f32_f16(vget_low_f16(hi)),
          vcvt_high_f32_f16(hi)};
#else
  F32x16 out;
  for (int i = 0; i < 16; ++i) {
    uint16_t word = (p[i].bits & 0x80) << 8 | (p[i].bits & 0x7f) << 7;
    out.v[i] = to_float(float16{word});
  }
  return out;
#endif
}

namespace {

// One step for a row type and a weight type. A step has parts that run one after another: each
// loads a vector of weights for 16 outputs and multiplies it by the same inputs of one row. `Input`
// is the type in which a tile reads inputs. Without bfloat16 dot products it is float: inputs are
// converted once, because every block of weights uses them again. kGroupSteps: number of steps
// after which sums are scaled, added to the totals and restarted; 0: never.
template <typename Row, typename Weight>
struct Step;

inline const uint32_t* words_at(const char* p) { return reinterpret_cast<const uint32_t*>(p); }

// Common part of the steps for weights of the same type as the rows.
template <typename T>
struct PlainStep {
  using Row = T;
  using Weight = T;
  static constexpr int kInputs = 4 / sizeof(T);
  static constexpr int64_t kBytes = 4 * kWeightBlock;  // per block
  static constexpr int kGroupSteps = 0;
};

#if defined(SPECOPS_AVX512) || defined(SPECOPS_AVX2) || defined(SPECOPS_NEON)
#if defined(SPECOPS_AVX2)
using Spread = const float*;  // broadcast right before the product
inline Spread spread(const float* x) { return x; }
#elif defined(SPECOPS_NEON)
using Spread = float32x4_t;  // one number in every lane
inline Spread spread(const float* x) { return vdupq_n_f32(*x); }
#else
using Spread = F32x16;
inline Spread spread(const float* x) { return set1(*x); }
#endif

// Computes sum += w * x in the registers of the sum. Without inline assembly, gcc would move sums
// between registers on AVX2 and NEON and spill some of them; on AVX2, it would also broadcast
// inputs long before their products.
inline void add_product(F32x16& sum, F32x16 w, Spread x) {
#if defined(SPECOPS_AVX2)
  __m256 lo = sum.lo, hi = sum.hi, spread;
  asm volatile(
      "vbroadcastss %5, %2\n\t"
      "vfmadd231ps %3, %2, %0\n\t"
      "vfmadd231ps %4, %2, %1"
      : "+x"(lo), "+x"(hi), "=&x"(spread)
      : "x"(w.lo), "x"(w.hi), "m"(*x));
  sum = {lo, hi};
#elif defined(SPECOPS_NEON)
  float32x4_t a = sum.q[0], b = sum.q[1], c = sum.q[2], d = sum.q[3];
  asm("fmla %0.4s, %1.4s, %2.4s" : "+w"(a) : "w"(w.q[0]), "w"(x));
  asm("fmla %0.4s, %1.4s, %2.4s" : "+w"(b) : "w"(w.q[1]), "w"(x));
  asm("fmla %0.4s, %1.4s, %2.4s" : "+w"(c) : "w"(w.q[2]), "w"(x));
  asm("fmla %0.4s, %1.4s, %2.4s" : "+w"(d) : "w"(w.q[3]), "w"(x));
  sum = {{a, b, c, d}};
#else
  sum = fma(w, x, sum);
#endif
}

#if defined(SPECOPS_AVX2)
// Adds a product with an input that stays broadcast in a register, because all blocks of a tile of
// few rows use it.
using Held = __m256;
inline Held hold(Spread x) {
  __m256 spread;
  asm volatile("vbroadcastss %1, %0" : "=x"(spread) : "m"(*x));
  return spread;
}
inline void add_product(F32x16& sum, F32x16 w, Held x) {
  __m256 lo = sum.lo, hi = sum.hi;
  asm volatile("vfmadd231ps %1, %2, %0" : "+x"(lo) : "x"(w.lo), "x"(x));
  asm volatile("vfmadd231ps %1, %2, %0" : "+x"(hi) : "x"(w.hi), "x"(x));
  sum = {lo, hi};
}
#endif

template <>
struct Step<bfloat16, bfloat16> : PlainStep<bfloat16> {
  using Sum = F32x16;
#if defined(SPECOPS_ISA_avx512_bf16) || defined(SPECOPS_ISA_neon_bf16)
  using Input = bfloat16;
  static constexpr int kParts = 1;
  static constexpr bool kByBlock = false;
  static BF16x32 weights(const char* p, int) { return load_pairs(words_at(p)); }
  static BF16x32 input(const bfloat16* p, int) { return broadcast_pair(p); }
  static void dot(Sum& sum, BF16x32 w, BF16x32 x) { sum = dot_pairs(sum, w, x); }
#else
  // Odd inputs first, as in vdpbf16ps.
  using Input = float;
  static constexpr int kParts = 2;
  static constexpr bool kByBlock = true;
  static F32x16 weights(const char* p, int part) {
    BF16x32 pairs = load_pairs(words_at(p));
    return part == 0 ? odd_floats(pairs) : even_floats(pairs);
  }
  static Spread input(const float* p, int part) { return spread(p + 1 - part); }
  static void dot(Sum& sum, F32x16 w, Spread x) { add_product(sum, w, x); }
#endif
};

template <>
struct Step<float, float> : PlainStep<float> {
  using Sum = F32x16;
  using Input = float;
  static constexpr int kParts = 1;
  static constexpr bool kByBlock = false;
  static F32x16 weights(const char* p, int) { return load(reinterpret_cast<const float*>(p)); }
  static Spread input(const float* p, int) { return spread(p); }
  static void dot(Sum& sum, F32x16 w, Spread x) { add_product(sum, w, x); }
};

inline void put(float* p, F32x16 sum) { store(p, sum); }
#else
// Instead of the arrays of simd.h, which would be in memory here: vectors of four stay in registers
// on all CPUs.
using Float4 = float __attribute__((vector_size(16)));
using Word4 = uint32_t __attribute__((vector_size(16)));

template <typename V>
struct Quad {
  V q[4] = {};
};

inline void add_product(Quad<Float4>& sum, const Quad<Float4>& w, float x) {
  unrolled<4>([&](int i) SPECOPS_INLINE {
    for (int lane = 0; lane < 4; ++lane) {
      sum.q[i][lane] = __builtin_fmaf(w.q[i][lane], x, sum.q[i][lane]);
    }
  });
}

template <>
struct Step<bfloat16, bfloat16> : PlainStep<bfloat16> {
  using Sum = Quad<Float4>;
  using Input = float;
  static constexpr int kParts = 2;
  static constexpr bool kByBlock = true;
  static Quad<Float4> weights(const char* p, int part) {
    Quad<Float4> out;
    unrolled<4>([&](int i) SPECOPS_INLINE {
      Word4 word;
      std::memcpy(&word, p + 16 * i, 16);
      out.q[i] = (Float4)(part == 0 ? word & 0xffff0000u : word << 16);
    });
    return out;
  }
  static float input(const float* p, int part) { return p[1 - part]; }
  static void dot(Sum& sum, const Quad<Float4>& w, float x) { add_product(sum, w, x); }
};

template <>
struct Step<float, float> : PlainStep<float> {
  using Sum = Quad<Float4>;
  using Input = float;
  static constexpr int kParts = 1;
  static constexpr bool kByBlock = false;
  static Quad<Float4> weights(const char* p, int) {
    Quad<Float4> out;
    unrolled<4>([&](int i) SPECOPS_INLINE { std::memcpy(&out.q[i], p + 16 * i, 16); });
    return out;
  }
  static float input(const float* p, int) { return *p; }
  static void dot(Sum& sum, const Quad<Float4>& w, float x) { add_product(sum, w, x); }
};

inline void put(float* p, const Quad<Float4>& sum) {
  unrolled<4>([&](int i) SPECOPS_INLINE { std::memcpy(p + 4 * i, &sum.q[i], 16); });
}
#endif

template <typename T>
struct Step<T, E4M3> {
  using Row = T;
  using Weight = E4M3;
  using Sum = F32x16;
  using Input = float;
  static constexpr int kInputs = 2;
  static constexpr int64_t kBytes = 2 * kWeightBlock;
  static constexpr int kGroupSteps = kFp8Group / kInputs;
  static constexpr int kParts = 2;
  static constexpr bool kByBlock = true;
  static F32x16 weights(const char* p, int part) {
    return load(reinterpret_cast<const E4M3*>(p) + part * kWeightBlock);
  }
#if defined(SPECOPS_AVX512) || defined(SPECOPS_AVX2) || defined(SPECOPS_NEON)
  static Spread input(const float* p, int part) { return spread(p + part); }
  static void dot(Sum& sum, F32x16 w, Spread x) { add_product(sum, w, x); }
#else
  static F32x16 input(const float* p, int part) { return set1(p[part]); }
  static void dot(Sum& sum, F32x16 w, F32x16 x) { sum = fma(w, x, sum); }
#endif
};

#if defined(SPECOPS_ISA_avx512_bf16) || defined(SPECOPS_ISA_neon_bf16)
template <>
struct Step<bfloat16, E4M3> {
  using Row = bfloat16;
  using Weight = E4M3;
  using Sum = F32x16;
  using Input = bfloat16;
  static constexpr int kInputs = 2;
  static constexpr int64_t kBytes = 2 * kWeightBlock;
  static constexpr int kGroupSteps = kFp8Group / kInputs;
  static constexpr int kParts = 1;
  static constexpr bool kByBlock = true;
  static BF16x32 weights(const char* p, int) {
    const auto* codes = reinterpret_cast<const E4M3*>(p);
    return exact_pairs(load(codes), load(codes + kWeightBlock));
  }
  static BF16x32 input(const bfloat16* p, int) { return broadcast_pair(p); }
  static void dot(Sum& sum, BF16x32 w, BF16x32 x) { sum = dot_pairs(sum, w, x); }

 private:
  // Packs floats that are exact in bfloat16, by taking the upper halves of their words.
  static BF16x32 exact_pairs(F32x16 even, F32x16 odd) {
#if defined(SPECOPS_AVX512)
    __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even.v), 16);
    __m512i high = _mm512_and_si512(_mm512_castps_si512(odd.v), _mm512_set1_epi32(-0x10000));
    return {_mm512_or_si512(low, high)};
#else
    return quarters<BF16x32>([&](int i) {
      uint32x4_t low = vshrq_n_u32(vreinterpretq_u32_f32(even.q[i]), 16);
      uint32x4_t high = vreinterpretq_u32_f32(odd.q[i]);
      return vorrq_u32(low, vandq_u32(high, vdupq_n_u32(0xffff0000u)));
    });
#endif
  }
};
#endif

// Returns the number of steps of a weight with num_inputs inputs.
template <typename S>
int64_t steps_of(int64_t num_inputs) {
  return (num_inputs + S::kInputs - 1) / S::kInputs;
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
