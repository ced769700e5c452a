// SPDX-License-Identifier: Apache-2.0
// Passes over the leaves of a row for typical-p. The surprise of a token is measured relative to
// the first token of the ranking, as (max - logit) / temperature in nats, which needs no logarithm.
// The distance of a token is the difference between its surprise and the mean surprise. Every pass
// sums a leaf in fp32 in the same fixed tree.
#pragma once

#include "sampling/row/cuda/block_reduce.cuh"
#include "sampling/row/cuda/row.cuh"
#include "sampling/row/cuda/row_passes.cuh"

namespace specops {

// Number of bins of a histogram of weight by surprise, which gives only a first guess. The bins use
// the memory of the list while the list is idle. Tokens past the last bin have a negligible weight
// (e^-23).
constexpr int kSurpriseBins = 3000;
constexpr float kBinsPerNat = 128.0f;
constexpr float kBinUnit = 4096.0f;  // units per weight of a token at the begin of a bin
static_assert(kSurpriseBins < kListCapacity);

__device__ inline uint32_t* surprise_bins(RowShared& shared) {
  return reinterpret_cast<uint32_t*>(shared.list_id);
}

__device__ inline void count_surprise(RowShared& shared, float surprise) {
  float place = surprise * kBinsPerNat;
  if (!(place < kSurpriseBins)) return;
  int bin = static_cast<int>(place);
  float inside = (place - static_cast<float>(bin)) / kBinsPerNat;
  float weight = 1.0f - inside + 0.5f * inside * inside;  // e^-inside, relative to the bin's start
  atomicAdd(&surprise_bins(shared)[bin], static_cast<uint32_t>(weight * kBinUnit + 0.5f));
}

// Sums over the kept tokens, for the mean surprise.
struct Moments {
  Mass total, surprise;
};

// Sums the mass and the surprise of the kept tokens, and leaves their weights by surprise in
// surprise_bins().
template <typename T, bool kProcessed>
__device__ __forceinline__ Moments take_moments(const Row<T, kProcessed>& row) {
  __syncthreads();
#pragma unroll 1
  for (int bin = row.thread(); bin < kSurpriseBins; bin += row.threads()) {
    surprise_bins(row.shared)[bin] = 0;
  }
  if (row.thread() < 2) row.shared.sums[row.thread()] = 0;
  __syncthreads();
#pragma unroll 1
  for (int32_t leaf = warp_id(); leaf < row.num_leaves; leaf += num_warps()) {
    if (row.stats(leaf).max < row.shared.kept.value) continue;
    int32_t begin = leaf * Leaf<T>::kSize;
    Leaf<T> x;
    x.load(row.logits, leaf);
    // One sum per round: each weight is computed twice, but fewer registers are needed.
#pragma unroll 1
    for (int power = 0; power < 2; ++power) {
      float sums[4] = {};
      x.for_each([&](int i, float value, int place) {
        if (!row.shared.kept.keeps(value, begin + place)) return;
        float weight = row.weight(value);
        if (!(weight > 0.0f)) return;
        float surprise = (row.max - value) * row.shared.inverse;
        sums[i % 4] += power == 0 ? weight : weight * surprise;
        if (power == 0) count_surprise(row.shared, surprise);
      });
      Mass own = row.mass(warp_sum((sums[0] + sums[1]) + (sums[2] + sums[3])));
      if (lane_id() == 0) atomicAdd(&row.shared.sums[power], own);
    }
  }
  __syncthreads();
  return {row.shared.sums[0], row.shared.sums[1]};
}

// Returns the distance of a token as an integer that has the same order.
template <typename T, bool kProcessed>
__device__ inline int32_t distance_bits(const Row<T, kProcessed>& row, float x) {
  return static_cast<int32_t>(__float_as_uint(row.distance(x)));
}

__device__ inline float distance_of(int32_t bits) {
  return __uint_as_float(static_cast<uint32_t>(bits));
}

// Copies the kept tokens with `low` < distance <= `high` to the list, and returns the mass of those
// with distance <= `low`. If the list overflows, only its count is valid.
template <typename T, bool kProcessed>
__device__ __forceinline__ Mass gather_distances(const Row<T, kProcessed>& row,
                                                 int32_t low,
                                                 int32_t high) {
  __syncthreads();
  if (row.thread() == 0) row.shared.list_count = 0;
  __syncthreads();
  Mass nearer = 0;
#pragma unroll 1
  for (int32_t leaf = warp_id(); leaf < row.num_leaves; leaf += num_warps()) {
    if (row.stats(leaf).max < row.shared.kept.value) continue;
    int32_t begin = leaf * Leaf<T>::kSize;
    Leaf<T> x;
    x.load(row.logits, leaf);
    float sums[4] = {};
    unsigned between = 0;
    int element = 0;
    x.for_each([&](int i, float value, int place) {
      bool kept = row.shared.kept.keeps(value, begin + place);
      int32_t bits = distance_bits(row, value);
      sums[i % 4] += kept && bits <= low ? row.weight(value) : 0.0f;
      between |= static_cast<unsigned>(kept && bits > low && bits <= high) << element++;
    });
    Mass own = row.mass(warp_sum((sums[0] + sums[1]) + (sums[2] + sums[3])));
    if (lane_id() == 0) nearer += own;
    if (__any_sync(kFullMask, between != 0)) append(row, x, leaf, between);
  }
  return block_reduce<Add>(row.shared, nearer);
}

// Mass of the kept tokens at less than a distance, and at no more than it.
struct Around {
  Mass nearer, upto;
};

// Weighs the tokens up to a distance. Leaves the sums of each leaf in its statistics, which are no
// longer needed: in `warm` the weight of the tokens at less than the distance, in `raw` of those at
// no more than it.
template <typename T, bool kProcessed>
__device__ __forceinline__ Around weigh_around(const Row<T, kProcessed>& row, int32_t distance) {
  __syncthreads();
  if (row.thread() < 2) row.shared.sums[row.thread()] = 0;
  __syncthreads();
#pragma unroll 1
  for (int32_t leaf = warp_id(); leaf < row.num_leaves; leaf += num_warps()) {
    float nearer = 0.0f, upto = 0.0f;
    if (row.stats(leaf).max >= row.shared.kept.value) {
      int32_t begin = leaf * Leaf<T>::kSize;
      Leaf<T> x;
      x.load(row.logits, leaf);
#pragma unroll 1
      for (int end = distance - 1; end <= distance; ++end) {
        float sums[4] = {};
        x.for_each([&](int i, float value, int place) {
          if (distance_bits(row, value) > end) return;
          if (row.shared.kept.keeps(value, begin + place)) sums[i % 4] += row.weight(value);
        });
        nearer = upto;
        upto = warp_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
      }
    }
    if (lane_id() != 0) continue;
    row.shared.row_stats[leaf].warm = nearer;
    row.shared.row_stats[leaf].raw = upto;
    atomicAdd(&row.shared.sums[0], row.mass(nearer));
    atomicAdd(&row.shared.sums[1], row.mass(upto));
  }
  __syncthreads();
  return {row.shared.sums[0], row.shared.sums[1]};
}

// Adds to shared.sums[j] the mass of the kept tokens whose distance is at most
// shared.thresholds[j].
template <typename T, bool kProcessed>
__device__ __forceinline__ void masses_within(const Row<T, kProcessed>& row) {
#pragma unroll 1
  for (int32_t leaf = warp_id(); leaf < row.num_leaves; leaf += num_warps()) {
    if (row.stats(leaf).max < row.shared.kept.value) continue;
    int32_t begin = leaf * Leaf<T>::kSize;
    Leaf<T> x;
    x.load(row.logits, leaf);
#pragma unroll 1
    for (int j = 0; j < kThresholds; ++j) {
      float furthest = row.shared.thresholds[j], sums[4] = {};
      x.for_each([&](int i, float value, int place) {
        bool within =
            row.shared.kept.keeps(value, begin + place) && row.distance(value) <= furthest;
        sums[i % 4] += within ? row.weight(value) : 0.0f;
      });
      Mass own = row.mass(warp_sum((sums[0] + sums[1]) + (sums[2] + sums[3])));
      if (lane_id() == 0) atomicAdd(&row.shared.sums[j], own);
    }
  }
  __syncthreads();
}

// Returns the mass of a token for summing equally distant tokens; at least 1.
template <typename T, bool kProcessed>
__device__ inline Mass counted_mass(const Row<T, kProcessed>& row, float x) {
  Mass own = row.mass(row.weight(x));
  return own > 0 ? own : 1;
}

// Returns the first token, in order of ids, at which the kept tokens at a distance weigh `wanted`;
// if they never do, the last such token. Each warp sums a run of leaves, each lane a run of a leaf.
template <typename T, bool kProcessed>
__device__ __forceinline__ int32_t id_reaching(const Row<T, kProcessed>& row,
                                               int32_t distance,
                                               Mass wanted) {
  int32_t run = (row.num_leaves - 1) / num_warps() + 1;
  int32_t begin = warp_id() * run, end = min(begin + run, row.num_leaves);
  auto amount = [&](float x, int32_t id) {
    bool counts =
        id < row.logits.size && row.shared.kept.keeps(x, id) && distance_bits(row, x) == distance;
    return counts ? counted_mass(row, x) : Mass{0};
  };
  auto lane_amount = [&](int32_t leaf) {
    Mass own = 0;
    if (row.stats(leaf).max < row.shared.kept.value) return own;
    for_each_in_order(row.logits, leaf, [&](float x, int32_t id) { own += amount(x, id); });
    return own;
  };
  Mass own = 0, total;
#pragma unroll 1
  for (int32_t leaf = begin; leaf < end; ++leaf) own += lane_amount(leaf);
  Mass upto = block_inclusive(row.shared, own, &total);
  Mass before = __shfl_sync(kFullMask, upto - own, 0);  // mass before the run of this warp
  wanted = wanted < total ? wanted : total;
  wanted = wanted > 0 ? wanted : 1;
#pragma unroll 1
  for (int32_t leaf = begin; leaf < end && before < wanted; ++leaf) {
    own = lane_amount(leaf);
    upto = before + warp_inclusive(own);
    Mass running = upto - own;
    if (running < wanted && wanted <= upto) {
      for_each_in_order(row.logits, leaf, [&](float x, int32_t id) {
        Mass here = amount(x, id);
        if (here > 0 && running < wanted && wanted <= running + here) row.shared.rest_id = id;
        running += here;
      });
    }
    before = __shfl_sync(kFullMask, upto, kWarpSize - 1);
  }
  __syncthreads();
  return row.shared.rest_id;
}

}  // namespace specops
