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

  Rows from(int64_t row) const { return {x + row * stride, stride}; }
};

// Rows that a thread has copied, as many at once as a tile holds.
thread_local GrowingArray<float> float_rows;
thread_local GrowingArray<bfloat16> bfloat16_rows;

inline float* row_memory(float, int64_t size) { return float_rows.reserve(size); }
inline bfloat16* row_memory(bfloat16, int64_t size) { return bfloat16_rows.reserve(size); }

// The rows from `row` on; what they had in this thread's memory is gone.
template <typename S>
Rows<S> rows_from(const GemmParams& params, int64_t row, int64_t rows) {
  using T = typename S::Row;
  const T* x = static_cast<const T*>(params.x) + row * params.x_stride;
  int64_t num_inputs = params.weight.num_inputs;
  if constexpr (S::kGroupSteps == 0 && std::is_same_v<T, typename S::Input>) {
    return {x, params.x_stride};
  } else {
    using Input = typename S::Input;
    int64_t width = (num_inputs + kWeightBlock - 1) / kWeightBlock * kWeightBlock;
    // A line more, or the same inputs of all rows would fall into the same set of the cache.
    int64_t stride = width + kWeightBlock;
    Input* copies = row_memory(Input{}, rows * stride);
    const int32_t* order = params.weight.input_order;
    for (int64_t r = 0; r < rows; ++r, x += params.x_stride) {
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
