// SPDX-License-Identifier: Apache-2.0
// Products of quantized weights and integers on each instruction set, for a vector of outputs,
// which is a part of a block.
//
// In a vector of weights, four bytes belong to one output and form a quad. Each byte of a quad is
// nonnegative: it is the value of a weight plus kBias, and the initial value of the sum compensates
// for kBias.
// Wide products multiply by 16-bit integers: pairs of 16-bit numbers, first the even and then the
// odd bytes of a quad. Narrow products multiply quads by 8-bit integers. If the instruction set can
// multiply quads by both signed and unsigned bytes, wide products use quads too: one product with
// the high bytes of the integers and one with the low bytes.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/simd.h"
#include "gemm/integer_rows_cpu.h"
#include "gemm/unrolled_cpu.h"
#include "gemm/weight.h"

namespace specops::SPECOPS_ISA {
namespace {

inline int32_t word_at(const void* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

// Makes the compiler complete an addition here. gcc would otherwise collect the terms of many
// additions and add them later, or keep sums in other registers across iterations, and run out of
// registers.
#if defined(SPECOPS_AVX512)
#define SPECOPS_ADDED(sums) asm("" : "+v"(sums))
#elif defined(SPECOPS_AVX2)
#define SPECOPS_ADDED(sums) asm("" : "+x"(sums))
#elif defined(SPECOPS_NEON)
#define SPECOPS_ADDED(sums) asm("" : "+w"(sums))
#else
#define SPECOPS_ADDED(sums) static_cast<void>(sums)
#endif

#if defined(SPECOPS_AVX512)
constexpr int kPartOutputs = 16;
using Codes = __m512i;
using Sums = __m512i;
using Floats = __m512;

inline Codes load_codes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Codes low_halves(Codes v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline Codes high_halves(Codes v) { return low_halves(_mm512_srli_epi16(v, 4)); }
inline Codes load_table(const uint8_t* p) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Codes look_up(Codes table, Codes halves) { return _mm512_shuffle_epi8(table, halves); }
inline Codes evens(Codes quads) { return _mm512_and_si512(quads, _mm512_set1_epi16(255)); }
inline Codes odds(Codes quads) { return _mm512_srli_epi16(quads, 8); }
inline Sums spread(int32_t x) { return _mm512_set1_epi32(x); }
inline Sums add_sums(Sums a, Sums b) { return _mm512_add_epi32(a, b); }
inline Floats floats(Sums sums) { return _mm512_cvtepi32_ps(sums); }
inline Floats load_floats(const float* p) { return _mm512_loadu_ps(p); }
inline void store_floats(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline Floats spread_float(float x) { return _mm512_set1_ps(x); }
inline Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
#if defined(__AVX512VNNI__)
#define SPECOPS_VNNI 1
inline Sums add_pairs(Sums sums, Codes pairs, Sums x) {
  return _mm512_dpwssd_epi32(sums, pairs, x);
}
inline Sums add_quads(Sums sums, Codes quads, Sums x) {
  return _mm512_dpbusd_epi32(sums, quads, x);
}
#else
inline Sums add_pairs(Sums sums, Codes pairs, Sums x) {
  sums = _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, x));
  SPECOPS_ADDED(sums);
  return sums;
}
#endif
#elif defined(SPECOPS_AVX2)
constexpr int kPartOutputs = 8;
using Codes = __m256i;
using Sums = __m256i;
using Floats = __m256;

inline Codes load_codes(const uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline Codes low_halves(Codes v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
inline Codes high_halves(Codes v) { return low_halves(_mm256_srli_epi16(v, 4)); }
inline Codes load_table(const uint8_t* p) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Codes look_up(Codes table, Codes halves) { return _mm256_shuffle_epi8(table, halves); }
inline Codes evens(Codes quads) { return _mm256_and_si256(quads, _mm256_set1_epi16(255)); }
inline Codes odds(Codes quads) { return _mm256_srli_epi16(quads, 8); }
inline Sums spread(int32_t x) { return _mm256_set1_epi32(x); }
inline Sums add_sums(Sums a, Sums b) { return _mm256_add_epi32(a, b); }
inline Floats floats(Sums sums) { return _mm256_cvtepi32_ps(sums); }
inline Floats load_floats(const float* p) { return _mm256_loadu_ps(p); }
inline void store_floats(float* p, Floats x) { _mm256_storeu_ps(p, x); }
inline Floats spread_float(float x) { return _mm256_set1_ps(x); }
inline Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
#if defined(__AVXVNNI__)
#define SPECOPS_VNNI 1
inline Sums add_pairs(Sums sums, Codes pairs, Sums x) {
  return _mm256_dpwssd_avx_epi32(sums, pairs, x);
}
inline Sums add_quads(Sums sums, Codes quads, Sums x) {
  return _mm256_dpbusd_avx_epi32(sums, quads, x);
}
#else
inline Sums add_pairs(Sums sums, Codes pairs, Sums x) {
  sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, x));
  SPECOPS_ADDED(sums);
  return sums;
}
#endif
#elif defined(SPECOPS_NEON)
constexpr int kPartOutputs = 4;
using Codes = uint8x16_t;
using Sums = int32x4_t;
using Floats = float32x4_t;

inline Codes load_codes(const uint8_t* p) { return vld1q_u8(p); }
inline Codes low_halves(Codes v) { return vandq_u8(v, vdupq_n_u8(15)); }
inline Codes high_halves(Codes v) { return vshrq_n_u8(v, 4); }
inline Codes load_table(const uint8_t* p) { return vld1q_u8(p); }
inline Codes look_up(Codes table, Codes halves) { return vqtbl1q_u8(table, halves); }
inline Codes evens(Codes quads) {
  return vreinterpretq_u8_u16(vandq_u16(vreinterpretq_u16_u8(quads), vdupq_n_u16(255)));
}
inline Codes odds(Codes quads) {
  return vreinterpretq_u8_u16(vshrq_n_u16(vreinterpretq_u16_u8(quads), 8));
}
inline Sums spread(int32_t x) { return vdupq_n_s32(x); }
inline Sums add_sums(Sums a, Sums b) { return vaddq_s32(a, b); }
inline Floats floats(Sums sums) { return vcvtq_f32_s32(sums); }
inline Floats load_floats(const float* p) { return vld1q_f32(p); }
inline void store_floats(float* p, Floats x) { vst1q_f32(p, x); }
inline Floats spread_float(float x) { return vdupq_n_f32(x); }
inline Floats times(Floats a, Floats b) { return vmulq_f32(a, b); }
inline Floats fused(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
#if defined(SPECOPS_ISA_neon_bf16) || defined(SPECOPS_ISA_neon_dot)
#define SPECOPS_NEON_DOT 1
// Products of quads and signed integers. SDOT multiplies signed quads, so a bias of 128, which needs
// the eighth bit, is subtracted; USDOT multiplies quads as they are.
#if defined(SPECOPS_ISA_neon_bf16)
#define SPECOPS_SIGNED_DOT vusdotq_laneq_s32
using SignedQuads = uint8x16_t;
template <int kBias>
constexpr bool kSubtractsBias = false;
#else
#define SPECOPS_SIGNED_DOT vdotq_laneq_s32
using SignedQuads = int8x16_t;
template <int kBias>
constexpr bool kSubtractsBias = kBias == 128;
#endif
template <int kBias>
SignedQuads signed_quads(Codes quads) {
  if constexpr (kSubtractsBias<kBias>) quads = veorq_u8(quads, vdupq_n_u8(128));
  return (SignedQuads)quads;
}

// Multiplies quads by the four integers in lane `lane` of x. The lane number must be a literal for
// the intrinsics.
inline Sums add_quads(Sums sums, SignedQuads quads, int8x16_t x, int lane) {
  switch (lane) {
    case 0:
      return SPECOPS_SIGNED_DOT(sums, quads, x, 0);
    case 1:
      return SPECOPS_SIGNED_DOT(sums, quads, x, 1);
    case 2:
      return SPECOPS_SIGNED_DOT(sums, quads, x, 2);
    default:
      return SPECOPS_SIGNED_DOT(sums, quads, x, 3);
  }
}
inline Sums add_quads(Sums sums, Codes quads, uint8x16_t x, int lane) {
  uint32x4_t words = vreinterpretq_u32_s32(sums);
  switch (lane) {
    case 0:
      return vreinterpretq_s32_u32(vdotq_laneq_u32(words, quads, x, 0));
    case 1:
      return vreinterpretq_s32_u32(vdotq_laneq_u32(words, quads, x, 1));
    case 2:
      return vreinterpretq_s32_u32(vdotq_laneq_u32(words, quads, x, 2));
    default:
      return vreinterpretq_s32_u32(vdotq_laneq_u32(words, quads, x, 3));
  }
}
#else
// Vector in which the sum of an output is the sum of two neighboring lanes.
struct PairSums {
  Sums low, high;
};
inline PairSums begin_pairs(int32_t start) {
  Sums half = vreinterpretq_s32_u64(vdupq_n_u64(static_cast<uint32_t>(start)));
  return {half, half};
}
inline PairSums add_pairs(PairSums sums, Codes pairs, Sums x) {
  int16x8_t codes = vreinterpretq_s16_u8(pairs), integers = vreinterpretq_s16_s32(x);
  sums.low = vmlal_s16(sums.low, vget_low_s16(codes), vget_low_s16(integers));
  sums.high = vmlal_high_s16(sums.high, codes, integers);
  return sums;
}
inline Sums end_pairs(PairSums sums) { return vpaddq_s32(sums.low, sums.high); }
inline void added_pairs(PairSums& sums) {
  SPECOPS_ADDED(sums.low);
  SPECOPS_ADDED(sums.high);
}
#endif
#else
constexpr int kPartOutputs = 4;
// Vectors of four words stay in registers on all CPUs.
using Codes = uint32_t __attribute__((vector_size(16)));
using Sums = int32_t __attribute__((vector_size(16)));
using Floats = float __attribute__((vector_size(16)));

inline Codes load_codes(const uint8_t* p) {
  Codes codes;
  std::memcpy(&codes, p, 16);
  return codes;
}
inline Codes low_halves(Codes v) { return v & 0x0f0f0f0fu; }
inline Codes high_halves(Codes v) { return v >> 4 & 0x0f0f0f0fu; }
inline Codes load_table(const uint8_t* p) { return load_codes(p); }
inline Codes look_up(Codes table, Codes halves) {
  uint8_t values[16], at[16];
  std::memcpy(values, &table, 16);
  std::memcpy(at, &halves, 16);
  for (uint8_t& one : at) one = values[one];
  return load_codes(at);
}
inline Codes evens(Codes quads) { return quads & 0x00ff00ffu; }
inline Codes odds(Codes quads) { return quads >> 8 & 0x00ff00ffu; }
inline Sums spread(int32_t x) { return Sums{x, x, x, x}; }
inline Sums add_sums(Sums a, Sums b) { return a + b; }
inline Floats floats(Sums sums) { return __builtin_convertvector(sums, Floats); }
inline Floats load_floats(const float* p) {
  Floats x;
  std::memcpy(&x, p, 16);
  return x;
}
inline void store_floats(float* p, Floats x) { std::memcpy(p, &x, 16); }
inline Floats spread_float(float x) { return Floats{x, x, x, x}; }
inline Floats times(Floats a, Floats b) { return a * b; }
inline Floats fused(Floats a, Floats b, Floats c) {
  for (int i = 0; i < 4; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
inline Sums add_pairs(Sums sums, Codes pairs, Sums x) {
  Sums low = (Sums)(pairs & 0xffffu), high = (Sums)(pairs >> 16);
  return sums + low * (x << 16 >> 16) + high * (x >> 16);
}
#endif

#if !defined(SPECOPS_NEON)
using PairSums = Sums;
inline PairSums begin_pairs(int32_t start) { return spread(start); }
inline Sums end_pairs(PairSums sums) { return sums; }
inline void added_pairs(PairSums& sums) { SPECOPS_ADDED(sums); }
#endif

// Decoders of a line of weights: quad(line, i) returns its quads in the order of the inputs.
struct Int8Codes {
  static constexpr int kLineInputs = 4;
  static constexpr int kBias = 128;
  explicit Int8Codes(const WeightParams&) {}
  Codes quad(Codes line, int) const { return line; }
};

// int4 weights, stored as value + 8.
struct Int4Codes {
  static constexpr int kLineInputs = 8;
  static constexpr int kBias = 8;
  explicit Int4Codes(const WeightParams&) {}
  Codes quad(Codes line, int i) const { return i == 0 ? low_halves(line) : high_halves(line); }
};

struct Int4Table {
  static constexpr int kLineInputs = 8;
  static constexpr int kBias = 128;
  uint8_t values[16];  // the 16 possible values, each plus kBias
  explicit Int4Table(const WeightParams& weight) {
    for (int i = 0; i < 16; ++i) values[i] = static_cast<uint8_t>(weight.code_values[i] + kBias);
  }
  Codes quad(Codes line, int i) const {
    return look_up(load_table(values), i == 0 ? low_halves(line) : high_halves(line));
  }
};

// The types below multiply the quads of a chunk in order. `at` is the index in the chunk of the
// first of the four inputs of a quad. `x` is the start of the chunk's integers, in the order that
// `arrange` makes.

#if defined(SPECOPS_NEON_DOT)
// Products of quads and 16-bit integers, as 256 times the product with the signed high bytes plus
// the product with the unsigned low bytes.
template <typename Kind>
struct Wide {
  using Integer = int16_t;
  struct Acc {
    Sums high, low;
  };
  static constexpr bool kIsNarrow = false;
  static void arrange(int16_t* integers, int64_t count) {
    split_bytes<kChunkInputs>(integers, count);
  }
  static int32_t biased(int32_t x) { return kSubtractsBias<Kind::kBias> ? x & 255 : x; }
  static Acc begin(int32_t start) { return {spread(0), spread(start)}; }
  template <int kRows, int kParts>
  SPECOPS_INLINE static void add(const Codes (&quads)[kParts],
                                 const int16_t* x,
                                 int at,
                                 int64_t stride,
                                 Acc (&acc)[kRows][kParts]) {
    SignedQuads with_sign[kParts];
    unrolled<kParts>([&](int p)
                         SPECOPS_INLINE { with_sign[p] = signed_quads<Kind::kBias>(quads[p]); });
    unrolled<kRows>([&](int r) SPECOPS_INLINE {
      const auto* bytes = reinterpret_cast<const uint8_t*>(x + r * stride);
      int8x16_t high = vreinterpretq_s8_u8(vld1q_u8(bytes));
      uint8x16_t low = vld1q_u8(bytes + kChunkInputs);
      unrolled<kParts>([&](int p) SPECOPS_INLINE {
        acc[r][p].high = add_quads(acc[r][p].high, with_sign[p], high, at / 4);
        acc[r][p].low = add_quads(acc[r][p].low, quads[p], low, at / 4);
      });
    });
  }
  static void added(Acc& acc) {
    SPECOPS_ADDED(acc.high);
    SPECOPS_ADDED(acc.low);
  }
  static Sums sums(Acc acc, int32_t) { return vaddq_s32(acc.low, vshlq_n_s32(acc.high, 8)); }
};

// Products of quads and 8-bit integers.
template <typename Kind>
struct Narrow {
  using Integer = int8_t;
  using Acc = Sums;
  static constexpr bool kIsNarrow = true;
  static void arrange(int8_t*, int64_t) {}
  static int32_t biased(int32_t x) { return kSubtractsBias<Kind::kBias> ? 0 : x; }
  static Acc begin(int32_t start) { return spread(start); }
  template <int kRows, int kParts>
  SPECOPS_INLINE static void add(const Codes (&quads)[kParts],
                                 const int8_t* x,
                                 int at,
                                 int64_t stride,
                                 Acc (&acc)[kRows][kParts]) {
    SignedQuads with_sign[kParts];
    unrolled<kParts>([&](int p)
                         SPECOPS_INLINE { with_sign[p] = signed_quads<Kind::kBias>(quads[p]); });
    unrolled<kRows>([&](int r) SPECOPS_INLINE {
      int8x16_t of_row = vld1q_s8(x + r * stride);
      unrolled<kParts>([&](int p) SPECOPS_INLINE {
        acc[r][p] = add_quads(acc[r][p], with_sign[p], of_row, at / 4);
      });
    });
  }
  static void added(Acc& acc) { SPECOPS_ADDED(acc); }
  static Sums sums(Acc acc, int32_t) { return acc; }
};
#else
// Products of quads and 16-bit integers. Of every four inputs, the integers are stored in the order
// first, third, second, fourth.
template <typename Kind>
struct Wide {
  using Integer = int16_t;
  using Acc = PairSums;
  static constexpr bool kIsNarrow = false;
  static void arrange(int16_t* integers, int64_t count) { swap_middles(integers, count); }
  static Acc begin(int32_t start) { return begin_pairs(start); }
  template <int kRows, int kParts>
  SPECOPS_INLINE static void add(const Codes (&quads)[kParts],
                                 const int16_t* x,
                                 int at,
                                 int64_t stride,
                                 Acc (&acc)[kRows][kParts]) {
    Codes halves[kParts];
    unrolled<kParts>([&](int p) SPECOPS_INLINE { halves[p] = evens(quads[p]); });
    add_halves<kRows, kParts>(halves, x + at, stride, acc);
    unrolled<kParts>([&](int p) SPECOPS_INLINE { halves[p] = odds(quads[p]); });
    add_halves<kRows, kParts>(halves, x + at + 2, stride, acc);
  }

  template <int kRows, int kParts>
  SPECOPS_INLINE static void add_halves(const Codes (&halves)[kParts],
                                        const int16_t* x,
                                        int64_t stride,
                                        Acc (&acc)[kRows][kParts]) {
    unrolled<kRows>([&](int r) SPECOPS_INLINE {
      Sums of_row = spread(word_at(x + r * stride));
      unrolled<kParts>([&](int p)
                           SPECOPS_INLINE { acc[r][p] = add_pairs(acc[r][p], halves[p], of_row); });
    });
  }
  static void added(Acc& acc) { added_pairs(acc); }
  static Sums sums(Acc acc, int32_t) { return end_pairs(acc); }
};

#if defined(SPECOPS_VNNI)
// Products of quads and 8-bit integers.
template <typename Kind>
struct Narrow {
  using Integer = int8_t;
  using Acc = Sums;
  static constexpr bool kIsNarrow = true;
  static void arrange(int8_t*, int64_t) {}
  static Acc begin(int32_t start) { return spread(start); }
  template <int kRows, int kParts>
  SPECOPS_INLINE static void add(const Codes (&quads)[kParts],
                                 const int8_t* x,
                                 int at,
                                 int64_t stride,
                                 Acc (&acc)[kRows][kParts]) {
    unrolled<kRows>([&](int r) SPECOPS_INLINE {
      Sums of_row = spread(word_at(x + at + r * stride));
      unrolled<kParts>([&](int p)
                           SPECOPS_INLINE { acc[r][p] = add_quads(acc[r][p], quads[p], of_row); });
    });
  }
  static void added(Acc& acc) { SPECOPS_ADDED(acc); }
  static Sums sums(Acc acc, int32_t) { return acc; }
};
#elif defined(SPECOPS_AVX2)
template <typename Kind>
struct Narrow {
  static constexpr bool kIsNarrow = false;  // no 8-bit by 8-bit products: use wide products
};

// Stored numbers are below 16, so the sums of the 32 inputs of a piece, two products each, stay
// below 2^15.
template <>
struct Narrow<Int4Codes> {
  using Integer = int8_t;
  using Acc = __m256i;
  static constexpr bool kIsNarrow = true;
  static void arrange(int8_t*, int64_t) {}
  static Acc begin(int32_t) { return _mm256_setzero_si256(); }
  template <int kRows, int kParts>
  SPECOPS_INLINE static void add(const Codes (&quads)[kParts],
                                 const int8_t* x,
                                 int at,
                                 int64_t stride,
                                 Acc (&acc)[kRows][kParts]) {
    unrolled<kRows>([&](int r) SPECOPS_INLINE {
      Sums of_row = spread(word_at(x + at + r * stride));
      unrolled<kParts>([&](int p) SPECOPS_INLINE {
        acc[r][p] = _mm256_add_epi16(acc[r][p], _mm256_maddubs_epi16(quads[p], of_row));
        SPECOPS_ADDED(acc[r][p]);
      });
    });
  }
  static void added(Acc& acc) { SPECOPS_ADDED(acc); }
  static Sums sums(Acc acc, int32_t start) {
    return _mm256_add_epi32(_mm256_madd_epi16(acc, _mm256_set1_epi16(1)), spread(start));
  }
};
#else  // also for SPECOPS_NEON: wide products of 16 bits
template <typename Kind>
struct Narrow {
  static constexpr bool kIsNarrow = false;
};
#endif
#endif

}  // namespace
}  // namespace specops::SPECOPS_ISA
