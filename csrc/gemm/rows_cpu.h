// SPDX-License-Identifier: Apache-2.0
// Rows of inputs in the form in which tiles read them.
#pragma once

#include <cstring>
#include <type_traits>

#include "common/growing_array.h"
#include "gemm/finish_cpu.h"
#include "gemm/step_cpu.h"

namespace specops::SPECOPS_ISA {
namespace {

template <typename S>
struct Rows {
  const typename S::Input* x;
  int64_t stride;
  const float* scales;  // of integers: one for each group
  int64_t scale_stride;

  Rows from(int64_t row) const {
    return {x + row * stride, stride, scales + row * scale_stride, scale_stride};
  }
};

// Rows that a thread has gathered or made floats or integers of, as many at once as a tile holds.
template <typename T>
thread_local GrowingArray<T> gathered_rows;
thread_local GrowingArray<float> float_rows;
thread_local GrowingArray<int16_t> integer_rows;
thread_local GrowingArray<float> row_scales;

// The integers of one group, of which n inputs are there, and zeros behind them. Returns the scale.
template <typename T>
float quantize_group(const T* x, int64_t n, int16_t* out) {
  float values[kIntegerGroup];
  for (int64_t i = 0; i < kIntegerGroup; i += kLanes) {
    store(values + i, load_partial(x + i, static_cast<int>(max64(min64(n - i, kLanes), 0))));
  }
  uint32_t bits[kIntegerGroup], peak = 0;
  std::memcpy(bits, values, sizeof(bits));
  for (int i = 0; i < kIntegerGroup; ++i) {
    uint32_t magnitude = bits[i] & 0x7fffffff;
    peak = magnitude > peak ? magnitude : peak;
  }
  GroupScale group = group_scale(peak);
  float scale, inverse;
  std::memcpy(&scale, &group.scale, 4);
  std::memcpy(&inverse, &group.inverse, 4);
  if (!group.is_finite) {
    std::memset(out, 0, kIntegerGroup * sizeof(int16_t));
    return scale;
  }
  // Beside 1.5 * 2^23 a float has no digits behind the point: the addition rounds as it should.
  constexpr float kWhole = 12582912.0f;
  constexpr int32_t kWholeBits = 0x4b400000;
  for (int i = 0; i < kIntegerGroup; ++i) values[i] = values[i] * inverse + kWhole;
  int32_t whole[kIntegerGroup];
  std::memcpy(whole, values, sizeof(whole));
  for (int i = 0; i < kIntegerGroup; ++i) {
    int32_t code = whole[i] - kWholeBits;
    out[i] = static_cast<int16_t>(code < 32767 ? code : 32767);
  }
  return scale;
}

template <typename T>
const T* row_at(const GemmParams& params, int64_t row) {
  if (params.row_indices != nullptr) row = params.row_indices[row];
  return static_cast<const T*>(params.x) + row * params.x_stride;
}

// The rows from `row` on; what they had in this thread's memory is gone.
template <typename S>
Rows<S> rows_from(const GemmParams& params, int64_t row, int64_t rows) {
  using T = typename S::Row;
  int64_t num_inputs = params.weight.num_inputs;
  if constexpr (S::kGroupSteps > 0) {
    int64_t groups = integer_groups(num_inputs);
    // A line more, or the same inputs of all rows would fall into the same set of the cache.
    int64_t stride = groups * kIntegerGroup + 2 * kWeightBlock;
    int16_t* integers = integer_rows.reserve(rows * stride);
    float* scales = row_scales.reserve(rows * groups);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t g = 0; g < groups; ++g) {
        int64_t first = g * kIntegerGroup;
        const T* from = row_at<T>(params, row + r) + first;
        scales[r * groups + g] =
            quantize_group(from, num_inputs - first, integers + r * stride + first);
      }
    }
    return {integers, stride, scales, groups};
  } else if constexpr (std::is_same_v<T, typename S::Input>) {
    if (params.row_indices == nullptr) {
      return {row_at<T>(params, row), params.x_stride, nullptr, 0};
    }
    int64_t stride = num_inputs + 2 * kWeightBlock;  // a line more, as above
    T* gathered = gathered_rows<T>.reserve(rows * stride);
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(gathered + r * stride,
                  row_at<T>(params, row + r),
                  static_cast<size_t>(num_inputs) * sizeof(T));
    }
    return {gathered, stride, nullptr, 0};
  } else {
    int64_t width = (num_inputs + kWeightBlock - 1) / kWeightBlock * kWeightBlock;
    int64_t stride = width + kWeightBlock;  // a line more, as above
    float* floats = float_rows.reserve(rows * stride);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < width; i += kWeightBlock) {
        int n = static_cast<int>(min64(num_inputs - i, kWeightBlock));
        store(floats + r * stride + i, load_partial(row_at<T>(params, row + r) + i, n));
      }
    }
    return {floats, stride, nullptr, 0};
  }
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
