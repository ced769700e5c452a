// SPDX-License-Identifier: Apache-2.0
// Product of rows with the weights of several experts.
#pragma once

#include <cstdint>

#include "common/error_flag.h"
#include "common/host_device.h"
#include "gemm/gemm.h"

namespace specops {

// Product of pairs (row, expert) with the weights of their experts. The rows of GemmParams are the
// pairs in the order of moe_sort. Its weight and bias are those of expert 0; those of the other
// experts follow in memory.
struct ExpertsParams : GemmParams {
  // [num_experts + 1], first pair of each expert; in tiles of rounded rows, nullptr means that one
  // expert has all rows
  const int32_t* expert_indptr;
  int64_t num_experts;
  int64_t x_rows;  // rows of x
  // Distances from one expert to the next in the arrays of the weight and in the bias.
  int64_t data_bytes;
  int64_t scales;  // in elements, as are the next two distances
  int64_t offsets;
  int64_t code_values;
  float* workspace;        // CUDA: the counters of linear, then rounded rows; may be nullptr
  int64_t workspace_size;  // in floats; if too small, rows are not rounded in advance
  ErrorFlag error;
};

SPECOPS_FAULT(6002, kMoeLinearExpertIndptr) =
    "moe_linear: expert_indptr must be non-decreasing from 0, at least the entry before it{ = #} "
    "and at most the rows of out{ = #}";
SPECOPS_FAULT(6003, kMoeLinearRowIndices) =
    "moe_linear: row_indices must be a row of x{, below #}, where an expert has it";

// Checks the range of pairs of expert e in expert_indptr.
SPECOPS_HOST_DEVICE Fault find_expert_fault(const ExpertsParams& params, int64_t e) {
  int32_t begin = params.expert_indptr[e], end = params.expert_indptr[e + 1];
  if (begin < 0 || (e == 0 && begin != 0)) {
    return fault_at(kMoeLinearExpertIndptr, begin, e).with(0, params.rows);
  }
  if (begin <= end && end <= params.rows) return {};
  return fault_at(kMoeLinearExpertIndptr, end, e + 1).with(begin, params.rows);
}

// Checks the entry of row_indices of a pair that belongs to an expert.
SPECOPS_HOST_DEVICE Fault find_row_fault(const ExpertsParams& params, int64_t pair) {
  int32_t row = params.row_indices[pair];
  if (row >= 0 && row < params.x_rows) return {};
  return fault_at(kMoeLinearRowIndices, row, pair).with(params.x_rows);
}

// Returns the size in bytes of float32, bfloat16 or float16, which are the dtypes of x, bias and
// out. Device code cannot call dtype_bytes.
SPECOPS_HOST_DEVICE int64_t real_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Returns the parameters of the product of one expert with `rows` pairs from `first` on.
SPECOPS_HOST_DEVICE GemmParams of_expert(const ExpertsParams& params,
                                         int64_t e,
                                         int64_t first,
                                         int64_t rows) {
  GemmParams one = params;
  int64_t outputs = params.weight.num_outputs;
  int64_t width = is_gated(params.weight.activation) ? outputs / 2 : outputs;
  WeightParams& weight = one.weight;
  weight.data = static_cast<const char*>(weight.data) + e * params.data_bytes;
  if (weight.scales != nullptr) weight.scales += e * params.scales;
  if (weight.offsets != nullptr) weight.offsets += e * params.offsets;
  if (weight.code_values != nullptr) weight.code_values += e * params.code_values;
  if (one.bias != nullptr) {
    one.bias = static_cast<const char*>(params.bias) + e * outputs * real_bytes(params.dtype);
  }
  one.out = static_cast<char*>(params.out) + first * width * real_bytes(params.out_dtype);
  if (one.row_indices != nullptr) {
    one.row_indices += first;
  } else {
    one.x = static_cast<const char*>(params.x) + first * params.x_stride * real_bytes(params.dtype);
  }
  one.rows = rows;
  return one;
}

}  // namespace specops
