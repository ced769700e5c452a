// SPDX-License-Identifier: Apache-2.0
// Rounding of rows to integers on the CPU (integer_rows.h).
#pragma once

#include <atomic>
#include <cstring>

#include "common/growing_array.h"
#include "gemm/finish_cpu.h"
#include "gemm/gathered_cpu.h"
#include "gemm/integer_rows.h"

namespace specops::SPECOPS_ISA {
namespace {

// Division of a row into pieces. A piece is the largest aligned run of inputs that share one scale
// of the row and one scale of the weight. Its sum of products is exact.
struct Pieces {
  int64_t row_group;  // inputs that share a scale of the row
  int64_t inputs;     // inputs per piece
  int64_t count;

  explicit Pieces(const WeightParams& weight) {
    row_group = weight.row_numbers == RowNumbers::kInt16 ? kIntegerGroup : kInt8Group;
    // The greatest common divisor of both group sizes; that of the row is a power of two.
    int64_t power = weight.group & -weight.group;
    inputs = power == 0 ? row_group : min64(power, row_group);
    count = (weight.num_inputs + inputs - 1) / inputs;
  }
};

// Rounded rows, with their integers in the order that the products need (integer_step_cpu.h).
template <typename Integer>
struct IntegerRows {
  const Integer* x;  // zeros past the last input
  int64_t stride;
  // Each of the next arrays is [pieces, count].
  const float* scales;
  const int32_t* starts;  // initial values of the sums of products
  const float* sums;      // sums of a piece's integers
  int64_t count;          // number of rows

  IntegerRows from(int64_t row) const {
    return {x + row * stride, stride, scales + row, starts + row, sums + row, count};
  }
};

// Rows that this thread has rounded, and which rows they are: the thread needs them again for every
// range of a call.
thread_local GrowingArray<int16_t> integer_rows;
thread_local GrowingArray<float> row_scales;
thread_local GrowingArray<int32_t> row_starts;
thread_local GrowingArray<float> row_sums;
struct RoundedRows {
  uint64_t call;
  const void* out;  // the experts of a call have different rows
  int64_t row, count;
  bool operator==(const RoundedRows&) const = default;
};
thread_local RoundedRows rounded_rows{};

// Returns an id for a call that is unique in this process, from 1 on.
inline uint64_t next_call() {
  static std::atomic<uint64_t> calls{0};
  return ++calls;
}

// Rounds the numbers of a group to integers and returns the scale of the group.
template <int kGroup>
float round_group(const float* values, int32_t* out) {
  uint32_t peak_bits = 0;
  for (int i = 0; i < kGroup; ++i) {
    uint32_t bits;
    std::memcpy(&bits, values + i, 4);
    bits &= 0x7fffffffu;
    peak_bits = bits > peak_bits ? bits : peak_bits;
  }
  GroupScale group = group_scale(peak_bits);
  float scale, inverse;
  if (kGroup == kIntegerGroup || !group.is_finite) {
    std::memcpy(&scale, &group.scale, 4);
    std::memcpy(&inverse, &group.inverse, 4);
  } else {
    float peak;
    std::memcpy(&peak, &peak_bits, 4);
    bool counts = peak >= kLeastInt8Peak;
    scale = counts ? peak / 127.0f : 0.0f;
    inverse = counts ? 127.0f / peak : 0.0f;
  }
  if (!group.is_finite) {
    std::memset(out, 0, kGroup * sizeof(int32_t));
    return scale;
  }
  // A float near 1.5 * 2^23 has no fractional digits, so adding it rounds to an integer.
  constexpr float kWhole = 12582912.0f;
  constexpr int32_t kWholeBits = 0x4b400000;
  for (int i = 0; i < kGroup; ++i) {
    float whole = values[i] * inverse + kWhole;
    int32_t code;
    std::memcpy(&code, &whole, 4);
    code -= kWholeBits;
    out[i] = code < 32767 ? code : 32767;
  }
  return scale;
}

// Swaps the second and third integer of every four.
inline void swap_middles(int16_t* integers, int64_t count) {
  for (int64_t i = 0; i < count; i += 4) {
    uint64_t quad;
    std::memcpy(&quad, integers + i, 8);
    quad = (quad & 0xffff00000000ffffu) | (quad & 0xffff0000u) << 16 | (quad >> 16 & 0xffff0000u);
    std::memcpy(integers + i, &quad, 8);
  }
}

// Rearranges every kRun integers into their high bytes followed by their low bytes.
template <int kRun>
void split_bytes(int16_t* integers, int64_t count) {
  for (int64_t i = 0; i < count; i += kRun) {
    int16_t run[kRun];
    std::memcpy(run, integers + i, sizeof(run));
    uint8_t bytes[2 * kRun];
    for (int j = 0; j < kRun; ++j) {
      bytes[j] = static_cast<uint8_t>(run[j] >> 8);
      bytes[kRun + j] = static_cast<uint8_t>(run[j]);
    }
    std::memcpy(integers + i, bytes, sizeof(bytes));
  }
}

// Returns the part of an integer that the product multiplies by weights plus their bias: all of it,
// unless the product multiplies another part by the weights themselves.
template <typename Product>
int32_t biased_part(int32_t x) {
  if constexpr (requires { Product::biased(x); }) return Product::biased(x);
  return x;
}

// Rounds one row in groups of kGroup inputs. `x` has num_inputs elements and is not read past them.
template <typename Product, int kGroup, typename T>
void round_row(const T* x,
               const WeightParams& weight,
               const Pieces& pieces,
               int bias,
               typename Product::Integer* out,
               int64_t count,
               float* scales,
               int32_t* starts,
               float* sums) {
  constexpr int kParts = kGroup / kWeightBlock;  // the smallest piece is one part
  int64_t piece_parts = pieces.inputs / kWeightBlock;
  for (int64_t first = 0; first < weight.num_inputs; first += kGroup) {
    alignas(64) float values[kGroup];
    for (int i = 0; i < kGroup; i += kLanes) {
      int64_t left = max64(min64(weight.num_inputs - first - i, kLanes), 0);
      if (weight.input_order == nullptr) {
        bool whole = left == kLanes;
        store(values + i,
              whole ? load(x + first + i) : load_partial(x + first + i, static_cast<int>(left)));
        continue;
      }
      std::memset(values + i, 0, kLanes * sizeof(float));
      for (int64_t j = i; j < i + left; ++j) values[j] = to_float(x[weight.input_order[first + j]]);
    }
    alignas(64) int32_t integers[kGroup];
    float scale = round_group<kGroup>(values, integers);
    auto* group = out + first;
    for (int i = 0; i < kGroup; ++i) {
      group[i] = static_cast<typename Product::Integer>(integers[i]);
    }
    Product::arrange(group, kGroup);
    for (int part = 0; part < kParts && first + part * kWeightBlock < weight.num_inputs;) {
      int32_t sum = 0, biased = 0;
      for (int end = part + static_cast<int>(piece_parts); part < end; ++part) {
        for (int i = 0; i < kWeightBlock; ++i) {
          int32_t x = integers[part * kWeightBlock + i];
          sum += x;
          biased += biased_part<Product>(x);
        }
      }
      *scales = scale;
      *starts = -bias * biased;
      *sums = static_cast<float>(sum);
      scales += count;
      starts += count;
      sums += count;
    }
  }
}

// Returns the rounded rows of a call from `row` on. They overwrite earlier rows in the memory of
// this thread.
template <typename Product>
IntegerRows<typename Product::Integer> integer_rows_from(
    const GemmParams& params, int64_t row, int64_t rows, int bias, uint64_t call) {
  using Integer = typename Product::Integer;
  const WeightParams& weight = params.weight;
  Pieces pieces(weight);
  int64_t width = ceil_div(weight.num_inputs, kIntegerGroup) * kIntegerGroup;
  // Add one cache line to the stride; otherwise the same inputs of all rows would map to the same
  // cache set.
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
        round_row<Product, kGroup>(
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
