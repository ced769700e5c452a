// SPDX-License-Identifier: Apache-2.0
// Typical-p: of the tokens that the other filters keep, those whose surprise is nearest to its
// mean.
#pragma once

#include "sampling/block_reduce.cuh"
#include "sampling/row.cuh"

namespace specops {

// Sums weigh(logit, id), at most 1, over the leaves, each in fp32 in one fixed tree; row.masses()
// ends as the leaves' where `keep` says so. Leaves whose logits all are below `least` are passed
// over.
template <typename T, bool kProcessed, typename Weigh>
__device__ __forceinline__ Mass
weigh_leaves(const Row<T, kProcessed>& row, bool keep, float least, Weigh weigh) {
  __syncthreads();
  Mass total = 0;
#pragma unroll 1
  for (int32_t leaf = warp_id(); leaf < row.num_leaves; leaf += num_warps()) {
    Mass own = 0;
    if (row.stats(leaf).max >= least) {
      int32_t begin = leaf * Leaf<T>::kSize;
      Leaf<T> x;
      x.load(row.logits, leaf);
      float sums[4] = {};
      x.for_each(
          [&](int i, float value, int place) { sums[i % 4] += weigh(value, begin + place); });
      own = row.mass(warp_sum((sums[0] + sums[1]) + (sums[2] + sums[3])));
    }
    if (lane_id() != 0) continue;
    if (keep) row.masses()[leaf] = own;
    total += own;
  }
  return block_reduce<Add>(row.shared, total);
}

// The first token, in id order, at which the sum of amount(logit, id) reaches `wanted`; the last one
// that has an amount where it never does. A warp has a run of leaves, a lane a run of a leaf.
template <typename T, bool kProcessed, typename Amount>
__device__ __forceinline__ int32_t
id_reaching(const Row<T, kProcessed>& row, Mass wanted, float least, Amount amount) {
  int32_t run = (row.num_leaves - 1) / num_warps() + 1;
  int32_t begin = warp_id() * run, end = min(begin + run, row.num_leaves);
  auto lane_amount = [&](int32_t leaf) {
    Mass own = 0;
    if (row.stats(leaf).max < least) return own;
    for_each_in_order(row.logits, leaf, [&](float x, int32_t id) {
      if (id < row.logits.size) own += amount(x, id);
    });
    return own;
  };
  Mass own = 0, total;
#pragma unroll 1
  for (int32_t leaf = begin; leaf < end; ++leaf) own += lane_amount(leaf);
  Mass upto = block_inclusive(row.shared, own, &total);
  Mass before = __shfl_sync(kFullMask, upto - own, 0);  // of the warp's run
  wanted = wanted < total ? wanted : total;
  wanted = wanted > 0 ? wanted : 1;
#pragma unroll 1
  for (int32_t leaf = begin; leaf < end && before < wanted; ++leaf) {
    own = lane_amount(leaf);
    upto = before + warp_inclusive(own);
    Mass running = upto - own;
    if (running < wanted && wanted <= upto) {
      for_each_in_order(row.logits, leaf, [&](float x, int32_t id) {
        Mass here = id < row.logits.size ? amount(x, id) : 0;
        if (here > 0 && running < wanted && wanted <= running + here) row.shared.rest_id = id;
        running += here;
      });
    }
    before = __shfl_sync(kFullMask, upto, kWarpSize - 1);
  }
  __syncthreads();
  return row.shared.rest_id;
}

// shared.sums[j] += mass of the kept tokens no further than shared.thresholds[j].
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

// Of the tokens in shared.kept, those whose surprise -log(probability) is nearest to its mean, the
// entropy, until they have typical_p of the mass; ties to the lower id. Above the first token's, a
// surprise is (max - logit) / temperature, so no logarithm is taken. Leaves the cut in
// shared.typical, and its mass in row.masses().
template <typename T, bool kProcessed>
__device__ __forceinline__ void keep_typical(const Row<T, kProcessed>& row) {
  auto weight_kept = [&](float x, int32_t id) { return row.keeps(x, id) ? row.weight(x) : 0.0f; };
  float least = row.shared.kept.value;
  Mass total = weigh_leaves(row, true, least, weight_kept);
  Mass surprise = weigh_leaves(row, false, least, [&](float x, int32_t id) {
    float own = weight_kept(x, id);
    return own > 0.0f ? own * ((row.max - x) * row.shared.inverse) : 0.0f;
  });
  double part = static_cast<double>(row.shared.filters.typical_p) * static_cast<double>(total);
  Mass target = part < 1.0 ? 1 : static_cast<Mass>(part);
  if (row.thread() == 0) {
    double mean = static_cast<double>(surprise) / static_cast<double>(total);
    row.shared.typical.mean = static_cast<float>(mean);
  }
  __syncthreads();
  // A distance's bits ascend with it: more than `low` is needed, `high` is enough.
  int32_t low = -1, high = static_cast<int32_t>(__float_as_uint(INFINITY));
  Mass below = 0;
#pragma unroll 1
  while (high - low > 1) {
    if (row.thread() < kThresholds) {
      int64_t width = int64_t{high} - low;
      int32_t bits = low + static_cast<int32_t>(width * (row.thread() + 1) / (kThresholds + 1));
      bits = max(bits, low + 1);
      row.shared.thresholds[row.thread()] = __uint_as_float(static_cast<uint32_t>(bits));
      row.shared.sums[row.thread()] = 0;
    }
    __syncthreads();
    masses_within(row);
#pragma unroll 1
    for (int j = 0; j < kThresholds; ++j) {
      int32_t bits = static_cast<int32_t>(__float_as_uint(row.shared.thresholds[j]));
      if (bits <= low || bits >= high) continue;
      if (row.shared.sums[j] >= target) {
        high = bits;
        break;
      }
      low = bits;
      below = row.shared.sums[j];
    }
    __syncthreads();
  }
  float furthest = __uint_as_float(static_cast<uint32_t>(high));
  int32_t last = id_reaching(row, target - below, least, [&](float x, int32_t id) {
    if (!row.keeps(x, id) || row.distance(x) != furthest) return Mass{0};
    Mass own = row.mass(row.weight(x));
    return own > 0 ? own : Mass{1};
  });
  __syncthreads();
  if (row.thread() == 0) {
    row.shared.typical.distance = furthest;
    row.shared.typical.last_id = last;
  }
  weigh_leaves(row, true, least, weight_kept);
}

}  // namespace specops
