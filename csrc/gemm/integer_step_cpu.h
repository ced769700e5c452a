// SPDX-License-Identifier: Apache-2.0
// Lines of codes, and their products with integers of 16 bits, on each instruction set.
//
// A line is sixteen outputs of four bytes each. A quad is such a line with one code in every byte,
// none negative: what a code lacks to its value (`kBias`) is taken from the sum at its begin.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/simd.h"
#include "gemm/unrolled_cpu.h"
#include "gemm/weight.h"

namespace specops::SPECOPS_ISA {
namespace {

#if defined(SPECOPS_AVX512)
struct Quads {
  __m512i v;
};
struct Sums {  // of sixteen outputs
  __m512i v;
};
using Table = __m512i;

inline Quads load_line(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline Quads low_halves(Quads line) { return {_mm512_and_si512(line.v, _mm512_set1_epi8(15))}; }
inline Quads high_halves(Quads line) { return low_halves({_mm512_srli_epi16(line.v, 4)}); }
inline Table load_table(const uint8_t* p) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Quads look_up(Table table, Quads halves) { return {_mm512_shuffle_epi8(table, halves.v)}; }
// Of each output the first and third byte, or the second and fourth, as 16 bits.
inline Quads evens(Quads quads) { return {_mm512_and_si512(quads.v, _mm512_set1_epi16(255))}; }
inline Quads odds(Quads quads) { return {_mm512_srli_epi16(quads.v, 8)}; }
inline Sums spread_sum(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline void add_products(Sums& sums, Quads pairs, const int16_t* x) {
  int32_t pair;
  std::memcpy(&pair, x, 4);
  sums.v = _mm512_add_epi32(sums.v, _mm512_madd_epi16(pairs.v, _mm512_set1_epi32(pair)));
}
inline F32x16 floats(Sums sums) { return {_mm512_cvtepi32_ps(sums.v)}; }
#elif defined(SPECOPS_AVX2)
struct Quads {
  __m256i lo, hi;
};
using Sums = Quads;
using Table = __m256i;

inline Quads load_line(const uint8_t* p) {
  const auto* halves = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
inline Quads low_halves(Quads line) {
  __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(line.lo, mask), _mm256_and_si256(line.hi, mask)};
}
inline Quads high_halves(Quads line) {
  return low_halves({_mm256_srli_epi16(line.lo, 4), _mm256_srli_epi16(line.hi, 4)});
}
inline Table load_table(const uint8_t* p) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Quads look_up(Table table, Quads halves) {
  return {_mm256_shuffle_epi8(table, halves.lo), _mm256_shuffle_epi8(table, halves.hi)};
}
inline Quads evens(Quads quads) {
  __m256i mask = _mm256_set1_epi16(255);
  return {_mm256_and_si256(quads.lo, mask), _mm256_and_si256(quads.hi, mask)};
}
inline Quads odds(Quads quads) {
  return {_mm256_srli_epi16(quads.lo, 8), _mm256_srli_epi16(quads.hi, 8)};
}
inline Sums spread_sum(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline void add_products(Sums& sums, const Quads& pairs, const int16_t* x) {
  int32_t pair;
  std::memcpy(&pair, x, 4);
  __m256i spread = _mm256_set1_epi32(pair);
  sums.lo = _mm256_add_epi32(sums.lo, _mm256_madd_epi16(pairs.lo, spread));
  sums.hi = _mm256_add_epi32(sums.hi, _mm256_madd_epi16(pairs.hi, spread));
}
inline F32x16 floats(const Sums& sums) {
  return {_mm256_cvtepi32_ps(sums.lo), _mm256_cvtepi32_ps(sums.hi)};
}
#elif defined(SPECOPS_NEON)
struct Quads {
  uint8x16_t q[4];
};
struct Sums {
  int32x4_t q[4];
};
using Table = uint8x16_t;

inline Quads load_line(const uint8_t* p) {
  return quarters<Quads>([&](int i) { return vld1q_u8(p + 16 * i); });
}
inline Quads low_halves(const Quads& line) {
  return quarters<Quads>([&](int i) { return vandq_u8(line.q[i], vdupq_n_u8(15)); });
}
inline Quads high_halves(const Quads& line) {
  return quarters<Quads>([&](int i) { return vshrq_n_u8(line.q[i], 4); });
}
inline Table load_table(const uint8_t* p) { return vld1q_u8(p); }
inline Quads look_up(Table table, const Quads& halves) {
  return quarters<Quads>([&](int i) { return vqtbl1q_u8(table, halves.q[i]); });
}
inline Quads evens(const Quads& quads) {
  return quarters<Quads>([&](int i) {
    uint16x8_t words = vandq_u16(vreinterpretq_u16_u8(quads.q[i]), vdupq_n_u16(255));
    return vreinterpretq_u8_u16(words);
  });
}
inline Quads odds(const Quads& quads) {
  return quarters<Quads>([&](int i) {
    return vreinterpretq_u8_u16(vshrq_n_u16(vreinterpretq_u16_u8(quads.q[i]), 8));
  });
}
inline Sums spread_sum(int32_t x) {
  return quarters<Sums>([&](int) { return vdupq_n_s32(x); });
}
inline void add_products(Sums& sums, const Quads& pairs, const int16_t* x) {
  int32_t pair;
  std::memcpy(&pair, x, 4);
  int16x8_t spread = vreinterpretq_s16_s32(vdupq_n_s32(pair));
  unrolled<4>([&](int i) SPECOPS_INLINE {
    int16x8_t codes = vreinterpretq_s16_u8(pairs.q[i]);
    int32x4_t low = vmull_s16(vget_low_s16(codes), vget_low_s16(spread));
    sums.q[i] = vaddq_s32(sums.q[i], vpaddq_s32(low, vmull_high_s16(codes, spread)));
  });
}
inline F32x16 floats(const Sums& sums) {
  return quarters<F32x16>([&](int i) { return vcvtq_f32_s32(sums.q[i]); });
}
#else
struct Quads {
  uint32_t v[16];
};
struct Sums {
  int32_t v[16];
};
using Table = const uint8_t*;

template <typename Fn>
inline Quads each_output(const Fn& fn) {
  Quads out;
  for (int i = 0; i < 16; ++i) out.v[i] = fn(i);
  return out;
}

inline Quads load_line(const uint8_t* p) {
  Quads line;
  std::memcpy(&line, p, sizeof(line));
  return line;
}
inline Quads low_halves(const Quads& line) {
  return each_output([&](int i) { return line.v[i] & 0x0f0f0f0fu; });
}
inline Quads high_halves(const Quads& line) {
  return each_output([&](int i) { return line.v[i] >> 4 & 0x0f0f0f0fu; });
}
inline Table load_table(const uint8_t* p) { return p; }
inline Quads look_up(Table table, const Quads& halves) {
  return each_output([&](int i) {
    uint32_t word = 0;
    for (int byte = 0; byte < 32; byte += 8) {
      word |= static_cast<uint32_t>(table[halves.v[i] >> byte & 15]) << byte;
    }
    return word;
  });
}
inline Quads evens(const Quads& quads) {
  return each_output([&](int i) { return quads.v[i] & 0x00ff00ffu; });
}
inline Quads odds(const Quads& quads) {
  return each_output([&](int i) { return quads.v[i] >> 8 & 0x00ff00ffu; });
}
inline Sums spread_sum(int32_t x) {
  Sums sums;
  for (int32_t& one : sums.v) one = x;
  return sums;
}
inline void add_products(Sums& sums, const Quads& pairs, const int16_t* x) {
  for (int i = 0; i < 16; ++i) {
    auto low = static_cast<int32_t>(pairs.v[i] & 0xffffu);
    auto high = static_cast<int32_t>(pairs.v[i] >> 16);
    sums.v[i] += low * x[0] + high * x[1];
  }
}
inline F32x16 floats(const Sums& sums) {
  F32x16 out;
  for (int i = 0; i < 16; ++i) out.v[i] = static_cast<float>(sums.v[i]);
  return out;
}
#endif

// a * b + c, rounded once on every instruction set.
inline F32x16 fused(F32x16 a, F32x16 b, F32x16 c) {
#if defined(SPECOPS_AVX512) || defined(SPECOPS_AVX2) || defined(SPECOPS_NEON)
  return fma(a, b, c);
#else
  F32x16 out;
  for (int i = 0; i < 16; ++i) out.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
  return out;
#endif
}

// What a line of codes is to a tile. For each quad of the line, in the order of its inputs, and of
// this first the even, then the odd codes, `visit` is called with the pairs and which they are.
struct Int8Codes {
  static constexpr int kLineInputs = 4;
  static constexpr int kBias = 128;
  explicit Int8Codes(const WeightParams&) {}
  template <typename Fn>
  SPECOPS_INLINE void pairs_of(const uint8_t* p, const Fn& visit) const {
    Quads line = load_line(p);
    visit(evens(line), 0);
    visit(odds(line), 1);
  }
};

// code - 8
struct Int4Codes {
  static constexpr int kLineInputs = 8;
  static constexpr int kBias = 8;
  explicit Int4Codes(const WeightParams&) {}
  template <typename Fn>
  SPECOPS_INLINE void pairs_of(const uint8_t* p, const Fn& visit) const {
    Quads line = load_line(p), low = low_halves(line), high = high_halves(line);
    visit(evens(low), 0);
    visit(odds(low), 1);
    visit(evens(high), 2);
    visit(odds(high), 3);
  }
};

struct Int4Table {
  static constexpr int kLineInputs = 8;
  static constexpr int kBias = 128;
  uint8_t values[16];  // plus kBias
  explicit Int4Table(const WeightParams& weight) {
    for (int i = 0; i < 16; ++i) values[i] = static_cast<uint8_t>(weight.code_values[i] + kBias);
  }
  template <typename Fn>
  SPECOPS_INLINE void pairs_of(const uint8_t* p, const Fn& visit) const {
    Table table = load_table(values);
    Quads line = load_line(p);
    Quads low = look_up(table, low_halves(line)), high = look_up(table, high_halves(line));
    visit(evens(low), 0);
    visit(odds(low), 1);
    visit(evens(high), 2);
    visit(odds(high), 3);
  }
};

}  // namespace
}  // namespace specops::SPECOPS_ISA
