// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "common/parallel.h"
#include "common/simd.h"
#include "linear_attention/gated_delta_rule.h"

namespace specops::SPECOPS_ISA {
namespace {

// A query or key as floats, of length `scale`.
template <typename T>
void normalise(const T* src, float* dst, int64_t dim, float scale) {
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

// What a row brings to its state.
struct RowInput {
  float q[kMostKeyDim];
  float k[kMostKeyDim];
  float decay;
  float strength;
};

// kVectors * 16 columns of a state for one row: `from` becomes `to`, which may be the same.
template <int kVectors, typename T>
void step_columns(const RowInput& row,
                  const float* from,
                  int64_t from_stride,
                  float* to,
                  int64_t dim,
                  int64_t value_dim,
                  const T* v,
                  T* out) {
  F32x16 decay = set1(row.decay), strength = set1(row.strength);
  F32x16 delta[kVectors], sum[kVectors];
  for (int c = 0; c < kVectors; ++c) sum[c] = zero();
  for (int64_t i = 0; i < dim; ++i) {
    F32x16 key = set1(row.k[i]);
    for (int c = 0; c < kVectors; ++c) {
      sum[c] = fma(key, mul(decay, load(from + i * from_stride + c * kLanes)), sum[c]);
    }
  }
  for (int c = 0; c < kVectors; ++c) {
    delta[c] = mul(sub(load(v + c * kLanes), sum[c]), strength);
    sum[c] = zero();
  }
  for (int64_t i = 0; i < dim; ++i) {
    F32x16 key = set1(row.k[i]), query = set1(row.q[i]);
    for (int c = 0; c < kVectors; ++c) {
      F32x16 old = mul(decay, load(from + i * from_stride + c * kLanes));
      F32x16 state = fma(key, delta[c], old);
      store(to + i * value_dim + c * kLanes, state);
      sum[c] = fma(query, state, sum[c]);
    }
  }
  for (int c = 0; c < kVectors; ++c) store(out + c * kLanes, sum[c]);
}

// One head of a request, row by row.
template <typename T>
void run_head(const GatedDeltaRuleParams& params, SlotRange range, int64_t head) {
  static const float zeros[kMostValueDim] = {};
  constexpr int kVectors = 4;
  int64_t heads = params.num_value_heads, dim = params.key_dim, value_dim = params.value_dim;
  int64_t key_head = head / (heads / params.num_key_heads), window = params.of.window;
  float scale = 1.0f / __builtin_sqrtf(static_cast<float>(dim));
  RowInput input;
  const float* from = zeros;  // before the first position
  int64_t from_stride = 0;
  auto state_of = [&](int64_t position) {
    int64_t place = range.slot * window + position % window;
    return params.states + (place * heads + head) * dim * value_dim;
  };
  if (range.slot >= 0 && range.begin > 0) {
    from = state_of(range.begin - 1);
    from_stride = value_dim;
  }
  for (int64_t row = range.first; row < range.end; ++row) {
    T* out = static_cast<T*>(params.out) + (row * heads + head) * value_dim;
    if (range.slot < 0) {
      std::memset(static_cast<void*>(out), 0, value_dim * sizeof(T));
      continue;
    }
    auto of_head = [&](const void* data, int64_t stride, int64_t offset) {
      return static_cast<const T*>(data) + row * stride + offset;
    };
    normalise(of_head(params.q, params.q_stride, key_head * dim), input.q, dim, scale);
    normalise(of_head(params.k, params.k_stride, key_head * dim), input.k, dim, 1.0f);
    float a = to_float(*of_head(params.a, params.a_stride, head));
    input.decay = decay_of(a, params.a_log[head], params.dt_bias[head]);
    input.strength = strength_of(to_float(*of_head(params.b, params.b_stride, head)));
    const T* v = of_head(params.v, params.v_stride, head * value_dim);
    float* to = state_of(range.begin + row - range.first);
    int64_t col = 0;
    auto step = [&]<int kCount>() {
      step_columns<kCount>(
          input, from + col, from_stride, to + col, dim, value_dim, v + col, out + col);
      col += kCount * kLanes;
    };
    while (col + kVectors * kLanes <= value_dim) step.template operator()<kVectors>();
    while (col < value_dim) step.template operator()<1>();
    from = to;
    from_stride = value_dim;
  }
}

// For each row in order, with q and k of length key_dim^-1/2 and 1:
// state = decay * state; state += k (v - k state) strength; out = q state.
// Cost:    7 * key_dim * value_dim operations a row and value head, on a state that stays in the
//          second-level cache; of one row a request it is read and written once.
// Assumes: slots, lengths and rows checked by ops.cpp; no slot twice.
// Order:   row by row, in fp32. Sums over key_dim are chains from zero in its order; of squares, 16
//          lane sums, then one tree. No order depends on how many rows a step has: the form that
//          computes chunks of rows as products of matrices would.
// Source:  Yang, Kautz and Hatamizadeh 2024 (Gated DeltaNet).
// Threads: one value head of one request.
template <typename T>
void run(const GatedDeltaRuleParams& params) {
  int64_t heads = params.num_value_heads;
  parallel_for((params.of.batch + 1) * heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      run_head<T>(params, range_of(params.of, item / heads), item % heads);
    }
  });
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
