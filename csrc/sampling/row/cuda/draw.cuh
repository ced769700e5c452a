// SPDX-License-Identifier: Apache-2.0
// Drawing of a token from the tokens that the filters of a row keep: inverse CDF in token-id order.
#pragma once

#include "sampling/row/cuda/block_reduce.cuh"
#include "sampling/row/cuda/row.cuh"

namespace specops {

// Returns the first kept token of a leaf at which the running mass exceeds `part` (a fraction) of
// the leaf's mass.
template <typename T, bool kProcessed>
__device__ __forceinline__ RowToken
pick(const Row<T, kProcessed>& row, int32_t leaf, Cut cut, double part) {
  if (warp_id() != 0) return {0, 0.0f};
  float origin = row.stats(leaf).max;
  auto share = [&](float x, int32_t id) {
    bool kept = cut.keeps(x, id) && row.is_typical(x, id);
    return kept ? row.mass(ptx::exp2_approx((x - origin) * row.scale())) : Mass{0};
  };
  Mass own = 0;
  for_each_in_order(row.logits, leaf, [&](float x, int32_t id) { own += share(x, id); });
  Mass upto = warp_inclusive(own);
  Mass total = __shfl_sync(kFullMask, upto, kWarpSize - 1);
  Mass target = static_cast<Mass>(part * static_cast<double>(total));
  if (target >= total) target = total - 1;
  Mass running = upto - own;
  bool mine = running <= target && target < upto;
  RowToken found{-1, 0.0f};
  for_each_in_order(row.logits, leaf, [&](float x, int32_t id) {
    running += share(x, id);
    if (mine && found.id < 0 && running > target) found = {id, x};
  });
  int owner = __ffs(static_cast<int>(__ballot_sync(kFullMask, mine))) - 1;
  return {__shfl_sync(kFullMask, found.id, owner), __shfl_sync(kFullMask, found.logit, owner)};
}

// Returns the first token of the ranking. The result is valid in the first warp.
template <typename T, bool kProcessed>
__device__ inline RowToken first_token(const Row<T, kProcessed>& row) {
  int32_t first = row.num_leaves;
#pragma unroll 1
  for (int32_t leaf = row.thread(); leaf < row.num_leaves; leaf += row.threads()) {
    if (row.stats(leaf).max == row.max && leaf < first) first = leaf;
  }
  return pick(row, block_reduce<Min>(row.shared, first), {row.max, INT32_MAX}, 0.0);
}

// Finds the leaf in which the running mass of the kept tokens first exceeds the target, uniform *
// total. Leaves this leaf in shared.leaf, and in shared.part where the target lies in the leaf, as
// a fraction of the leaf's mass.
template <typename T, bool kProcessed>
__device__ __forceinline__ void seek(const Row<T, kProcessed>& row, float uniform) {
  int32_t run = (row.num_leaves - 1) / row.threads() + 1;
  int32_t begin = min(row.thread() * run, row.num_leaves), end = min(begin + run, row.num_leaves);
  Mass own = 0, total;
#pragma unroll 1
  for (int32_t leaf = begin; leaf < end; ++leaf) own += row.leaf_mass(leaf);
  Mass upto = block_inclusive(row.shared, own, &total);
  // target = floor(total * n / 2^24), where n is the 24-bit integer of the uniform.
  Mass n = static_cast<Mass>(uniform * 0x1p24f);
  Mass target = (total >> 24) * n + ((total & 0xffffffu) * n >> 24);
  Mass before = upto - own;
  if (before <= target && target < upto) {
#pragma unroll 1
    for (int32_t leaf = begin; leaf < end; ++leaf) {
      Mass here = row.leaf_mass(leaf);
      if (before + here > target) {
        row.shared.leaf = leaf;
        row.shared.part = static_cast<double>(target - before) / static_cast<double>(here);
        break;
      }
      before += here;
    }
  }
  __syncthreads();
}

template <typename T, bool kProcessed>
__device__ __forceinline__ RowToken invert_cdf(const Row<T, kProcessed>& row, float uniform) {
  seek(row, uniform);
  return pick(row, row.shared.leaf, row.shared.kept, row.shared.part);
}

// Draws a token from the filtered distribution. The result is valid in the first warp.
template <typename T, bool kProcessed>
__device__ __forceinline__ RowToken draw(const Row<T, kProcessed>& row, float uniform) {
  if (row.one_hot()) return {row.shared.kept.last_id, row.max};
  return invert_cdf(row, uniform);
}

}  // namespace specops
