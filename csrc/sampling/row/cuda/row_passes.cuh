// SPDX-License-Identifier: Apache-2.0
// Passes over the leaves of a row: they copy tokens of a cut between two logits to the list, or
// count or weigh the tokens that reach a logit.
#pragma once

#include "sampling/row/cuda/block_reduce.cuh"
#include "sampling/row/cuda/row.cuh"

namespace specops {

// Number of leaves by which the prefetch of a warp is ahead of its reads.
constexpr int kPassAhead = 2;

// A cut as it applies to one leaf: logits must be at least `least`. divided: the last kept token
// with a logit equal to `least` is inside the leaf, and later ones are dropped.
struct Limits {
  float least;
  bool divided;
};

template <typename T, bool kProcessed>
__device__ inline Limits limits_of(const Row<T, kProcessed>& row, int32_t leaf) {
  Cut base = row.shared.cut;
  int32_t begin = leaf * Leaf<T>::kSize;
  if (base.last_id < begin) return {next_above(base.value), false};
  return {base.value, base.last_id - begin < Leaf<T>::kSize - 1};
}

template <typename T, bool kProcessed>
__device__ inline void load_leaf(const Row<T, kProcessed>& row,
                                 Leaf<T>& x,
                                 int32_t leaf,
                                 Limits limits) {
  x.load(row.logits, leaf);
  if (limits.divided) x.drop_ties(limits.least, row.shared.cut.last_id - leaf * Leaf<T>::kSize);
}

// Returns the mass or the count of a leaf's tokens with logits >= `least`.
template <typename T, bool kProcessed>
__device__ inline Mass amount_from(const Row<T, kProcessed>& row,
                                   Leaf<T>& x,
                                   float least,
                                   bool by_mass) {
  x.forget_derived();
  if (by_mass) {
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < Leaf<T>::kOwn; ++i) {
      float value = clean(x[i]);
      sums[i % 4] += value >= least ? row.weight(value) : 0.0f;
    }
    return row.mass(warp_sum((sums[0] + sums[1]) + (sums[2] + sums[3])));
  }
  int number = 0;
#pragma unroll
  for (int i = 0; i < Leaf<T>::kOwn; ++i) number += clean(x[i]) >= least;
  return static_cast<Mass>(__reduce_add_sync(kFullMask, number));
}

// Sets shared.sums[j] to the mass or the count of the tokens of shared.cut with logits >=
// shared.thresholds[j]. The thresholds must descend.
template <typename T, bool kProcessed>
__device__ __forceinline__ void masses_from(const Row<T, kProcessed>& row, bool by_mass) {
  if (row.thread() < kThresholds) row.shared.sums[row.thread()] = 0;
  __syncthreads();
#pragma unroll 1
  for (int32_t leaf = warp_id(); leaf < row.num_leaves; leaf += num_warps()) {
    Limits limits = limits_of(row, leaf);
    float top = row.stats(leaf).max;
    if (top < fmaxf(row.shared.thresholds[kThresholds - 1], limits.least)) continue;
    Leaf<T> x;
    load_leaf(row, x, leaf, limits);
#pragma unroll 1
    for (int j = 0; j < kThresholds; ++j) {
      float least = fmaxf(row.shared.thresholds[j], limits.least);
      Mass own = amount_from(row, x, least, by_mass);
      if (lane_id() == 0) atomicAdd(&row.shared.sums[j], own);
    }
  }
  __syncthreads();
}

// Appends the lane's elements that are set in `mask` to the list. Every lane of the warp must call
// it.
template <typename T, bool kProcessed>
__device__ inline void append(const Row<T, kProcessed>& row,
                              Leaf<T>& x,
                              int32_t leaf,
                              unsigned mask) {
  x.forget_derived();
  int32_t begin = leaf * Leaf<T>::kSize;
  if (row.logits.size - begin < Leaf<T>::kSize) {
#pragma unroll
    for (int i = 0; i < Leaf<T>::kOwn; ++i) {
      if (Leaf<T>::offset(i) >= row.logits.size - begin) mask &= ~(1u << i);
    }
  }
  int own = __popc(mask), upto = own;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    int before = __shfl_up_sync(kFullMask, upto, offset);
    if (lane_id() >= offset) upto += before;
  }
  int slot = 0;
  if (lane_id() == kWarpSize - 1) slot = atomicAdd(&row.shared.list_count, upto);
  slot = __shfl_sync(kFullMask, slot, kWarpSize - 1) + upto - own;
#pragma unroll
  for (int i = 0; i < Leaf<T>::kOwn; ++i) {
    if ((mask >> i & 1u) == 0) continue;
    if (slot < kListCapacity) {
      row.shared.list_x[slot] = clean(x[i]);
      row.shared.list_id[slot] = begin + Leaf<T>::offset(i);
    }
    ++slot;
  }
}

// Prefetches a leaf that the warp reads later into L2.
template <typename T, bool kProcessed>
__device__ inline void prefetch_leaf(const Row<T, kProcessed>& row, int32_t leaf) {
  constexpr int32_t kLaneSize = Leaf<T>::kSize / kWarpSize;
  int32_t id = leaf * Leaf<T>::kSize + lane_id() * kLaneSize;
  if (id < row.logits.size) ptx::prefetch_l2(row.logits.data + id);
}

// Copies the tokens of shared.cut with low <= logit < high to the list. Sets row.masses() to the
// mass or the count of each leaf's tokens with logits >= high, and returns their sum. If the list
// overflows, only its count is valid.
template <typename T, bool kProcessed>
__device__ __forceinline__ Mass
gather(const Row<T, kProcessed>& row, float low, float high, bool by_mass) {
  __syncthreads();
  if (row.thread() == 0) row.shared.list_count = 0;
  __syncthreads();
  Mass above = 0;
  float least = fminf(low, high);
#pragma unroll 1
  for (int32_t leaf = warp_id(); leaf < row.num_leaves; leaf += num_warps()) {
    int32_t later = leaf + kPassAhead * num_warps();
    if (later < row.num_leaves && row.stats(later).max >= least) prefetch_leaf(row, later);
    Limits limits = limits_of(row, leaf);
    float from = fmaxf(low, limits.least), upto = fmaxf(high, limits.least);
    float top = row.stats(leaf).max;
    Mass own = 0;
    if (top >= fminf(from, upto)) {
      Leaf<T> x;
      load_leaf(row, x, leaf, limits);
      if (top >= upto) own = amount_from(row, x, upto, by_mass);
      x.forget_derived();
      unsigned between = 0;
#pragma unroll
      for (int i = 0; i < Leaf<T>::kOwn; ++i) {
        float value = clean(x[i]);
        between |= static_cast<unsigned>(value >= from && value < upto) << i;
      }
      if (__any_sync(kFullMask, between != 0)) append(row, x, leaf, between);
    }
    if (lane_id() == 0) {
      row.masses()[leaf] = own;
      above += own;
    }
  }
  return block_reduce<Add>(row.shared, above);
}

// Calls visit(logit, id) for every token that a cut keeps, in any order.
template <typename T, bool kProcessed, typename Visit>
__device__ inline void for_each_of(const Row<T, kProcessed>& row, Cut cut, Visit visit) {
#pragma unroll 1
  for (int32_t leaf = warp_id(); leaf < row.num_leaves; leaf += num_warps()) {
    if (row.stats(leaf).max < cut.value) continue;
    int32_t begin = leaf * Leaf<T>::kSize;
    Leaf<T> x;
    x.load(row.logits, leaf);
#pragma unroll
    for (int i = 0; i < Leaf<T>::kOwn; ++i) {
      int32_t id = begin + Leaf<T>::offset(i);
      float value = clean(x[i]);
      if (id < row.logits.size && cut.keeps(value, id)) visit(value, id);
    }
  }
}

}  // namespace specops
