// SPDX-License-Identifier: Apache-2.0
// Rows times a packed weight: what every op that multiplies so has in common.
#pragma once

#include "gemm/weight.h"

namespace specops {

struct GemmParams {
  const void* x;  // [rows, num_inputs], rows x_stride apart
  WeightParams weight;
  const void* bias;  // [num_outputs], of dtype, gates before ups; may be nullptr
  void* out;         // [rows, num_outputs], contiguous; of gates and ups half as wide
  int64_t rows;
  int64_t x_stride;  // elements between rows
  DType dtype;       // bfloat16 or float32, CUDA: or float16; of x and bias, and of a plain weight
  DType out_dtype;   // of out: dtype, or float32; of gates and ups dtype
  // Row r is that row of x, where x has others between; nullptr: row r.
  const int32_t* row_indices = nullptr;
};

}  // namespace specops
