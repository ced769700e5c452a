// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/device.cuh"
#include "moe/moe_combine.h"

namespace specops {

constexpr int kCombineThreads = 256;

// Computes out = sum of weight * expert_out over the experts of a row, plus the output of the
// shared expert.
// Grid:    x = rows * pieces of 256 columns (unbounded).
// Block:   256 threads; each thread owns one column of one row.
// Smem:    none.
// Cost:    (top_k + 1) * 4 bytes read and an element written per column; memory-bound.
// Assumes: -
// Order:   one chain in the order of the row's experts, each product and each sum rounded to
//          float32, shared last; rounded once to the dtype. An invalid place is a fault and counts
//          as none.
// Source:  -
template <typename T>
__global__ void __launch_bounds__(kCombineThreads) moe_combine_kernel(MoeCombineParams params) {
  wait_for_previous_kernel();
  int64_t pieces = (params.width + kCombineThreads - 1) / kCombineThreads;
  int64_t row = blockIdx.x / pieces;
  int64_t col = blockIdx.x % pieces * kCombineThreads + threadIdx.x;
  if (col >= params.width) return;
  float total = 0.0f;
  for (int64_t pair = row * params.top_k; pair < (row + 1) * params.top_k; ++pair) {
    Fault fault = find_fault(params, pair);
    if (fault.found() && col == 0) report_error(params.error, fault.code);
    int64_t place = params.places[pair];
    if (fault.found() || place < 0) continue;
    float product =
        __fmul_rn(params.expert_weights[pair], params.expert_out[place * params.width + col]);
    total = __fadd_rn(total, product);
  }
  int64_t at = row * params.width + col;
  if (params.shared != nullptr) total = __fadd_rn(total, params.shared[at]);
  static_cast<T*>(params.out)[at] = from_float<T>(total);
}

}  // namespace specops
