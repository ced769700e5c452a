// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "attention/merge_states/merge_states.h"
#include "common/device.cuh"

namespace specops {

constexpr int kMergeThreads = 256;

// Computes out = sum_i e^(lse_i - lse) * out_i and lse = log sum_i e^lse_i, for each row and head.
// Grid:    one thread per kVector elements of out, blocks of 256 on x.
// Block:   256 threads. The threads of a (row, head) do not cooperate: each one folds the few lses
//          itself.
// Smem:    none.
// Cost:    every state read once, in 16-byte loads if head_dim allows; memory-bound.
// Assumes: contiguous tensors; kVector divides head_dim; if it exceeds 1, they are 16-byte aligned.
// Order:   states folded left in fp32: sums of weights relative to the running maximum; rounded
//          once. An empty state is skipped, whatever its out holds.
// Source:  Milakov and Gimelshein 2018; Ye et al. 2024 (cascade attention).
template <typename T, int kVector>
__global__ void __launch_bounds__(kMergeThreads) merge_states_kernel(MergeStatesParams params) {
  wait_for_previous_kernel();
  int64_t vectors = params.head_dim / kVector;
  int64_t index = int64_t{blockIdx.x} * kMergeThreads + threadIdx.x;
  if (index >= params.num_items * vectors) return;
  int64_t item = index / vectors;
  float top = -INFINITY, sum = 0.0f;
  for (int64_t state = 0; state < params.num_states; ++state) {
    float x = params.lses[state * params.num_items + item];
    if (x == -INFINITY) continue;
    float next = top > x ? top : x;
    sum = __fmaf_rn(sum, expf(__fsub_rn(top, next)), expf(__fsub_rn(x, next)));
    top = next;
  }
  float acc[kVector] = {};
  for (int64_t state = 0; state < params.num_states; ++state) {
    float x = params.lses[state * params.num_items + item];
    if (x == -INFINITY) continue;
    float weight = expf(__fsub_rn(x, top));
    const T* source = static_cast<const T*>(params.outs) +
                      state * params.num_items * params.head_dim + index * kVector;
    alignas(16) T values[kVector];
    if constexpr (kVector > 1) {
      *reinterpret_cast<uint4*>(values) = *reinterpret_cast<const uint4*>(source);
    } else {
      values[0] = source[0];
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) acc[i] = __fmaf_rn(weight, to_float(values[i]), acc[i]);
  }
  alignas(16) T values[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    values[i] = from_float<T>(sum == 0.0f ? 0.0f : __fdiv_rn(acc[i], sum));
  }
  T* out = static_cast<T*>(params.out) + index * kVector;
  if constexpr (kVector > 1) {
    *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(values);
  } else {
    out[0] = values[0];
  }
  if (index % vectors == 0) {
    params.lse[item] = sum == 0.0f ? -INFINITY : __fadd_rn(top, logf(sum));
  }
}

}  // namespace specops
