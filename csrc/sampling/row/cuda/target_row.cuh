// SPDX-License-Identifier: Apache-2.0
// An output row as the ops use it: the filters, the choice of a token, and the distribution from
// which it is drawn.
#pragma once

#include "sampling/row/cuda/draw.cuh"
#include "sampling/row/cuda/filtered_row.cuh"
#include "sampling/row/cuda/row.cuh"

namespace specops {

// Returns the token that `sample` chooses. Calls uniform() only if the row is not one-hot.
template <typename T, bool kProcessed, typename Uniform>
__device__ __forceinline__ RowToken choose(const Row<T, kProcessed>& row, Uniform uniform) {
  filter(row);
  return draw(row, row.one_hot() ? 0.0f : uniform());
}

// Returns the probability of a token in the filtered distribution, given row.kept_mass().
template <typename T, bool kProcessed>
__device__ inline float target_prob(const Row<T, kProcessed>& row,
                                    float x,
                                    int32_t id,
                                    Mass kept_mass) {
  if (!row.keeps(x, id)) return 0.0f;
  return row.one_hot() ? 1.0f : row.weight(x) * (row.unit() / static_cast<float>(kept_mass));
}

// Prepares processed_logprob after filter(): replaces shared.log_sum by the logarithm of the kept
// mass. At temperature 0 it uses the mass of all tokens, which the scan must have summed.
template <typename T, bool kProcessed>
__device__ inline void fold_kept(Row<T, kProcessed>& row) {
  bool everything = row.shared.filters.temperature == 0.0f;
  if (row.max == -INFINITY) return;
  row.keep_sum(everything ? row.scanned_total() : row.kept_mass());
}

// Returns the logarithm of target_prob; at temperature 0, the log-softmax of the processed logits.
template <typename T, bool kProcessed>
__device__ inline float processed_logprob(const Row<T, kProcessed>& row, RowToken token) {
  float x = clean(token.logit);
  bool dropped = row.shared.filters.temperature > 0.0f && !row.keeps(x, token.id);
  if (row.max == -INFINITY || dropped) return -INFINITY;
  return (x - row.max) * row.shared.inverse - row.shared.log_sum;
}

// Writes target_prob of every token.
template <typename T, bool kProcessed>
__device__ inline void write_target_probs(const Row<T, kProcessed>& row, float* probs) {
  Mass total = row.kept_mass();
#pragma unroll 1
  for (int32_t id = row.thread(); id < row.logits.size; id += row.threads()) {
    probs[id] = target_prob(row, row.logit(id), id, total);
  }
}

}  // namespace specops
