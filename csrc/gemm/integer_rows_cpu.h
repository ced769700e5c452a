// SPDX-License-Identifier: Apache-2.0
// Rows as integers (integer_rows.h), on cpu.
#pragma once

#include <atomic>
#include <cstring>
#include <type_traits>

#include "common/growing_array.h"
#include "gemm/finish_cpu.h"
#include "gemm/gathered_cpu.h"
#include "gemm/integer_rows.h"
#include "gemm/unrolled_cpu.h"

namespace specops::SPECOPS_ISA {
namespace {

// A piece is the most inputs, from a multiple of so many on, whose rows and weights have one scale
// each. Its sum of products is exact.
struct Pieces {
  int64_t row_group;  // inputs that share a scale of the row
  int64_t inputs;     // of a piece
  int64_t count;

  explicit Pieces(const WeightParams& weight) {
    row_group = weight.row_numbers == RowNumbers::kInt16 ? kIntegerGroup : kInt8Group;
    // The greatest common divisor of both groups: that of the row is a power of two.
    int64_t power = weight.group & -weight.group;
    inputs = power == 0 ? row_group : min64(power, row_group);
    count = (weight.num_inputs + inputs - 1) / inputs;
  }
};

// Of int16_t every four inputs are the first, third, second, fourth; of int8_t they are in order.
template <typename Integer>
struct IntegerRows {
  const Integer* x;  // zeros behind the last input
  int64_t stride;
  // [pieces, count]
  const float* scales;
  const int32_t* starts;  // what a sum of codes begins at
  const float* sums;      // of a piece's integers
  int64_t count;          // of rows

  IntegerRows from(int64_t row) const {
    return {x + row * stride, stride, scales + row, starts + row, sums + row, count};
  }
};

// Rows that a thread has made integers of, and whose: it meets them again in every range of a call.
thread_local GrowingArray<int16_t> integer_rows;
thread_local GrowingArray<float> row_scales;
thread_local GrowingArray<int32_t> row_starts;
thread_local GrowingArray<float> row_sums;
struct RoundedRows {
  uint64_t call;
  const void* out;  // experts of a call have rows of their own
  int64_t row, count;
  bool operator==(const RoundedRows&) const = default;
};
thread_local RoundedRows rounded_rows{};

// A number that no other call of a product has; from 1 on.
inline uint64_t next_call() {
  static std::atomic<uint64_t> calls{0};
  return ++calls;
}

// Rows are rounded by 128 inputs: four quarters, whose largest numbers and sums are found side by side.
constexpr int kQuarter = kIntegerGroup / 4;
static_assert(kQuarter == kInt8Group);
template <typename Number>
using Quarters [[gnu::vector_size(16)]] = Number;

struct Largest {
  template <typename V>
  V operator()(V a, V b) const {
    return a > b ? a : b;
  }
};
struct Sum {
  template <typename V>
  V operator()(V a, V b) const {
    return a + b;
  }
};

// All numbers of each quarter, joined.
template <typename Number, typename Join>
Quarters<Number> join_quarters(const Number* numbers, const Join& join) {
  Quarters<Number> joined[4];
  unrolled<4>([&](int q) SPECOPS_INLINE {
    alignas(32) Number eight[8];
    const Number* own = numbers + q * kQuarter;
    for (int i = 0; i < 8; ++i) {
      eight[i] = join(join(own[i], own[8 + i]), join(own[16 + i], own[24 + i]));
    }
    Quarters<Number> low, high;
    std::memcpy(&low, eight, 16);
    std::memcpy(&high, eight + 4, 16);
    joined[q] = join(low, high);
  });
  auto pairs = [&](const Quarters<Number>& a, const Quarters<Number>& b) {
    return join(__builtin_shufflevector(a, b, 0, 4, 1, 5), __builtin_shufflevector(a, b, 2, 6, 3, 7));
  };
  Quarters<Number> first = pairs(joined[0], joined[1]), last = pairs(joined[2], joined[3]);
  return join(__builtin_shufflevector(first, last, 0, 1, 4, 5),
              __builtin_shufflevector(first, last, 2, 3, 6, 7));
}

// Scale and inverse of a group, by the bits of its largest magnitude.
template <int kGroup>
void scale_group(uint32_t peak_bits, float& scale, float& inverse) {
  if constexpr (kGroup == kIntegerGroup) {
    GroupScale group = group_scale(peak_bits);
    std::memcpy(&scale, &group.scale, 4);
    std::memcpy(&inverse, &group.inverse, 4);
  } else {
    float peak;
    std::memcpy(&peak, &peak_bits, 4);
    bool counts = peak >= kLeastInt8Peak;
    scale = counts ? peak / 127.0f : 0.0f;
    inverse = counts ? 127.0f / peak : 0.0f;
  }
}

// Makes integers of 128 numbers; scales[q] is that of quarter q.
template <int kGroup>
void round_numbers(float* values, int32_t* integers, float* scales) {
  alignas(64) uint32_t magnitudes[kIntegerGroup];
  std::memcpy(magnitudes, values, sizeof(magnitudes));
  for (uint32_t& bits : magnitudes) bits &= 0x7fffffffu;
  alignas(16) uint32_t peaks[4];
  auto largest = join_quarters(magnitudes, Largest());
  std::memcpy(peaks, &largest, 16);
  uint32_t peak = Largest()(Largest()(peaks[0], peaks[1]), Largest()(peaks[2], peaks[3]));
  float inverses[4];
  if constexpr (kGroup == kIntegerGroup) {
    scale_group<kGroup>(peak, scales[0], inverses[0]);
    for (int q = 1; q < 4; ++q) scales[q] = scales[0], inverses[q] = inverses[0];
  } else {
    for (int q = 0; q < 4; ++q) scale_group<kGroup>(peaks[q], scales[q], inverses[q]);
  }
  constexpr uint32_t kInfinity = 0x7f800000u;
  if (peak >= kInfinity) {
    for (int q = 0; q < 4; ++q) {
      if (kGroup == kInt8Group && peaks[q] < kInfinity) continue;
      std::memset(values + q * kQuarter, 0, kQuarter * sizeof(float));
      scales[q] = __builtin_nanf("");
      inverses[q] = 0.0f;
    }
  }
  // Beside 1.5 * 2^23 a float has no digits behind the point: the addition rounds as it should.
  constexpr float kWhole = 12582912.0f;
  constexpr int32_t kWholeBits = 0x4b400000;
  for (int q = 0; q < 4; ++q) {
    for (int i = q * kQuarter; i < (q + 1) * kQuarter; ++i) {
      float whole = values[i] * inverses[q] + kWhole;
      int32_t code;
      std::memcpy(&code, &whole, 4);
      code -= kWholeBits;
      integers[i] = code < 32767 ? code : 32767;
    }
  }
}

// Narrows integers; in int16_t, the second and the third of every four change places.
inline void narrow(const int32_t* integers, int8_t* out) {
  for (int i = 0; i < kIntegerGroup; ++i) out[i] = static_cast<int8_t>(integers[i]);
}
inline void narrow(const int32_t* integers, int16_t* out) {
  using Word [[gnu::may_alias]] = uint64_t;
  constexpr uint64_t kLow = 0x0000ffff0000ffffu;  // of two integers
  const auto* pairs = reinterpret_cast<const Word*>(integers);
  auto* quads = reinterpret_cast<Word*>(out);
  for (int i = 0; i < kIntegerGroup / 4; ++i) {
    quads[i] = (pairs[2 * i] & kLow) | (pairs[2 * i + 1] & kLow) << 16;
  }
}

// 128 inputs as floats, zeros behind the last one.
template <typename T>
[[gnu::noinline]] void gather_inputs(const T* x,
                                     const WeightParams& weight,
                                     int64_t first,
                                     float* values) {
  for (int i = 0; i < kIntegerGroup; ++i) {
    int64_t k = first + i;
    bool is_there = k < weight.num_inputs;
    if (is_there && weight.input_order != nullptr) k = weight.input_order[k];
    values[i] = is_there ? to_float(x[k]) : 0.0f;
  }
}

// One row, whose groups have kGroup inputs. `x` has num_inputs elements; what lies behind them is not
// read.
template <int kGroup, typename T, typename Integer>
void round_row(const T* x,
               const WeightParams& weight,
               const Pieces& pieces,
               int bias,
               Integer* out,
               int64_t count,
               float* scales,
               int32_t* starts,
               float* sums) {
  for (int64_t first = 0; first < weight.num_inputs; first += kIntegerGroup) {
    alignas(64) float values[kIntegerGroup];
    int64_t left = weight.num_inputs - first;
    if (weight.input_order == nullptr && left >= kIntegerGroup) {
      unrolled<kIntegerGroup / kLanes>([&](int i) SPECOPS_INLINE {
        store(values + i * kLanes, load(x + first + i * kLanes));
      });
    } else {
      gather_inputs(x, weight, first, values);
    }
    alignas(64) int32_t integers[kIntegerGroup];
    float quarter_scales[4];
    round_numbers<kGroup>(values, integers, quarter_scales);
    narrow(integers, out + first);
    int32_t quarter_sums[4];
    auto joined = join_quarters(integers, Sum());
    std::memcpy(quarter_sums, &joined, 16);
    for (int i = 0; i < min64(kIntegerGroup, left);) {
      int quarter = i / kQuarter;
      int32_t sum = 0;
      if (pieces.inputs < kQuarter) {
        for (int64_t end = i + pieces.inputs; i < end; ++i) sum += integers[i];
      } else {
        for (int64_t end = i + pieces.inputs; i < end; i += kQuarter) sum += quarter_sums[i / kQuarter];
      }
      *scales = quarter_scales[quarter];
      *starts = -bias * sum;
      *sums = static_cast<float>(sum);
      scales += count;
      starts += count;
      sums += count;
    }
  }
}

// The rows from `row` on of a call; of what this thread's memory had, they alone are kept.
template <typename Integer>
IntegerRows<Integer> integer_rows_from(
    const GemmParams& params, int64_t row, int64_t rows, int bias, uint64_t call) {
  const WeightParams& weight = params.weight;
  Pieces pieces(weight);
  int64_t width = ceil_div(weight.num_inputs, kIntegerGroup) * kIntegerGroup;
  // A line more, or the same inputs of all rows would fall into the same set of the cache.
  int64_t stride = width + 64 / sizeof(Integer);
  auto* integers = reinterpret_cast<Integer*>(integer_rows.reserve(rows * stride));
  float* scales = row_scales.reserve(rows * pieces.count);
  int32_t* starts = row_starts.reserve(rows * pieces.count);
  float* sums = row_sums.reserve(rows * pieces.count);
  IntegerRows<Integer> made{integers, stride, scales, starts, sums, rows};
  RoundedRows wanted{call, params.out, row, rows};
  if (rounded_rows == wanted) return made;
  rounded_rows = wanted;
  for (int64_t r = 0; r < rows; ++r) {
    auto round = [&](const auto* x) {
      auto with_group = [&]<int kGroup>() {
        round_row<kGroup>(
            x, weight, pieces, bias, integers + r * stride, rows, scales + r, starts + r, sums + r);
      };
      if (pieces.row_group == kInt8Group) return with_group.template operator()<kInt8Group>();
      with_group.template operator()<kIntegerGroup>();
    };
    if (params.dtype == DType::kBFloat16) {
      round(row_at<bfloat16>(params, row + r));
    } else {
      round(row_at<float>(params, row + r));
    }
  }
  return made;
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
