// SPDX-License-Identifier: Apache-2.0
// One row of logits that one block processes after one or several blocks have scanned it: its
// maximum and sums, the logprobs of its tokens, and their weights. The functions of the other files
// take this object as the argument `row`; the kernels of sample, verify and top_logprobs are loops
// over such rows.
//
// Order: the sum of a leaf is fp32 in a fixed tree (leaf.cuh). Sums of leaves are masses: integers
// in units of 2^-39 of the weight of the row's heaviest token. Integer sums do not depend on their
// order, so any thread may fold any leaf, and lists may be filled in any order. NaN counts as -inf,
// and +inf as the largest finite float. Tokens are ranked by logit (descending), then id
// (ascending).
#pragma once

#include <cfloat>

#include "sampling/row/cuda/block_reduce.cuh"
#include "sampling/row/cuda/leaf.cuh"
#include "sampling/row/cuda/row_shared.cuh"
#include "sampling/row/filters.h"

namespace specops {

struct RowToken {
  int32_t id;
  float logit;
};

// Returns 1 / temperature, clamped to finite, normal floats, so that 0 times it is 0 and -inf stays
// -inf.
__device__ inline float inverse_temperature(float temperature) {
  float inverse = temperature > 0.0f ? 1.0f / temperature : 1.0f;
  return fminf(fmaxf(inverse, FLT_MIN), FLT_MAX / 2);
}

template <typename T, bool kProcessed = false>
struct Row {
  RowShared& shared;
  const RowLogits<T, kProcessed>& logits;
  int32_t num_leaves;
  float max = -INFINITY;

  // Values that threads would otherwise keep in registers, most of them for later, go to shared
  // memory.
  __device__ Row(RowShared& of_block,
                 const RowLogits<T, kProcessed>& row,
                 const SamplingParams& filters,
                 LeafStats* stats,
                 Mass* masses)
      : shared(of_block), logits(row), num_leaves(row.num_leaves()) {
    if (thread() == 0) {
      shared.row_stats = stats;
      shared.row_masses = masses;
      shared.filters = filters;
      shared.inverse = inverse_temperature(filters.temperature);
      shared.typical = {0.0f, INFINITY, INT32_MAX};
    }
    __syncthreads();
  }

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int threads() { return static_cast<int>(blockDim.x); }

  __device__ const LeafStats& stats(int32_t leaf) const { return shared.row_stats[leaf]; }
  __device__ Mass* masses() const { return shared.row_masses; }

  // Combines the leaves: sets `max` and, if `want_raw`, sets shared.log_sum to the logarithm of the
  // sum of e^(raw logit - raw maximum).
  __device__ void fold(bool want_raw) {
    float top = -INFINITY;
#pragma unroll 1
    for (int32_t leaf = thread(); leaf < num_leaves; leaf += threads()) {
      top = fmaxf(top, stats(leaf).max);
    }
    max = block_reduce<Max>(shared, top) + 0.0f;  // adding 0 turns -0 into +0
    if (!want_raw) return;
    float raw_max = max;
    if constexpr (kProcessed) {
      top = -INFINITY;
#pragma unroll 1
      for (int32_t leaf = thread(); leaf < num_leaves; leaf += threads()) {
        top = fmaxf(top, stats(leaf).raw_max);
      }
      raw_max = block_reduce<Max>(shared, top) + 0.0f;
      if (thread() == 0) shared.raw_max = raw_max;
    }
    if (raw_max == -INFINITY) return;
    Mass total = 0;
#pragma unroll 1
    for (int32_t leaf = thread(); leaf < num_leaves; leaf += threads()) {
      float leaf_max = kProcessed ? stats(leaf).raw_max : stats(leaf).max;
      if (leaf_max == -INFINITY) continue;
      total += mass(stats(leaf).raw * ptx::exp2_approx((leaf_max - raw_max) * kLog2e));
    }
    keep_sum(block_reduce<Add>(shared, total));
  }

  // Replaces shared.log_sum by log(total).
  __device__ void keep_sum(Mass total) const {
    if (thread() == 0) shared.log_sum = log_of(total);
    __syncthreads();
  }

  // Returns the log-sum-exp of the raw logits. Requires fold(true).
  __device__ float lse() const {
    return raw_max() == -INFINITY ? -INFINITY : raw_max() + shared.log_sum;
  }

  // Returns the log-softmax of a token over the raw logits. Requires fold(true).
  __device__ float logprob(RowToken token) const {
    float x = token.logit;
    if constexpr (kProcessed) x = to_float(logits.data[token.id]);
    return raw_max() == -INFINITY ? -INFINITY : (clean(x) - raw_max()) - shared.log_sum;
  }

  __device__ float logit(int32_t id) const { return clean(logits.logit(id)); }

  // Returns 1 + the number of tokens with a greater logit, among the raw logits or among those with
  // the overlay applied. All threads must pass the same token.
  __device__ int32_t rank(RowToken token, bool raw) const {
    if constexpr (kProcessed) {
      if (raw) {
        float x = clean(to_float(logits.data[token.id]));
        return rank_in(logits.raw(), x, [&](int32_t leaf) { return stats(leaf).raw_max; });
      }
    }
    return rank_in(logits, clean(token.logit), [&](int32_t leaf) { return stats(leaf).max; });
  }

  // Returns the token of the first warp in every thread.
  __device__ RowToken broadcast(RowToken token) const {
    __syncthreads();
    if (thread() == 0) {
      shared.rest_id = token.id;
      shared.rest_logit = token.logit;
    }
    __syncthreads();
    return {shared.rest_id, shared.rest_logit};
  }

  // ---- weights and masses ----

  // Returns e^((x - max) / temperature) for a clean x. The weight of the first token of the ranking
  // is 1.
  __device__ float weight(float x) const { return ptx::exp2_approx((x - max) * scale()); }

  __device__ float scale() const { return shared.inverse * kLog2e; }

  // Returns a weight as an integer mass, so that sums do not depend on their order.
  __device__ Mass mass(float weight) const { return static_cast<Mass>(weight * unit()); }

  // Returns the mass of the heaviest token, chosen so that the sum over a row fits 64 bits.
  __device__ float unit() const { return logits.size <= 1 << 24 ? 0x1p39f : 0x1p32f; }

  __device__ float log_of(Mass total) const { return logf(static_cast<float>(total) / unit()); }

  __device__ Mass scanned_mass(int32_t leaf) const {
    LeafStats leaf_stats = stats(leaf);
    if (leaf_stats.max == -INFINITY) return 0;
    return mass(leaf_stats.warm * ptx::exp2_approx((leaf_stats.max - max) * scale()));
  }

  __device__ Mass scanned_total() const {
    Mass total = 0;
#pragma unroll 1
    for (int32_t leaf = thread(); leaf < num_leaves; leaf += threads()) {
      total += scanned_mass(leaf);
    }
    return block_reduce<Add>(shared, total);
  }

  // ---- kept tokens (those that filter() does not drop) ----

  // Returns whether the filtered distribution has only one token.
  __device__ bool one_hot() const { return max == -INFINITY || is_greedy(shared.filters); }

  // Returns whether the filters keep a token, given its clean logit and its id.
  __device__ bool keeps(float x, int32_t id) const {
    return shared.kept.keeps(x, id) && is_typical(x, id);
  }

  // Returns the difference between a token's surprise and the mean surprise.
  __device__ float distance(float x) const {
    return fabsf((max - x) * shared.inverse - shared.typical.mean);
  }

  __device__ bool is_typical(float x, int32_t id) const {
    if (!(shared.filters.typical_p < 1.0f)) return true;
    TypicalCut cut = shared.typical;
    float own = distance(x);
    return own < cut.distance || (own == cut.distance && id <= cut.last_id);
  }

  __device__ Mass leaf_mass(int32_t leaf) const {
    return shared.weighed != 0 ? masses()[leaf] : scanned_mass(leaf);
  }

  // Returns the mass of all kept tokens, summed over the leaves. Every thread gets the result.
  __device__ Mass kept_mass() const {
    if (one_hot()) return mass(1.0f);
    Mass total = 0;
#pragma unroll 1
    for (int32_t leaf = thread(); leaf < num_leaves; leaf += threads()) total += leaf_mass(leaf);
    return block_reduce<Add>(shared, total);
  }

 private:
  __device__ float raw_max() const {
    if constexpr (kProcessed) return shared.raw_max;
    return max;
  }

  template <typename OneRow, typename LeafMax>
  __device__ int32_t rank_in(const OneRow& row, float value, LeafMax leaf_max) const {
    int number = 0;
#pragma unroll 1
    for (int32_t leaf = warp_id(); leaf < num_leaves; leaf += num_warps()) {
      if (leaf_max(leaf) <= value) continue;
      Leaf<T> x;
      x.load(row, leaf);
#pragma unroll
      for (int i = 0; i < Leaf<T>::kOwn; ++i) number += clean(x[i]) > value;
    }
    return 1 + block_reduce<Add>(shared, number);
  }
};

}  // namespace specops
