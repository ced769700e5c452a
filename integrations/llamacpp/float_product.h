// SPDX-License-Identifier: Apache-2.0
// Product of float32 rows and a matrix of any type of ggml, read where it is: keys and values of the
// KV cache, and weights that have no packed layout here.
#pragma once

#include <cstdint>

#include "common/isa.h"
#include "ggml.h"

namespace specops {

// A matrix in ggml's layout. Its numbers are converted to float32 as they are read.
struct GgmlMatrix {
  const void* data;
  ggml_type type;
  size_t row_bytes;  // distance of rows in bytes
  int64_t num_outputs, num_inputs;
  bool rows_are_inputs;  // otherwise a row of the matrix has the inputs of one output
};

// out[row, n] = sum_k x[row, k] * matrix[n, k], for contiguous out.
struct FloatProductParams {
  GgmlMatrix matrix;
  const float* x;
  int64_t rows, x_stride;      // x_stride in floats
  const int32_t* row_indices;  // maps row r of out to a row of x; nullptr: to row r
  float* out;
};

// out[row, i] = exp(s - top) / sum for s = score(row, i). The top is the largest score of the row.
struct SoftmaxParams {
  const float* in;  // [rows, width], scores before the scale
  float* out;       // [rows, width]; may be in
  int64_t rows, width;
  float scale, soft_cap;      // soft_cap 0: none
  const float* const* masks;  // per row: `width` numbers, added to the scores; nullptr: no mask
  const float* slopes;        // per row: factor of the mask
  const float* sinks;         // per row: a score without a value; nullptr: none
};

SPECOPS_DECLARE_CPU(float_product_cpu, FloatProductParams);
SPECOPS_DECLARE_CPU(softmax_cpu, SoftmaxParams);

}  // namespace specops
