// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/device.cuh"
#include "moe/moe_route.h"

namespace specops {

constexpr int kRouteWarps = 4;

// The scores of one row. Each lane reads and writes every 32nd expert only.
struct RouteRow {
  float scores[kMostExperts];
  float keys[kMostExperts];  // -infinity if is_out, so that it is never chosen
  bool is_out[kMostExperts];
};

// The best candidate of a lane, later of the warp. On equal keys, the lower index wins. id -1: no
// candidate.
struct RouteBest {
  float key = -INFINITY;
  int id = -1;

  __device__ void meet(float other_key, int other) {
    if (other < 0) return;
    bool is_better = id < 0 || other_key > key || (other_key == key && other < id);
    if (is_better) {
      key = other_key;
      id = other;
    }
  }

  __device__ void of_warp() {
#pragma unroll
    for (int apart = kWarpSize / 2; apart > 0; apart /= 2) {
      float other_key = __shfl_xor_sync(kFullMask, key, apart);
      int other = __shfl_xor_sync(kFullMask, id, apart);
      meet(other_key, other);
    }
  }
};

__device__ inline float warp_sum(float value) {
#pragma unroll
  for (int apart = kWarpSize / 2; apart > 0; apart /= 2) {
    value = __fadd_rn(value, __shfl_xor_sync(kFullMask, value, apart));
  }
  return value;
}

__device__ inline void route_scores(const MoeRouteParams& params,
                                    const float* logits,
                                    RouteRow& row,
                                    int lane) {
  int count = static_cast<int>(params.num_experts);
  if (params.scoring == Scoring::kSigmoid) {
    for (int i = lane; i < count; i += kWarpSize) {
      row.scores[i] = __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-logits[i])));
    }
    return;
  }
  float peak = -INFINITY, sum = 0.0f;
  for (int i = lane; i < count; i += kWarpSize) peak = fmaxf(peak, logits[i]);
#pragma unroll
  for (int apart = kWarpSize / 2; apart > 0; apart /= 2) {
    peak = fmaxf(peak, __shfl_xor_sync(kFullMask, peak, apart));
  }
  for (int i = lane; i < count; i += kWarpSize) {
    row.scores[i] = expf(__fadd_rn(logits[i], -peak));
    sum = __fadd_rn(sum, row.scores[i]);
  }
  sum = warp_sum(sum);
  for (int i = lane; i < count; i += kWarpSize) row.scores[i] = __fdiv_rn(row.scores[i], sum);
}

// Excludes the experts of all but the best groups by setting is_out. Groups are ranked by the sum
// of their two best keys. Each lane handles every 32nd group, one after the other.
__device__ inline void route_groups(const MoeRouteParams& params, RouteRow& row, int lane) {
  int groups = static_cast<int>(params.num_groups);
  int size = static_cast<int>(params.num_experts) / groups;
  __syncwarp(kFullMask);
  constexpr int kMostGroups = static_cast<int>(kMostExperts) / 2 / kWarpSize;  // groups per lane
  float sums[kMostGroups];
  unsigned is_left = 0xffffffffu;
#pragma unroll
  for (int own = 0; own < kMostGroups; ++own) {
    int group = own * kWarpSize + lane;
    sums[own] = -INFINITY;
    if (group >= groups) continue;
    float best = -INFINITY, second = -INFINITY;
    for (int i = group * size; i < (group + 1) * size; ++i) {
      float key = row.keys[i];
      if (key > best) {
        second = best;
        best = key;
      } else if (key > second) {
        second = key;
      }
    }
    sums[own] = choice_key(__fadd_rn(best, second));
  }
  for (int n = 0; n < static_cast<int>(params.top_k_groups); ++n) {
    RouteBest best;
#pragma unroll
    for (int own = 0; own < kMostGroups; ++own) {
      int group = own * kWarpSize + lane;
      if (group < groups && (is_left >> own & 1u) != 0) best.meet(sums[own], group);
    }
    best.of_warp();
    if (best.id % kWarpSize == lane) is_left &= ~(1u << (best.id / kWarpSize));
  }
  // The groups that are still left were not chosen: exclude their experts.
  __syncwarp(kFullMask);
#pragma unroll
  for (int own = 0; own < kMostGroups; ++own) {
    int group = own * kWarpSize + lane;
    if (group >= groups || (is_left >> own & 1u) == 0) continue;
    for (int i = group * size; i < (group + 1) * size; ++i) row.is_out[i] = true;
  }
  __syncwarp(kFullMask);
}

// Computes ids = the top_k of scores + bias within the best groups, and weights = the scores of
// these experts, normalized and scaled.
// Grid:    x = rows / 4 (unbounded).
// Block:   4 warps; each warp owns a row, each lane every 32nd expert.
// Smem:    36 KiB: scores, keys and marks of four rows.
// Cost:    4 * num_experts bytes read per row; top_k passes over the experts, 32 at once.
// Assumes: sizes checked by ops.cpp.
// Order:   softmax sums one chain per lane, then pairs of lanes; weights are summed by ascending
//          id. A row depends only on itself.
// Source:  DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.1.2, for groups and biases.
__global__ void __launch_bounds__(kRouteWarps* kWarpSize) moe_route_kernel(MoeRouteParams params) {
  wait_for_previous_kernel();
  int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  int64_t r = int64_t{blockIdx.x} * kRouteWarps + warp;
  if (r >= params.rows) return;
  RouteRow& row = reinterpret_cast<RouteRow*>(shared_memory())[warp];
  int count = static_cast<int>(params.num_experts);
  route_scores(params, params.logits + r * params.logits_stride, row, lane);
  for (int i = lane; i < count; i += kWarpSize) {
    float bias = params.bias != nullptr ? params.bias[i] : 0.0f;
    row.keys[i] = choice_key(__fadd_rn(row.scores[i], bias));
    row.is_out[i] = false;
  }
  if (params.num_groups > 1) route_groups(params, row, lane);
  unsigned chosen = 0;  // bit i: expert 32 * i + lane
  int top_k = static_cast<int>(params.top_k);
  for (int n = 0; n < top_k; ++n) {
    RouteBest best;
    for (int i = lane; i < count; i += kWarpSize) {
      bool is_left = !row.is_out[i] && (chosen >> (i / kWarpSize) & 1u) == 0;
      if (is_left) best.meet(row.keys[i], i);
    }
    best.of_warp();
    if (best.id % kWarpSize == lane) chosen |= 1u << (best.id / kWarpSize);
  }
  // Weights are added in ascending order of id; every lane adds all of them in this order.
  float sum = 0.0f;
  int before = 0;
  __syncwarp(kFullMask);
  for (int first = 0; first < count; first += kWarpSize) {
    bool mine = (chosen >> (first / kWarpSize) & 1u) != 0;
    unsigned lanes = __ballot_sync(kFullMask, mine);
    if (mine) {
      int64_t at = r * top_k + before + __popc(lanes & ((1u << lane) - 1u));
      params.expert_ids[at] = first + lane;
    }
    before += __popc(lanes);
    for (; lanes != 0; lanes &= lanes - 1u) {
      sum = __fadd_rn(sum, row.scores[first + __ffs(static_cast<int>(lanes)) - 1]);
    }
  }
  if (sum < params.min_sum) sum = params.min_sum;
  before = 0;
  for (int first = 0; first < count; first += kWarpSize) {
    bool mine = (chosen >> (first / kWarpSize) & 1u) != 0;
    unsigned lanes = __ballot_sync(kFullMask, mine);
    if (mine) {
      float weight = row.scores[first + lane];
      if (params.normalizes) weight = __fdiv_rn(weight, sum);
      int64_t at = r * top_k + before + __popc(lanes & ((1u << lane) - 1u));
      params.expert_weights[at] = __fmul_rn(weight, params.scale);
    }
    before += __popc(lanes);
  }
}

}  // namespace specops
