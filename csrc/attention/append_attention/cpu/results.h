// SPDX-License-Identifier: Apache-2.0
// Output of append_attention on the CPU: rows of out and lse, states for a later fold, and zeros
// for rows that see no token.
#pragma once

#include <cmath>
#include <cstring>

#include "attention/append_attention/cpu/block.h"

namespace specops::SPECOPS_ISA {
namespace {

// Folds the sink of a row's head into m and l, after all tokens. Returns the factor by which o must
// be multiplied before it is divided by l. A sink of -inf changes nothing.
inline float add_sink(const AppendAttentionParams& params, int64_t out_row, float& m, float& l) {
  float sink = params.sinks[out_row % params.num_qo_heads];
  if (sink == -INFINITY) return 1.0f;
  float top = m > sink ? m : sink;
  float scales[kLanes];
  store(scales, exp(sub(set1(m), set1(top))));
  float share = scales[0];
  store(scales, exp(sub(set1(sink), set1(top))));
  l = l * share + scales[0];
  m = top;
  return share;
}

// Writes the row of a query from which the mask hides all tokens.
template <typename T, int D>
void write_nothing(const AppendAttentionParams& params, int64_t out_row) {
  constexpr int kColumns = kValueDim<D>;
  std::memset(static_cast<void*>(static_cast<T*>(params.out) + out_row * kColumns),
              0,
              kColumns * sizeof(T));
  if (params.lse == nullptr) return;
  bool has_sink = params.sinks != nullptr;
  params.lse[out_row] = has_sink ? params.sinks[out_row % params.num_qo_heads] : -INFINITY;
}

// Writes one finished row: o / l, and m + log l.
template <typename T, int D>
void write_row(
    const AppendAttentionParams& params, int64_t out_row, float m, float l, const float* o) {
  if (l == 0.0f) return write_nothing<T, D>(params, out_row);
  float share = params.sinks == nullptr ? 1.0f : add_sink(params, out_row, m, l);
  F32x16 inverse = set1(share / l);
  T* out = static_cast<T*>(params.out) + out_row * kValueDim<D>;
  for (int i = 0; i < kValueDim<D>; i += 32) {
    F32x16 x[2] = {load(o + i), load(o + i + kLanes)};
    order_columns<T>(x);
    store(out + i, mul(x[0], inverse));
    store(out + i + kLanes, mul(x[1], inverse));
  }
  if (params.lse != nullptr) params.lse[out_row] = m + std::log(l);
}

// Writes all rows of a unit from their states.
template <typename T, int D>
void write_rows(const AppendAttentionParams& params,
                const Unit& unit,
                const UnitRows<T>& rows,
                int result,
                const Scratch<T, D>& own) {
  int64_t group = params.num_qo_heads / params.num_kv_heads;
  for (int64_t head = 0; head < unit.num_heads; ++head) {
    for (int row = 0; row < rows.count; ++row) {
      int64_t at = head * rows.count + row;
      write_row<T, D>(params,
                      rows.out_rows[row] + head * group,
                      own.m[result][at],
                      own.l[result][at],
                      own.states[result] + at * kValueDim<D>);
    }
  }
}

// Writes the states of a unit that covers one chunk to the workspace.
template <typename T, int D>
void write_part(const AppendAttentionParams& params,
                const Unit& unit,
                const UnitRows<T>& rows,
                int result,
                const Scratch<T, D>& own) {
  constexpr int kColumns = kValueDim<D>;
  for (int i = 0; i < rows.num_members; ++i) {
    const Member& member = rows.members[i];
    int64_t index = unit.first_leaf / kChunkLeaves - member.request->first_leaf / kChunkLeaves;
    if (index < 0 || unit.first_leaf >= member.end_leaf) continue;
    int64_t all = member.rows * params.num_kv_heads;
    float* state = params.workspace + member.request->partial + index * all * (kColumns + 2);
    for (int64_t head = 0; head < unit.num_heads; ++head) {
      int64_t src = head * rows.count + member.first_row;
      int64_t dst = (unit.first_head + head) * member.rows;
      std::memcpy(state + dst, own.m[result] + src, member.rows * sizeof(float));
      std::memcpy(state + all + dst, own.l[result] + src, member.rows * sizeof(float));
      std::memcpy(state + 2 * all + dst * kColumns,
                  own.states[result] + src * kColumns,
                  member.rows * kColumns * sizeof(float));
    }
  }
}

// Writes zeros and -inf for rows that belong to no request.
template <typename T, int D>
void zero_padding(const AppendAttentionParams& params) {
  int64_t used = params.qo_indptr[params.batch];
  int64_t width = params.num_qo_heads * kValueDim<D>;
  if (used >= params.rows) return;
  std::memset(static_cast<void*>(static_cast<T*>(params.out) + used * width),
              0,
              (params.rows - used) * width * sizeof(T));
  if (params.lse == nullptr) return;
  for (int64_t i = used * params.num_qo_heads; i < params.rows * params.num_qo_heads; ++i) {
    params.lse[i] = -INFINITY;
  }
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
