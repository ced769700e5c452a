// SPDX-License-Identifier: Apache-2.0
#include "linear_attention/gated_delta_rule.h"
#include "linear_attention/state_rows_cpu.h"

namespace specops::SPECOPS_ISA {
namespace {

// Converts a query or a key to floats and normalizes it to length `scale`.
template <typename T>
void normalize(const T* src, float* dst, int64_t dim, float scale) {
  F32x16 squares = zero();
  for (int64_t i = 0; i < dim; i += kLanes) {
    F32x16 x = load(src + i);
    squares = fma(x, x, squares);
  }
  F32x16 inverse = set1(1.0f / __builtin_sqrtf(reduce_add(squares) + kKeyNormEps));
  for (int64_t i = 0; i < dim; i += kLanes) {
    store(dst + i, mul(mul(load(src + i), inverse), set1(scale)));
  }
}

// The inputs of one row; kDecays is 1, or kMostKeyDim for a decay per key channel.
template <int kDecays>
struct RowInput {
  float q[kMostKeyDim];
  float k[kMostKeyDim];
  float decay[kDecays];
  float strength;
};

// Returns log(1 + e^x) to a few ulp, as max(x, 0) + log(1 + z) with z = e^-|x|. The logarithm is
// 2 artanh(z / (2 + z)), whose argument is at most 1 / 3: its series ends after 8 terms.
F32x16 softplus(F32x16 x) {
  F32x16 z = exp(min(x, sub(zero(), x)));
  F32x16 s = div(z, add(set1(2.0f), z)), t = mul(s, s), sum = set1(1.0f / 15);
  for (int i = 13; i > 0; i -= 2) sum = fma(sum, t, set1(1.0f / static_cast<float>(i)));
  return fma(mul(set1(2.0f), s), sum, max(x, zero()));
}

// Computes the decays of a head's key channels for one row.
template <typename T>
void decay_channels(const T* a, const float* dt_bias, float a_log, float* decay, int64_t dim) {
  F32x16 scale = set1(-expf(a_log));
  for (int64_t i = 0; i < dim; i += kLanes) {
    store(decay + i, exp(mul(scale, softplus(add(load(a + i), load(dt_bias + i))))));
  }
}

// Updates kCount * 16 columns of a state for one row.
template <int kCount, int kDecays, typename T>
void step_columns(const RowInput<kDecays>& row,
                  Columns<const float> from,
                  Columns<float> to,
                  int64_t dim,
                  const T* v,
                  T* out) {
  F32x16 of_head = set1(row.decay[0]), strength = set1(row.strength);
  auto decay_at = [&](int64_t i) { return kDecays == 1 ? of_head : set1(row.decay[i]); };
  F32x16 delta[kCount], sum[kCount];
  for (int c = 0; c < kCount; ++c) sum[c] = zero();
  for (int64_t i = 0; i < dim; ++i) {
    F32x16 key = set1(row.k[i]), decay = decay_at(i);
    for (int c = 0; c < kCount; ++c) sum[c] = fma(key, mul(decay, from.at(i, c)), sum[c]);
  }
  for (int c = 0; c < kCount; ++c) {
    delta[c] = mul(sub(load(v + c * kLanes), sum[c]), strength);
    sum[c] = zero();
  }
  for (int64_t i = 0; i < dim; ++i) {
    F32x16 key = set1(row.k[i]), query = set1(row.q[i]), decay = decay_at(i);
    for (int c = 0; c < kCount; ++c) {
      F32x16 state = fma(key, delta[c], mul(decay, from.at(i, c)));
      to.set(i, c, state);
      sum[c] = fma(query, state, sum[c]);
    }
  }
  for (int c = 0; c < kCount; ++c) store(out + c * kLanes, sum[c]);
}

// Loads the inputs of row `row` for one head.
template <typename T, int kDecays>
void load_row(const GatedDeltaRuleParams& params,
              int64_t row,
              int64_t head,
              RowInput<kDecays>& input) {
  int64_t dim = params.key_dim;
  int64_t key = head / (params.num_value_heads / params.num_key_heads) * dim;
  float scale = 1.0f / __builtin_sqrtf(static_cast<float>(dim));
  normalize(of_row<T>(params.q, params.q_stride, row) + key, input.q, dim, scale);
  normalize(of_row<T>(params.k, params.k_stride, row) + key, input.k, dim, 1.0f);
  const T* a = of_row<T>(params.a, params.a_stride, row) + head * params.num_decays;
  const float* dt_bias = params.dt_bias + head * params.num_decays;
  float a_log = params.a_log[head];
  if constexpr (kDecays == 1) {
    input.decay[0] = decay_of(a_log, specops::softplus(to_float(*a) + *dt_bias));
  } else {
    decay_channels(a, dt_bias, a_log, input.decay, dim);
  }
  input.strength = strength_of(to_float(of_row<T>(params.b, params.b_stride, row)[head]));
}

// Computes, for each row in order, with q and k normalized to length key_dim^-1/2 and 1:
// state = decay * state; state += k (v - k state) strength; out = q state.
// The decay is one factor per head or, with kDecays > 1, one per key channel.
// Cost:    7 * key_dim * value_dim operations per row and value head. In prompts, 64 columns of a
//          state stay in L1 for 8 rows; rows that a step may reject write one state each.
// Assumes: slots, lengths and rows checked by ops.cpp; no slot appears twice.
// Order:   row by row, in fp32. Sums over key_dim are chains from zero in its order; sums of
//          squares are 16 lane sums, then one tree. No order depends on the number of rows in a
//          step, unlike in the chunked form, which computes chunks of rows as matrix products.
// Source:  Yang, Kautz and Hatamizadeh 2024 (Gated DeltaNet); Kimi Team 2025 (Kimi Linear).
template <typename T, int kDecays>
void run(const GatedDeltaRuleParams& params) {
  int64_t heads = params.num_value_heads, dim = params.key_dim, value_dim = params.value_dim;
  HeadStates states{params.states, heads, dim, value_dim};
  walk_heads<T>(params.of, states, params.out, [&](SlotRange range, int64_t head) {
    walk_head<kMostKeyDim, kMostValueDim, RowInput<kDecays>>(
        states,
        params.of.window,
        range,
        head,
        [&](int64_t row, RowInput<kDecays>& input) { load_row<T>(params, row, head, input); },
        [&]<int kCount>(const RowInput<kDecays>& input,
                        Columns<const float> from,
                        Columns<float> to,
                        int64_t row,
                        int64_t col) {
          int64_t place = head * value_dim + col;
          step_columns<kCount>(input,
                               from,
                               to,
                               dim,
                               of_row<T>(params.v, params.v_stride, row) + place,
                               static_cast<T*>(params.out) + row * heads * value_dim + place);
        });
  });
}

template <typename T>
void run(const GatedDeltaRuleParams& params) {
  if (params.num_decays == 1) return run<T, 1>(params);
  run<T, kMostKeyDim>(params);
}

}  // namespace

void gated_delta_rule_cpu(const GatedDeltaRuleParams& params) {
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
