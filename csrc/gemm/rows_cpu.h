// SPDX-License-Identifier: Apache-2.0
// Rows of x in the form that tiles read.
#pragma once

#include <cstring>
#include <type_traits>

#include "common/growing_array.h"
#include "gemm/finish_cpu.h"
#include "gemm/gathered_cpu.h"
#include "gemm/step_cpu.h"

namespace specops::SPECOPS_ISA {
namespace {

template <typename S>
struct Rows {
  const typename S::Input* x;
  int64_t stride;

  Rows from(int64_t row) const { return {x + row * stride, stride}; }
};

// Rows that this thread has copied; at most as many as a tile has.
thread_local GrowingArray<float> float_rows;
thread_local GrowingArray<bfloat16> bfloat16_rows;

inline float* row_memory(float, int64_t size) { return float_rows.reserve(size); }
inline bfloat16* row_memory(bfloat16, int64_t size) { return bfloat16_rows.reserve(size); }

// Returns the rows from `row` on. They overwrite earlier rows in the memory of this thread.
template <typename S>
Rows<S> rows_from(const GemmParams& params, int64_t row, int64_t rows) {
  using T = typename S::Row;
  int64_t num_inputs = params.weight.num_inputs;
  constexpr bool kReadsRows = S::kGroupSteps == 0 && std::is_same_v<T, typename S::Input>;
  if (kReadsRows && params.row_indices == nullptr) {
    // The cast is valid: if tiles cannot read rows in place, Input is another type and this branch
    // is not taken.
    return {reinterpret_cast<const typename S::Input*>(row_at<T>(params, row)), params.x_stride};
  } else {
    using Input = typename S::Input;
    int64_t width = (num_inputs + kWeightBlock - 1) / kWeightBlock * kWeightBlock;
    // Add one cache line to the stride; otherwise the same inputs of all rows would map to the same
    // cache set.
    int64_t stride = width + kWeightBlock;
    Input* copies = row_memory(Input{}, rows * stride);
    const int32_t* order = params.weight.input_order;
    for (int64_t r = 0; r < rows; ++r) {
      const T* x = row_at<T>(params, row + r);
      for (int64_t i = 0; i < width; i += kWeightBlock) {
        int n = static_cast<int>(min64(num_inputs - i, kWeightBlock));
        Input* out = copies + r * stride + i;
        if (order == nullptr) {
          store(out, load_partial(x + i, n));
          continue;
        }
        T gathered[kWeightBlock];
        for (int j = 0; j < n; ++j) gathered[j] = x[order[i + j]];
        store(out, load_partial(gathered, n));
      }
    }
    return {copies, stride};
  }
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
