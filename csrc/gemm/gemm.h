// SPDX-License-Identifier: Apache-2.0
// Product of rows and a packed weight: parameters common to all ops that compute one.
#pragma once

#include "gemm/weight.h"

namespace specops {

// On CUDA, a workspace begins with this many int32 counters, one per split tile of linear, which
// count its finished leaves. They are zero before and after every call. Only one call at a time may
// use a workspace.
constexpr int64_t kWorkspaceCounters = 128;

struct GemmParams {
  const void* x;  // [rows, num_inputs], rows x_stride apart
  WeightParams weight;
  const void* bias;  // [num_outputs], of dtype, gates before ups; may be nullptr
  void* out;         // [rows, num_outputs], contiguous; half as wide if gated
  int64_t rows;
  int64_t x_stride;  // elements between rows
  DType dtype;       // dtype of x, bias, plain weights: bfloat16 or float32, on CUDA also float16
  DType out_dtype;   // dtype of out: dtype or float32; if gated, dtype
  // Maps row r of out to a row of x; nullptr: to row r.
  const int32_t* row_indices = nullptr;
};

}  // namespace specops
