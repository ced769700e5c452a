// SPDX-License-Identifier: Apache-2.0
// ldmatrix and mma: the fragment layouts of the PTX manual, and three rounding rules for the sums.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "simt/ptx.h"
#include "simt/simt.h"

namespace specops::simt {
namespace {

constexpr int kRows = 16;  // of d; it has 8 columns
constexpr int kCols = 8;

// One row of d: every rule has this shape. a: [k], b: [k][kCols].
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

// Tensor cores add as integers: every product and the addend, shifted to the largest exponent and
// cut off below `fraction_bits` of it; the sum is cut to fp32. Products are exact.
float truncated_sum(float addend, const float* a, const float* b, int count, int fraction_bits) {
  constexpr int kMostTerms = 33;
  int exponents[kMostTerms];
  int64_t significands[kMostTerms];
  int terms = 0;
  int largest = -1000;
  float special = 0.0f;  // the fp32 sum, only to tell infinities and NaN
  bool finite = true;
  for (int i = -1; i < count; ++i) {
    float x = i < 0 ? addend : a[i];
    float y = i < 0 ? 1.0f : b[i * kCols];
    finite = finite && std::isfinite(x) && std::isfinite(y);
    special += x * y;
    if (x == 0.0f || y == 0.0f) continue;
    int x_exponent, y_exponent;
    // Significands in [1, 2): the exponent of a product is the sum, before it is normalised.
    auto x_bits = static_cast<int64_t>(std::frexp(x, &x_exponent) * 0x1p24f);
    auto y_bits = static_cast<int64_t>(std::frexp(y, &y_exponent) * 0x1p24f);
    if (!finite) continue;
    exponents[terms] = x_exponent - 1 + y_exponent - 1;
    significands[terms] = x_bits * y_bits;  // 46 fractional bits
    largest = std::max(largest, exponents[terms]);
    ++terms;
  }
  if (!finite) return special;
  if (terms == 0) return addend;
  int64_t sum = 0;
  for (int i = 0; i < terms; ++i) {
    int shift = 46 - fraction_bits + largest - exponents[i];
    int64_t magnitude = std::abs(significands[i]);
    magnitude = shift < 63 ? magnitude >> shift : 0;
    sum += significands[i] < 0 ? -magnitude : magnitude;
  }
  // Cut to 24 significant bits, toward zero; fewer below the normal range.
  int64_t magnitude = std::abs(sum);
  if (magnitude == 0) return 0.0f;
  int exponent = largest - fraction_bits;  // of the lowest bit
  int excess = 64 - std::countl_zero(static_cast<uint64_t>(magnitude)) - 24;
  excess = std::max(excess, -149 - exponent);
  if (excess > 0) magnitude = magnitude >> std::min(excess, 63) << std::min(excess, 63);
  double value = std::ldexp(static_cast<double>(magnitude), exponent);
  auto out = static_cast<float>(value);
  if (std::isinf(out)) out = std::numeric_limits<float>::infinity();
  return sum < 0 ? -out : out;
}

void row_truncated(float* d, const float* a, const float* b, int k, int step, int fraction_bits) {
  for (int n = 0; n < kCols; ++n) {
    for (int i = 0; i < k; i += step) {
      d[n] = truncated_sum(d[n], a + i, b + i * kCols + n, step, fraction_bits);
    }
  }
}

void row_hopper(float* d, const float* a, const float* b, int k) {
  row_truncated(d, a, b, k, k, 25);
}

void row_ampere(float* d, const float* a, const float* b, int k) {
  row_truncated(d, a, b, k, k / 2, 24);
}

RowRule rule() {
  switch (settings.accumulation) {
    case Accumulation::kHopper:
      return row_hopper;
    case Accumulation::kAmpere:
      return row_ampere;
    case Accumulation::kFma:
      break;
  }
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

// kPerWord elements to a 32-bit register: two 16-bit ones or four e4m3. In the manual's words, with
// group = lane / 4 and quad = lane % 4:
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
  RowRule add = rule();
  for (int row = 0; row < kRows; ++row) add(d[row], a[row], b[0], kDepth);
  for (int lane = 0; lane < kLanes; ++lane) {
    const auto& own = *static_cast<const MmaOperands*>(operands[lane]);
    for (int i = 0; i < 4; ++i) own.d[i] = d[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
  }
}

// The passes that eight rows of 16 bytes take: rows in the same four banks wait for each other,
// unless they are one row.
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

// Lane 8 * tile + row gives the address of a row. Register `tile` of a lane gets elements
// 2 * quad and 2 * quad + 1 of row `group`; transposed, of column `group`.
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
