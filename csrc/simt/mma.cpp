// SPDX-License-Identifier: Apache-2.0
// ldmatrix and mma: the fragment layouts of the PTX manual, and three rounding rules for sums.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "simt/ptx.h"
#include "simt/simt.h"

namespace specops::simt {
namespace {

constexpr int kRows = 16;  // rows of d, which has 8 columns
constexpr int kCols = 8;

// Type of the functions that compute one row of d by fused multiply-adds. a: [k], b: [k][kCols].
using RowRule = void (*)(float* d, const float* a, const float* b, int k);

void row_fma_plain(float* d, const float* a, const float* b, int k) {
  for (int i = 0; i < k; ++i) {
    for (int n = 0; n < kCols; ++n) d[n] = std::fma(a[i], b[i * kCols + n], d[n]);
  }
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"),
               optimize("O3"))) void row_fma_avx2(float* d, const float* a, const float* b, int k) {
  typedef float Row __attribute__((vector_size(32), aligned(4)));
  Row sum;
  std::memcpy(&sum, d, sizeof sum);
  for (int i = 0; i < k; ++i) {
    Row row;
    std::memcpy(&row, b + i * kCols, sizeof row);
    for (int n = 0; n < kCols; ++n) sum[n] = __builtin_fmaf(a[i], row[n], sum[n]);
  }
  std::memcpy(d, &sum, sizeof sum);
}
#endif

// Model of tensor cores, which add integers: every product and the addend are shifted to the
// largest exponent and truncated `fraction_bits` bits below it; the sum is truncated to fp32.
// Products are exact.

// A finite float as significand * 2^(exponent - 23), with the significand normalized to 24 bits.
struct Split {
  int32_t significand;
  int32_t exponent;
};

constexpr int kNoExponent = -10000;  // exponent of zero

Split split(float x) {
  auto bits = std::bit_cast<uint32_t>(x);
  auto significand = static_cast<int32_t>(bits & 0x7fffffu);
  int exponent = static_cast<int>(bits >> 23 & 0xff) - 127;
  if (exponent > -127) {
    significand |= 1 << 23;
  } else if (significand == 0) {
    return {0, kNoExponent};
  } else {
    int shift = std::countl_zero(static_cast<uint32_t>(significand)) - 8;
    significand <<= shift;
    exponent = -126 - shift;
  }
  return {(bits >> 31) != 0 ? -significand : significand, exponent};
}

// Truncates a sum to 24 significant bits, towards zero; to fewer bits below the normal range. The
// lowest bit of `sum` has the value 2^exponent.
float cut(int64_t sum, int exponent) {
  int64_t magnitude = sum < 0 ? -sum : sum;
  if (magnitude == 0) return 0.0f;
  int excess = 64 - std::countl_zero(static_cast<uint64_t>(magnitude)) - 24;
  excess = std::min(std::max(excess, -149 - exponent), 63);
  if (excess > 0) magnitude = magnitude >> excess << excess;
  auto out = static_cast<float>(std::ldexp(static_cast<double>(magnitude), exponent));
  return sum < 0 ? -out : out;
}

struct SplitRow {
  int32_t significands[kCols];
  int32_t exponents[kCols];
};

// Adds one step of products to kCols sums at once. a: [count], b: [count].
inline __attribute__((always_inline)) void add_step(
    float* d, const Split* a, const SplitRow* b, int count, int fraction_bits) {
  Split addends[kCols];
  int32_t largest[kCols];
  int64_t sums[kCols];
  for (int n = 0; n < kCols; ++n) {
    addends[n] = split(d[n]);
    largest[n] = addends[n].exponent;
  }
  for (int i = 0; i < count; ++i) {
    for (int n = 0; n < kCols; ++n) {
      largest[n] = std::max(largest[n], a[i].exponent + b[i].exponents[n]);
    }
  }
  // Significands have 23 fractional bits, products 46; shifts of more than 63 bits leave nothing.
  for (int n = 0; n < kCols; ++n) {
    int shift = std::min(23 - fraction_bits + largest[n] - addends[n].exponent, 63);
    int64_t magnitude = std::abs(addends[n].significand);
    magnitude = shift < 0 ? magnitude << -shift : magnitude >> shift;
    sums[n] = addends[n].significand < 0 ? -magnitude : magnitude;
  }
  for (int i = 0; i < count; ++i) {
    for (int n = 0; n < kCols; ++n) {
      int shift =
          std::min(46 - fraction_bits + largest[n] - (a[i].exponent + b[i].exponents[n]), 63);
      int64_t product = int64_t{a[i].significand} * b[i].significands[n];
      uint64_t magnitude = static_cast<uint64_t>(product < 0 ? -product : product) >> shift;
      sums[n] += product < 0 ? -static_cast<int64_t>(magnitude) : static_cast<int64_t>(magnitude);
    }
  }
  for (int n = 0; n < kCols; ++n) {
    if (largest[n] > kNoExponent / 2) d[n] = cut(sums[n], largest[n] - fraction_bits);
  }
}

void add_step_plain(float* d, const Split* a, const SplitRow* b, int count, int fraction_bits) {
  add_step(d, a, b, count, fraction_bits);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void add_step_avx2(
    float* d, const Split* a, const SplitRow* b, int count, int fraction_bits) {
  add_step(d, a, b, count, fraction_bits);
}
#endif

// Computes d += a * b in steps of kDepth products. Infinities and NaN follow ordinary float
// arithmetic.
template <int kDepth>
void multiply_truncated(float (*d)[kCols],
                        const float (*a)[kDepth],
                        const float (*b)[kCols],
                        int step,
                        int fraction_bits) {
  auto add = add_step_plain;
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx2) add = add_step_avx2;
#endif
  SplitRow b_split[kDepth];
  bool b_finite = true;
  for (int i = 0; i < kDepth; ++i) {
    for (int n = 0; n < kCols; ++n) {
      Split one = split(b[i][n]);
      b_split[i].significands[n] = one.significand;
      b_split[i].exponents[n] = one.exponent;
      b_finite = b_finite && std::isfinite(b[i][n]);
    }
  }
  for (int row = 0; row < kRows; ++row) {
    Split a_split[kDepth];
    bool finite = b_finite;
    float plain[kCols];
    for (int n = 0; n < kCols; ++n) {
      plain[n] = d[row][n];
      finite = finite && std::isfinite(plain[n]);
    }
    for (int i = 0; i < kDepth; ++i) {
      a_split[i] = split(a[row][i]);
      finite = finite && std::isfinite(a[row][i]);
    }
    if (!finite) {
      for (int i = 0; i < kDepth; ++i) {
        for (int n = 0; n < kCols; ++n) plain[n] += a[row][i] * b[i][n];
      }
    }
    for (int i = 0; i < kDepth; i += step) {
      add(d[row], a_split + i, b_split + i, step, fraction_bits);
    }
    if (finite) continue;
    for (int n = 0; n < kCols; ++n) {
      if (!std::isfinite(plain[n])) d[row][n] = plain[n];
    }
  }
}

RowRule fma_rule() {
#if defined(__x86_64__)
  static const bool has_fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (has_fma) return row_fma_avx2;
#endif
  return row_fma_plain;
}

float bf16(uint32_t bits) { return std::bit_cast<float>(bits << 16); }

float f16(uint32_t bits) { return to_float(float16{static_cast<uint16_t>(bits)}); }

float e4m3(uint32_t bits) {
  uint32_t exponent = bits >> 3 & 15;
  uint32_t mantissa = bits & 7;
  float magnitude = exponent == 0 ? static_cast<float>(mantissa) * 0x1p-9f
                                  : std::ldexp(1.0f + static_cast<float>(mantissa) / 8.0f,
                                               static_cast<int>(exponent) - 7);
  if (exponent == 15 && mantissa == 7) magnitude = std::numeric_limits<float>::quiet_NaN();
  return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

// Multiplies with kPerWord elements per 32-bit register: two 16-bit ones or four e4m3. In the terms
// of the PTX manual, with group = lane / 4 and quad = lane % 4:
//   a[0] row group,     k = kPerWord * quad...      a[1] row group + 8, the same k
//   a[2] row group,     the same k + half           a[3] row group + 8, the same k + half
//   b[0] column group,  k = kPerWord * quad...      b[1] the same k + half
//   d[0], d[1] row group, columns 2 * quad, + 1     d[2], d[3] row group + 8
template <int kPerWord, float (*kDecode)(uint32_t)>
void multiply(void* const* operands) {
  constexpr int kDepth = 8 * kPerWord;
  constexpr int kHalf = kDepth / 2;
  constexpr int kBits = 32 / kPerWord;
  constexpr uint32_t kMask = (1u << kBits) - 1;
  ++counters.mmas;
  float a[kRows][kDepth];
  float b[kDepth][kCols];
  float d[kRows][kCols];
  for (int lane = 0; lane < kLanes; ++lane) {
    const auto& own = *static_cast<const MmaOperands*>(operands[lane]);
    int group = lane / 4;
    int quad = lane % 4;
    for (int part = 0; part < kPerWord; ++part) {
      int k = kPerWord * quad + part;
      for (int word = 0; word < 4; ++word) {
        a[group + word % 2 * 8][k + word / 2 * kHalf] =
            kDecode(own.a[word] >> part * kBits & kMask);
      }
      for (int word = 0; word < 2; ++word) {
        b[k + word * kHalf][group] = kDecode(own.b[word] >> part * kBits & kMask);
      }
    }
    for (int i = 0; i < 4; ++i) d[group + i / 2 * 8][2 * quad + i % 2] = own.d[i];
  }
  switch (settings.accumulation) {
    case Accumulation::kFma: {
      RowRule add = fma_rule();
      for (int row = 0; row < kRows; ++row) add(d[row], a[row], b[0], kDepth);
      break;
    }
    case Accumulation::kHopper:
      multiply_truncated<kDepth>(d, a, b, kDepth, 25);
      break;
    case Accumulation::kAmpere:
      multiply_truncated<kDepth>(d, a, b, kDepth / 2, 24);
      break;
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    const auto& own = *static_cast<const MmaOperands*>(operands[lane]);
    for (int i = 0; i < 4; ++i) own.d[i] = d[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
  }
}

// Returns the number of passes that reading eight rows of 16 bytes takes: different rows in the
// same four banks are read one after another.
int passes(void* const* operands, int first_lane) {
  int worst = 1;
  for (int i = 0; i < 8; ++i) {
    auto address = [&](int lane) {
      return reinterpret_cast<uintptr_t>(static_cast<LdmatrixOperands*>(operands[lane])->row);
    };
    int same_banks = 1;
    for (int j = 0; j < i; ++j) {
      uintptr_t one = address(first_lane + i), other = address(first_lane + j);
      if (one != other && one % 128 == other % 128) ++same_banks;
    }
    worst = std::max(worst, same_banks);
  }
  return worst;
}

}  // namespace

void complete_mma_bf16(void* const* operands, uint32_t) { multiply<2, bf16>(operands); }
void complete_mma_f16(void* const* operands, uint32_t) { multiply<2, f16>(operands); }
void complete_mma_e4m3(void* const* operands, uint32_t) { multiply<4, e4m3>(operands); }

// Executes mma of 8-bit integers, in the fragments of e4m3. Sums wrap, as in hardware without
// .satfinite.
template <bool kUnsigned>
void complete_mma_int8(void* const* operands, uint32_t) {
  constexpr int kDepth = 32;
  ++counters.mmas;
  int a[kRows][kDepth], b[kCols][kDepth];
  auto byte = [](uint32_t word, int part) { return static_cast<uint8_t>(word >> 8 * part); };
  for (int lane = 0; lane < kLanes; ++lane) {
    const auto& own = *static_cast<const IntMmaOperands*>(operands[lane]);
    int group = lane / 4, quad = lane % 4;
    for (int part = 0; part < 4; ++part) {
      int k = 4 * quad + part;
      for (int word = 0; word < 4; ++word) {
        int& to = a[group + word % 2 * 8][k + word / 2 * 16];
        to = static_cast<int8_t>(byte(own.a[word], part));
      }
      for (int word = 0; word < 2; ++word) {
        uint8_t bits = byte(own.b[word], part);
        b[group][k + word * 16] = kUnsigned ? int{bits} : int{static_cast<int8_t>(bits)};
      }
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    const auto& own = *static_cast<const IntMmaOperands*>(operands[lane]);
    for (int i = 0; i < 4; ++i) {
      const int* row = a[lane / 4 + i / 2 * 8];
      const int* col = b[2 * (lane % 4) + i % 2];
      auto sum = static_cast<uint32_t>(own.d[i]);
      for (int k = 0; k < kDepth; ++k) sum += static_cast<uint32_t>(row[k] * col[k]);
      own.d[i] = static_cast<int>(sum);
    }
  }
}

template void complete_mma_int8<false>(void* const*, uint32_t);
template void complete_mma_int8<true>(void* const*, uint32_t);

// Executes ldmatrix for a warp. Lane 8 * tile + row passes the address of a row. Register `tile` of
// a lane receives the elements 2 * quad and 2 * quad + 1 of row `group` or, if transposed, of
// column `group`.
template <int kTiles, bool kTrans>
void complete_ldmatrix(void* const* operands, uint32_t) {
  [[maybe_unused]] int warp_first = current_thread / kLanes * kLanes;
  for (int lane = 0; lane < 8 * kTiles; ++lane) {
    const auto& own = *static_cast<const LdmatrixOperands*>(operands[lane]);
    check_aligned(own.row, 16, "a row of ldmatrix", *own.site);
    check_shared(own.row, 16, "ldmatrix", *own.site);
  }
  for (int tile = 0; tile < kTiles; ++tile) {
    if (settings.bank_conflicts) {
      int count = passes(operands, 8 * tile);
      if (count > counters.bank_conflict) {
        const Site& site = *static_cast<const LdmatrixOperands*>(operands[0])->site;
        counters.bank_conflict = count;
        counters.bank_conflict_site =
            std::string(site.file_name()) + ":" + std::to_string(site.line());
      }
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      int group = lane / 4;
      int quad = lane % 4;
      uint16_t halves[2];
      for (int i = 0; i < 2; ++i) {
        int row = kTrans ? 2 * quad + i : group;
        int col = kTrans ? group : 2 * quad + i;
        const auto& source = *static_cast<const LdmatrixOperands*>(operands[8 * tile + row]);
        on_read(static_cast<const char*>(source.row) + 2 * col, 2, *source.site, warp_first + lane);
        std::memcpy(&halves[i], static_cast<const char*>(source.row) + 2 * col, 2);
      }
      auto& own = *static_cast<LdmatrixOperands*>(operands[lane]);
      own.out[tile] = halves[0] | static_cast<uint32_t>(halves[1]) << 16;
    }
  }
}

template void complete_ldmatrix<2, false>(void* const*, uint32_t);
template void complete_ldmatrix<2, true>(void* const*, uint32_t);
template void complete_ldmatrix<4, false>(void* const*, uint32_t);
template void complete_ldmatrix<4, true>(void* const*, uint32_t);

}  // namespace specops::simt
