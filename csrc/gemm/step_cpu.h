// SPDX-License-Identifier: Apache-2.0
// One step of a sum over inputs, for each pair of types of rows and weights and each instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/simd.h"
#include "gemm/integer_rows.h"
#include "gemm/weight.h"

namespace specops::SPECOPS_ISA {
namespace {

// Calls fn(0) to fn(kCount - 1) without a loop, so that arrays indexed by them become registers.
#define SPECOPS_INLINE __attribute__((always_inline))
template <int kCount, typename Fn>
SPECOPS_INLINE inline void unrolled(const Fn& fn) {
  if constexpr (kCount > 0) {
    unrolled<kCount - 1>(fn);
    fn(kCount - 1);
  }
}

// What one step is for rows and weights of two types. It has parts, which come one after the other: in
// each, a step of 16 outputs gives a vector of weights, and the same inputs of one row are multiplied
// with it. `Input` is what a tile reads inputs as: where bfloat16 has no dot products of its own,
// floats that were made of the rows once, since every block of weights meets them again; for integer
// weights integers. kGroupSteps: after so many steps sums are added to totals and begin anew; 0: never.
template <typename Row, typename Weight>
struct Step;

inline const uint32_t* words_at(const char* p) { return reinterpret_cast<const uint32_t*>(p); }

// Of weights of the rows' own type.
template <typename T>
struct PlainStep {
  using Row = T;
  using Weight = T;
  static constexpr int kInputs = 4 / sizeof(T);
  static constexpr int64_t kBytes = 4 * kWeightBlock;  // of a block
  static constexpr int kGroupSteps = 0;
};

#if defined(SPECOPS_AVX512) || defined(SPECOPS_AVX2) || defined(SPECOPS_NEON)
#if defined(SPECOPS_AVX2)
using Spread = const float*;  // spread right before it is multiplied with
inline Spread spread(const float* x) { return x; }
#elif defined(SPECOPS_NEON)
using Spread = float32x4_t;  // one number, in every lane that it is multiplied with at once
inline Spread spread(const float* x) { return vdupq_n_f32(*x); }
#else
using Spread = F32x16;
inline Spread spread(const float* x) { return set1(*x); }
#endif

// sum += w * x, in the registers that the sum is in: left to itself gcc moves sums about on AVX2 and
// NEON, and some then do not fit. On AVX2 it would also spread inputs long before their products.
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
// The same with an input that stays spread, for the blocks of a tile of few rows.
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
  // The odd inputs first, as vdpbf16ps does.
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
// The arrays of simd.h would live in memory here; vectors of four live in registers anywhere.
using Float4 = float __attribute__((vector_size(16)));
using Word4 = uint32_t __attribute__((vector_size(16)));

template <typename V>
struct Quad {
  V q[4] = {};
};

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
  static void dot(Sum& sum, const Quad<Float4>& w, float x) {
    unrolled<4>([&](int i) SPECOPS_INLINE { sum.q[i] = w.q[i] * x + sum.q[i]; });
  }
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
  static void dot(Sum& sum, const Quad<Float4>& w, float x) {
    unrolled<4>([&](int i) SPECOPS_INLINE { sum.q[i] = w.q[i] * x + sum.q[i]; });
  }
};

inline void put(float* p, const Quad<Float4>& sum) {
  unrolled<4>([&](int i) SPECOPS_INLINE { std::memcpy(p + 4 * i, &sum.q[i], 16); });
}
#endif

// Codes of 8 bits times integers of 16, two inputs a step. A sum is exact: of a group's 128 products,
// each below 2^22, it stays below 2^29.
struct IntegerStep {
  using Input = int16_t;
  using Weight = int8_t;
  static constexpr int kInputs = 2;
  static constexpr int64_t kBytes = 2 * kWeightBlock;
  static constexpr int kGroupSteps = kIntegerGroup / kInputs;
  static constexpr int kParts = 1;
  static int32_t pair_at(const int16_t* p) {
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return pair;
  }
#if defined(SPECOPS_AVX512)
  static constexpr bool kByBlock = false;
  struct Sum {
    __m512i v;
  };
  static __m512i weights(const char* p, int) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static __m512i input(const int16_t* p, int) { return _mm512_set1_epi32(pair_at(p)); }
  static void dot(Sum& sum, __m512i w, __m512i x) {
    sum.v = _mm512_add_epi32(sum.v, _mm512_madd_epi16(w, x));
  }
  static F32x16 floats(Sum sum) { return {_mm512_cvtepi32_ps(sum.v)}; }
#elif defined(SPECOPS_AVX2)
  static constexpr bool kByBlock = true;
  struct Sum {
    __m256i lo, hi;
  };
  static Sum weights(const char* p, int) {
    const auto* halves = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128(halves)),
            _mm256_cvtepi8_epi16(_mm_loadu_si128(halves + 1))};
  }
  static __m256i input(const int16_t* p, int) { return _mm256_set1_epi32(pair_at(p)); }
  static void dot(Sum& sum, const Sum& w, __m256i x) {
    sum.lo = _mm256_add_epi32(sum.lo, _mm256_madd_epi16(w.lo, x));
    sum.hi = _mm256_add_epi32(sum.hi, _mm256_madd_epi16(w.hi, x));
  }
  static F32x16 floats(Sum sum) { return {_mm256_cvtepi32_ps(sum.lo), _mm256_cvtepi32_ps(sum.hi)}; }
#elif defined(SPECOPS_NEON)
  static constexpr bool kByBlock = true;
  struct Sum {
    int32x4_t q[4];
  };
  struct Pairs {
    int16x8_t q[4];
  };
  static Pairs weights(const char* p, int) {
    const auto* codes = reinterpret_cast<const int8_t*>(p);
    int8x16_t low = vld1q_s8(codes), high = vld1q_s8(codes + 16);
    return {vmovl_s8(vget_low_s8(low)),
            vmovl_high_s8(low),
            vmovl_s8(vget_low_s8(high)),
            vmovl_high_s8(high)};
  }
  static int16x8_t input(const int16_t* p, int) {
    return vreinterpretq_s16_s32(vdupq_n_s32(pair_at(p)));
  }
  static void dot(Sum& sum, const Pairs& w, int16x8_t x) {
    unrolled<4>([&](int i) SPECOPS_INLINE {
      int32x4_t low = vmull_s16(vget_low_s16(w.q[i]), vget_low_s16(x));
      sum.q[i] = vaddq_s32(sum.q[i], vpaddq_s32(low, vmull_high_s16(w.q[i], x)));
    });
  }
  static F32x16 floats(Sum sum) {
    return quarters<F32x16>([&](int i) { return vcvtq_f32_s32(sum.q[i]); });
  }
#else
  static constexpr bool kByBlock = true;
  struct Sum {
    int32_t v[16];
  };
  static const int8_t* weights(const char* p, int) { return reinterpret_cast<const int8_t*>(p); }
  static const int16_t* input(const int16_t* p, int) { return p; }
  static void dot(Sum& sum, const int8_t* w, const int16_t* x) {
    for (int i = 0; i < 16; ++i) sum.v[i] += w[2 * i] * x[0] + w[2 * i + 1] * x[1];
  }
  static F32x16 floats(const Sum& sum) {
    F32x16 out;
    for (int i = 0; i < 16; ++i) out.v[i] = static_cast<float>(sum.v[i]);
    return out;
  }
#endif
};

template <>
struct Step<float, int8_t> : IntegerStep {
  using Row = float;
};

template <>
struct Step<bfloat16, int8_t> : IntegerStep {
  using Row = bfloat16;
};

// Of a weight with so many inputs.
template <typename S>
int64_t steps_of(int64_t num_inputs) {
  return (num_inputs + S::kInputs - 1) / S::kInputs;
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
