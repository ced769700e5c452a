// SPDX-License-Identifier: Apache-2.0
#include "linear_attention/selective_state_update.h"
#include "linear_attention/state_rows_cpu.h"

namespace specops::SPECOPS_ISA {
namespace {

// The inputs of one row.
struct RowInput {
  float b[kMostStateDim];
  float c[kMostStateDim];
  float step;
  float decay;
};

// Updates kCount * 16 columns of a state for one row.
template <int kCount, typename T>
void step_columns(const RowInput& row,
                  Columns<const float> from,
                  Columns<float> to,
                  int64_t dim,
                  float d,
                  const T* x,
                  T* out) {
  F32x16 decay = set1(row.decay), step = set1(row.step);
  F32x16 input[kCount], scaled[kCount], sum[kCount];
  for (int v = 0; v < kCount; ++v) {
    input[v] = load(x + v * kLanes);
    scaled[v] = mul(step, input[v]);
    sum[v] = zero();
  }
  for (int64_t i = 0; i < dim; ++i) {
    F32x16 b = set1(row.b[i]), c = set1(row.c[i]);
    for (int v = 0; v < kCount; ++v) {
      F32x16 state = fma(b, scaled[v], mul(decay, from.at(i, v)));
      to.set(i, v, state);
      sum[v] = fma(c, state, sum[v]);
    }
  }
  for (int v = 0; v < kCount; ++v) store(out + v * kLanes, fma(set1(d), input[v], sum[v]));
}

// Loads the inputs of row `row` for one head.
template <typename T>
void load_row(const SelectiveStateUpdateParams& params,
              int64_t row,
              int64_t head,
              RowInput& input) {
  int64_t dim = params.state_dim, group = head / (params.num_heads / params.num_groups) * dim;
  const T* b = of_row<T>(params.b, params.b_stride, row) + group;
  const T* c = of_row<T>(params.c, params.c_stride, row) + group;
  for (int64_t i = 0; i < dim; i += kLanes) {
    store(input.b + i, load(b + i));
    store(input.c + i, load(c + i));
  }
  float dt = to_float(of_row<T>(params.dt, params.dt_stride, row)[head]);
  input.step = softplus(dt + params.dt_bias[head]);
  input.decay = decay_of(params.a_log[head], input.step);
}

// Computes, for each row in order, with step = softplus(dt + dt_bias):
// state = exp(-exp(a_log) step) * state + b (step x); out = c state + d x.
// Cost:    5 * state_dim * head_dim operations per row and head. In prompts, 64 columns of a state
//          stay in L1 for 8 rows; rows that a step may reject write one state each.
// Assumes: slots, lengths and rows checked by ops.cpp; no slot appears twice.
// Order:   row by row, in fp32. Sums over state_dim are chains from zero in its order, d x last. No
//          order depends on the number of rows in a step, unlike in the chunked form, which
//          computes chunks of rows as matrix products.
// Source:  Dao and Gu 2024 (Mamba-2).
template <typename T>
void run(const SelectiveStateUpdateParams& params) {
  int64_t heads = params.num_heads, dim = params.state_dim, head_dim = params.head_dim;
  HeadStates states{params.states, heads, dim, head_dim};
  walk_heads<T>(params.of, states, params.out, [&](SlotRange range, int64_t head) {
    walk_head<kMostStateDim, kMostHeadDim, RowInput>(
        states,
        params.of.window,
        range,
        head,
        [&](int64_t row, RowInput& input) { load_row<T>(params, row, head, input); },
        [&]<int kCount>(const RowInput& input,
                        Columns<const float> from,
                        Columns<float> to,
                        int64_t row,
                        int64_t col) {
          int64_t place = head * head_dim + col;
          step_columns<kCount>(input,
                               from,
                               to,
                               dim,
                               params.d[head],
                               of_row<T>(params.x, params.x_stride, row) + place,
                               static_cast<T*>(params.out) + row * heads * head_dim + place);
        });
  });
}

}  // namespace

void selective_state_update_cpu(const SelectiveStateUpdateParams& params) {
  switch (params.dtype) {
    case DType::kBFloat16:
      return run<bfloat16>(params);
    case DType::kFloat16:
      return run<float16>(params);
    default:
      return run<float>(params);
  }
}

}  // namespace specops::SPECOPS_ISA
