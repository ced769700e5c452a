// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "linear_attention/selective_state_update.h"
#include "linear_attention/state_columns.cuh"

namespace specops {

// b and c of a row in shared memory, padded with zeros.
struct SelectiveShared {
  float b[kMostStateDim];
  float c[kMostStateDim];
};

// Computes, for each row in order, with step = softplus(dt + dt_bias):
// state = exp(-exp(a_log) step) * state + b (step x); out = c state + d x.
// Grid:    x = (batch + 1) * heads * pieces of 32 columns of a state (unbounded); the last ones
//          handle padding rows.
// Block:   128 threads; four threads hold a column of a state in registers, every fourth element
//          each. kDim is the largest state_dim.
// Smem:    SelectiveShared.
// Cost:    5 * state_dim * head_dim operations per row and head; a state is read once, and written
//          once for each row that may be the last accepted one.
// Assumes: no slot appears twice.
// Order:   row by row, in fp32. Sums over state_dim: chains from zero over the elements of a thread,
//          then a tree of four, then d x. No order depends on the number of rows in a step. A
//          request with a fault is reported, and its rows are not written.
// Source:  Dao and Gu 2024 (Mamba-2).
template <typename T, int kDim>
__global__ void __launch_bounds__(kStateThreads)
    selective_state_update_kernel(SelectiveStateUpdateParams params) {
  wait_for_previous_kernel();
  constexpr int kElements = kDim / kStateLanes;  // elements of a column per thread
  auto& shared = *reinterpret_cast<SelectiveShared*>(shared_memory());
  int64_t heads = params.num_heads, head_dim = params.head_dim, window = params.of.window;
  int dim = static_cast<int>(params.state_dim), thread = static_cast<int>(threadIdx.x);
  int64_t pieces = (head_dim + kStateColumns - 1) / kStateColumns;
  int64_t request = blockIdx.x / (heads * pieces), head = blockIdx.x / pieces % heads;
  int64_t col = blockIdx.x % pieces * kStateColumns + thread / kStateLanes;
  int lane = thread % kStateLanes;
  bool has_column = col < head_dim;
  Fault fault = find_fault(params, request);
  if (fault.found()) {
    if (head == 0 && col == 0 && lane == 0) report_error(params.error, fault.code);
    return;
  }
  SlotRange range = range_of(params.of, request);
  T* out = static_cast<T*>(params.out) + head * head_dim + col;
  if (range.slot < 0) {
    if (!has_column || lane > 0) return;
    for (int64_t row = range.first; row < range.end; ++row) {
      out[row * heads * head_dim] = from_float<T>(0.0f);
    }
    return;
  }
  // Returns the address of this thread's first element of the state after a position.
  auto state_of = [&](int64_t position) {
    int64_t place = (range.slot * window + position % window) * heads + head;
    return params.states + (place * dim + lane) * head_dim + col;
  };
  int stride = kStateLanes * static_cast<int>(head_dim);
  float state[kElements] = {};
  if (range.begin > 0 && has_column) {
    const float* from = state_of(range.begin - 1);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (i * kStateLanes < dim) state[i] = from[i * stride];
    }
  }
  int64_t group = head / (heads / params.num_groups) * dim;
  for (int64_t row = range.first; row < range.end; ++row) {
    const T* b = static_cast<const T*>(params.b) + row * params.b_stride + group;
    const T* c = static_cast<const T*>(params.c) + row * params.c_stride + group;
    __syncthreads();  // all threads are done with the previous row
    for (int i = thread; i < kDim; i += kStateThreads) {
      shared.b[i] = i < dim ? to_float(b[i]) : 0.0f;
      shared.c[i] = i < dim ? to_float(c[i]) : 0.0f;
    }
    __syncthreads();
    float x = 0.0f;
    if (has_column) {
      int64_t place = row * params.x_stride + head * head_dim + col;
      x = to_float(static_cast<const T*>(params.x)[place]);
    }
    float dt = to_float(static_cast<const T*>(params.dt)[row * params.dt_stride + head]);
    float step = softplus(dt + params.dt_bias[head]);
    float decay = decay_of(params.a_log[head], step);
    float scaled = __fmul_rn(step, x), sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      int place = i * kStateLanes + lane;
      state[i] = __fmaf_rn(shared.b[place], scaled, __fmul_rn(decay, state[i]));
      sum = __fmaf_rn(shared.c[place], state[i], sum);
    }
    sum = column_sum(sum);
    if (!has_column) continue;
    if (lane == 0) {
      out[row * heads * head_dim] = from_float<T>(__fmaf_rn(params.d[head], x, sum));
    }
    if (row + window < range.end) continue;  // a later row of this step has the same place
    float* to = state_of(range.begin + row - range.first);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (i * kStateLanes < dim) to[i * stride] = state[i];
    }
  }
}

}  // namespace specops
