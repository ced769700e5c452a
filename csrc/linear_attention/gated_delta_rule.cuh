// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "linear_attention/gated_delta_rule.h"
#include "linear_attention/state_columns.cuh"

namespace specops {

constexpr int kDeltaKeys = kMostKeyDim / kStateLanes;  // elements of a column per thread
constexpr int kDeltaWarps = kStateThreads / kWarpSize;
static_assert(kMostKeyDim == kStateThreads, "a thread normalizes one element of q and of k");

// q, k and, with a decay per key channel, the decays of a row in shared memory; and the sums of
// squares of q and k per warp.
struct DeltaShared {
  float q[kMostKeyDim];
  float k[kMostKeyDim];
  float decay[kMostKeyDim];
  float q_squares[kDeltaWarps];
  float k_squares[kDeltaWarps];
};

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) {
    x = __fadd_rn(x, __shfl_xor_sync(kFullMask, x, lanes));
  }
  return x;
}

// Inputs of a thread for one row: its elements of q and k, `a` for the decay, `b` for the strength,
// and the value of its column. Those that the thread does not have are zero.
struct DeltaInputs {
  float query, key, a, b, v;
};

// Stores q and k of one row to shared memory, normalized to length `scale` (q) and 1 (k); with
// kHasChannels, also stores `decay` of this thread's key channel.
template <bool kHasChannels>
__device__ inline void share_row(
    DeltaShared& shared, float query, float key, float scale, float decay) {
  int thread = static_cast<int>(threadIdx.x);
  float q_squares = warp_sum(__fmul_rn(query, query)), k_squares = warp_sum(__fmul_rn(key, key));
  __syncthreads();  // all threads are done with the previous row
  if (thread % kWarpSize == 0) {
    shared.q_squares[thread / kWarpSize] = q_squares;
    shared.k_squares[thread / kWarpSize] = k_squares;
  }
  __syncthreads();
  q_squares = k_squares = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kDeltaWarps; ++warp) {
    q_squares = __fadd_rn(q_squares, shared.q_squares[warp]);
    k_squares = __fadd_rn(k_squares, shared.k_squares[warp]);
  }
  auto inverse = [](float squares) {
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(squares, kKeyNormEps)));
  };
  shared.q[thread] = __fmul_rn(__fmul_rn(query, inverse(q_squares)), scale);
  shared.k[thread] = __fmul_rn(key, inverse(k_squares));
  if constexpr (kHasChannels) shared.decay[thread] = decay;
  __syncthreads();
}

// Computes, for each row in order, with q and k normalized to length key_dim^-1/2 and 1:
// state = decay * state; state += k (v - k state) strength; out = q state.
// The decay is one factor per head or, with kHasChannels, one per key channel.
// Grid:    x = (batch + 1) * value heads * pieces of 32 columns of a state (unbounded); the last
//          ones handle padding rows.
// Block:   128 threads; four threads hold a column of a state in registers, every fourth element
//          each.
// Smem:    DeltaShared.
// Cost:    7 * key_dim * value_dim operations per row and value head; a state is read once, and
//          written once for each row that may be the last accepted one. The next row is read while
//          one is computed.
// Assumes: no slot appears twice.
// Order:   row by row, in fp32. Sums over key_dim: chains from zero over the elements of a thread,
//          then a tree of four. Sums of squares: a tree over a warp, then warps in order. No order
//          depends on the number of rows in a step. A request with a fault is reported, and its
//          rows are not written.
// Source:  Yang, Kautz and Hatamizadeh 2024 (Gated DeltaNet); Kimi Team 2025 (Kimi Linear).
template <typename T, bool kHasChannels>
__global__ void __launch_bounds__(kStateThreads)
    gated_delta_rule_kernel(GatedDeltaRuleParams params) {
  wait_for_previous_kernel();
  auto& shared = *reinterpret_cast<DeltaShared*>(shared_memory());
  int64_t heads = params.num_value_heads, value_dim = params.value_dim;
  int dim = static_cast<int>(params.key_dim), thread = static_cast<int>(threadIdx.x);
  int64_t pieces = (value_dim + kStateColumns - 1) / kStateColumns, window = params.of.window;
  int64_t request = blockIdx.x / (heads * pieces), head = blockIdx.x / pieces % heads;
  int64_t col = blockIdx.x % pieces * kStateColumns + thread / kStateLanes;
  int lane = thread % kStateLanes;
  bool has_column = col < value_dim;
  Fault fault = find_fault(params, request);
  if (fault.found()) {
    if (head == 0 && col == 0 && lane == 0) report_error(params.error, fault.code);
    return;
  }
  SlotRange range = range_of(params.of, request);
  T* out = static_cast<T*>(params.out) + head * value_dim + col;
  if (range.slot < 0) {
    if (!has_column || lane > 0) return;
    for (int64_t row = range.first; row < range.end; ++row) {
      out[row * heads * value_dim] = from_float<T>(0.0f);
    }
    return;
  }
  // Returns the address of this thread's first element of the state after a position.
  auto state_of = [&](int64_t position) {
    int64_t place = (range.slot * window + position % window) * heads + head;
    return params.states + (place * dim + lane) * value_dim + col;
  };
  int step = kStateLanes * static_cast<int>(value_dim);
  float state[kDeltaKeys] = {};
  if (range.begin > 0 && has_column) {
    const float* from = state_of(range.begin - 1);
#pragma unroll
    for (int i = 0; i < kDeltaKeys; ++i) {
      if (i * kStateLanes < dim) state[i] = from[i * step];
    }
  }
  int64_t key_head = head / (heads / params.num_key_heads) * dim;
  float scale = __fdiv_rn(1.0f, __fsqrt_rn(static_cast<float>(dim)));
  // The decay of the head or, with kHasChannels, of this thread's key channel.
  int64_t channel = kHasChannels ? head * dim + thread : head;
  bool has_key = thread < dim, has_decay = !kHasChannels || has_key;
  float a_log = params.a_log[head], bias = has_decay ? params.dt_bias[channel] : 0.0f;
  auto read = [](const void* values, int64_t place) {
    return to_float(static_cast<const T*>(values)[place]);
  };
  auto inputs_of = [&](int64_t row) {
    DeltaInputs inputs{};
    if (row == range.end) return inputs;
    if (has_key) {
      inputs.query = read(params.q, row * params.q_stride + key_head + thread);
      inputs.key = read(params.k, row * params.k_stride + key_head + thread);
    }
    if (has_decay) inputs.a = read(params.a, row * params.a_stride + channel);
    inputs.b = read(params.b, row * params.b_stride + head);
    if (has_column) inputs.v = read(params.v, row * params.v_stride + head * value_dim + col);
    return inputs;
  };
  DeltaInputs next = inputs_of(range.first);
  for (int64_t row = range.first; row < range.end; ++row) {
    DeltaInputs own = next;
    next = inputs_of(row + 1);
    float decay = has_decay ? decay_of(a_log, softplus(own.a + bias)) : 0.0f;
    share_row<kHasChannels>(shared, own.query, own.key, scale, decay);
    float strength = strength_of(own.b), sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kDeltaKeys; ++i) {
      if constexpr (kHasChannels) decay = shared.decay[i * kStateLanes + lane];
      state[i] = __fmul_rn(decay, state[i]);
      sum = __fmaf_rn(shared.k[i * kStateLanes + lane], state[i], sum);
    }
    float delta = __fmul_rn(__fsub_rn(own.v, column_sum(sum)), strength);
    sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kDeltaKeys; ++i) {
      state[i] = __fmaf_rn(shared.k[i * kStateLanes + lane], delta, state[i]);
      sum = __fmaf_rn(shared.q[i * kStateLanes + lane], state[i], sum);
    }
    sum = column_sum(sum);
    if (!has_column) continue;
    if (lane == 0) out[row * heads * value_dim] = from_float<T>(sum);
    if (row + window < range.end) continue;  // a later row of this step has the same place
    float* to = state_of(range.begin + row - range.first);
#pragma unroll
    for (int i = 0; i < kDeltaKeys; ++i) {
      if (i * kStateLanes < dim) to[i * step] = state[i];
    }
  }
}

}  // namespace specops
