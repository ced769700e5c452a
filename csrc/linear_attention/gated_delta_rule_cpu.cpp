// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "common/parallel.h"
#include "common/simd.h"
#include "linear_attention/gated_delta_rule.h"

namespace specops::SPECOPS_ISA {
namespace {

// Converts a query or a key to floats and normalizes it to length `scale`.
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

// Number of rows that are computed for some columns before the next columns. The columns and the
// inputs of these rows stay in L1.
constexpr int64_t kRows = 8;
constexpr int kVectors = 4;
constexpr int64_t kColumns = kVectors * kLanes;

// The inputs of one row.
struct RowInput {
  float q[kMostKeyDim];
  float k[kMostKeyDim];
  float decay;
  float strength;
};

// Updates kCount * 16 columns of a state for one row. Reads the state at `from` and writes it to
// `to`, which may be the same.
template <int kCount, typename T>
void step_columns(const RowInput& row,
                  const float* from,
                  int64_t from_stride,
                  float* to,
                  int64_t to_stride,
                  int64_t dim,
                  const T* v,
                  T* out) {
  F32x16 decay = set1(row.decay), strength = set1(row.strength);
  F32x16 delta[kCount], sum[kCount];
  for (int c = 0; c < kCount; ++c) sum[c] = zero();
  for (int64_t i = 0; i < dim; ++i) {
    F32x16 key = set1(row.k[i]);
    for (int c = 0; c < kCount; ++c) {
      sum[c] = fma(key, mul(decay, load(from + i * from_stride + c * kLanes)), sum[c]);
    }
  }
  for (int c = 0; c < kCount; ++c) {
    delta[c] = mul(sub(load(v + c * kLanes), sum[c]), strength);
    sum[c] = zero();
  }
  for (int64_t i = 0; i < dim; ++i) {
    F32x16 key = set1(row.k[i]), query = set1(row.q[i]);
    for (int c = 0; c < kCount; ++c) {
      F32x16 old = mul(decay, load(from + i * from_stride + c * kLanes));
      F32x16 state = fma(key, delta[c], old);
      store(to + i * to_stride + c * kLanes, state);
      sum[c] = fma(query, state, sum[c]);
    }
  }
  for (int c = 0; c < kCount; ++c) store(out + c * kLanes, sum[c]);
}

template <typename T>
const T* of_row(const void* data, int64_t stride, int64_t row) {
  return static_cast<const T*>(data) + row * stride;
}

// Loads the inputs of row `row` for one head.
template <typename T>
void load_row(const GatedDeltaRuleParams& params, int64_t row, int64_t head, RowInput& input) {
  int64_t dim = params.key_dim;
  int64_t key = head / (params.num_value_heads / params.num_key_heads) * dim;
  float scale = 1.0f / __builtin_sqrtf(static_cast<float>(dim));
  normalise(of_row<T>(params.q, params.q_stride, row) + key, input.q, dim, scale);
  normalise(of_row<T>(params.k, params.k_stride, row) + key, input.k, dim, 1.0f);
  float a = to_float(of_row<T>(params.a, params.a_stride, row)[head]);
  input.decay = decay_of(a, params.a_log[head], params.dt_bias[head]);
  input.strength = strength_of(to_float(of_row<T>(params.b, params.b_stride, row)[head]));
}

// Computes one head of a request that has a slot, a few rows at a time. A slot stores only the last
// `window` states; earlier states of this step go to the buffer `passing`.
template <typename T>
void run_head(const GatedDeltaRuleParams& params, SlotRange range, int64_t head) {
  static const float zeros[kMostValueDim] = {};
  float passing[kMostKeyDim * kColumns];
  RowInput inputs[kRows];
  int64_t heads = params.num_value_heads, dim = params.key_dim, value_dim = params.value_dim;
  int64_t window = params.of.window;
  auto state_of = [&](int64_t row) {  // row -1: the state before the first row
    int64_t place = range.slot * window + (range.begin + row) % window;
    return params.states + (place * heads + head) * dim * value_dim;
  };
  int64_t rows = range.end - range.first;
  // If the slot stores all states, each state is written completely before the next one.
  int64_t most = rows > window ? kRows : 1;
  for (int64_t begin = 0; begin < rows; begin += most) {
    int64_t end = begin + most < rows ? begin + most : rows;
    for (int64_t i = begin; i < end; ++i) {
      load_row<T>(params, range.first + i, head, inputs[i - begin]);
    }
    bool is_text = begin == 0 && range.begin == 0;
    const float* before = is_text ? zeros : state_of(begin - 1);
    auto step = [&]<int kCount>(int64_t col) {
      const float* from = before + col;
      int64_t from_stride = is_text ? 0 : value_dim;
      for (int64_t i = begin; i < end; ++i) {
        bool is_kept = i + 1 == end || i + window >= rows;
        float* to = is_kept ? state_of(i) + col : passing;
        int64_t to_stride = is_kept ? value_dim : kColumns;
        int64_t row = range.first + i, place = head * value_dim + col;
        step_columns<kCount>(inputs[i - begin],
                             from,
                             from_stride,
                             to,
                             to_stride,
                             dim,
                             of_row<T>(params.v, params.v_stride, row) + place,
                             static_cast<T*>(params.out) + row * heads * value_dim + place);
        from = to;
        from_stride = to_stride;
      }
    };
    int64_t col = 0;
    for (; col + kColumns <= value_dim; col += kColumns) step.template operator()<kVectors>(col);
    for (; col < value_dim; col += kLanes) step.template operator()<1>(col);
  }
}

// Sets the outputs of padding rows to zero.
template <typename T>
void clear_head(const GatedDeltaRuleParams& params, SlotRange range, int64_t head) {
  int64_t heads = params.num_value_heads, value_dim = params.value_dim;
  for (int64_t row = range.first; row < range.end; ++row) {
    T* out = static_cast<T*>(params.out) + (row * heads + head) * value_dim;
    std::memset(static_cast<void*>(out), 0, value_dim * sizeof(T));
  }
}

// Computes, for each row in order, with q and k normalized to length key_dim^-1/2 and 1:
// state = decay * state; state += k (v - k state) strength; out = q state.
// Cost:    7 * key_dim * value_dim operations per row and value head. In prompts, 64 columns of a
//          state stay in L1 for 8 rows; rows that a step may reject write one state each.
// Assumes: slots, lengths and rows checked by ops.cpp; no slot appears twice.
// Order:   row by row, in fp32. Sums over key_dim are chains from zero in its order; sums of
//          squares are 16 lane sums, then one tree. No order depends on the number of rows in a
//          step, unlike in the chunked form, which computes chunks of rows as matrix products.
// Source:  Yang, Kautz and Hatamizadeh 2024 (Gated DeltaNet).
// Threads: one item per value head of a request.
template <typename T>
void run(const GatedDeltaRuleParams& params) {
  int64_t heads = params.num_value_heads;
  parallel_for((params.of.batch + 1) * heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      SlotRange range = range_of(params.of, item / heads);
      if (range.slot < 0) {
        clear_head<T>(params, range, item % heads);
      } else {
        run_head<T>(params, range, item % heads);
      }
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
