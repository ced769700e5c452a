// SPDX-License-Identifier: Apache-2.0
// Product of a few rows and 16-bit weights on tensor cores: the weights stream through all rows.
#pragma once

#include "common/device.cuh"
#include "gemm/finish.cuh"
#include "gemm/fragments.cuh"

namespace specops {

constexpr int kStreamRing = 1280;  // uint4 per warp

// Computes the outputs of one block for up to 8 * kColumns rows. A warp has one leaf (a part of the
// sum over inputs) and kTiles tiles of 16 outputs; with few leaves, a block has several such groups
// of warps. row_at(row) returns the start of a row of x, or nullptr for a row of zeros. Waits for
// the previous kernel.
template <typename T, int kTiles, int kColumns, typename RowAt>
__device__ inline void stream_rows(const GemmParams& params,
                                   const GemmPlan& plan,
                                   int64_t block,
                                   RowAt row_at) {
  constexpr int kDepth = kStreamRing / (kTiles * kStageVectors);  // stages
  constexpr int kOutputs = 16 * kTiles;
  constexpr int kItems = 8 * kColumns * kOutputs;
  int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  int slots = static_cast<int>(blockDim.x) / (kWarpSize * plan.leaves);
  int slot = warp / plan.leaves, leaf = warp % plan.leaves;
  int64_t unit = block * slots + slot;
  int64_t units = weight_groups(params.weight.num_outputs) * 2 / kTiles;
  auto* rings = reinterpret_cast<uint4*>(shared_memory());
  uint4* ring = rings + warp * kStreamRing;

  int first_stage = leaf * plan.leaf_stages;
  int count = unit < units ? min(plan.leaf_stages, plan.stages - first_stage) : 0;
  int64_t tile_vectors = int64_t{plan.stages} * kStageVectors;
  const uint4* weights = static_cast<const uint4*>(params.weight.data) +
                         unit * kTiles * tile_vectors + int64_t{first_stage} * kStageVectors + lane;
  // Prefetch the first contents of the ring to the L2 cache while the previous kernel ends. This is
  // safe: if that kernel still writes the weights, its writes reach the L2 cache too, and the loads
  // below see them.
  if (lane < kTiles && count > 0) {
    const uint4* first = weights - lane + lane * tile_vectors;
    ptx::prefetch_l2(first, min(count, kDepth) * kStageVectors * sizeof(uint4));
  }
  wait_for_previous_kernel();
  auto fetch = [&](int stage) {
    if (stage < count) {
      uint4* to = ring + stage % kDepth * (kTiles * kStageVectors) + lane;
      const uint4* from = weights + int64_t{stage} * kStageVectors;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          ptx::cp_async_16(to + tile * kStageVectors + i * kWarpSize,
                           from + tile * tile_vectors + i * kWarpSize);
        }
      }
    }
    ptx::cp_async_commit();
  };

  const T* rows[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    int row = 8 * c + lane / 4;
    rows[c] = row < params.rows ? row_at(row) : nullptr;
  }
  int num_inputs = static_cast<int>(params.weight.num_inputs);
  uint4 next[2][kColumns];
  auto fetch_x = [&](int stage) {
    int first = static_cast<int>((first_stage + stage) * kWeightStage) + lane % 4 * 8;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        next[step][c] = load_inputs(rows[c], first + 32 * step, num_inputs, plan.aligned);
      }
    }
  };

  fetch_x(0);
#pragma unroll
  for (int stage = 0; stage < kDepth - 1; ++stage) fetch(stage);
  float sums[kTiles][kColumns][4] = {};
  for (int stage = 0; stage < count; ++stage) {
    ptx::cp_async_wait<kDepth - 2>();
    const uint4* from = ring + stage % kDepth * (kTiles * kStageVectors) + lane;
    uint4 w[kTiles][2][2], x[2][kColumns];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        w[tile][i / 2][i % 2] = from[tile * kStageVectors + i * kWarpSize];
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * kColumns; ++i)
      x[i / kColumns][i % kColumns] = next[i / kColumns][i % kColumns];
    // Refill the slot of the previous stage, whose fragments are no longer needed.
    fetch(stage + kDepth - 1);
    if (stage + 1 < count) fetch_x(stage + 1);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          multiply<T, 0>(sums[tile][c], w[tile][step][0], x[step][c]);
        }
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          multiply<T, 1>(sums[tile][c], w[tile][step][1], x[step][c]);
        }
      }
    }
  }

  // Store the sums of the leaves in the rings as [row][output]: lane (g, t) has the outputs g of
  // both halves, for the rows 2 t and 2 t + 1.
  ptx::cp_async_wait<0>();
  __syncwarp(kFullMask);
  auto* mine = reinterpret_cast<float*>(ring);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int row = 8 * c + lane % 4 * 2 + i % 2;
        mine[row * kOutputs + lane / 4 * (2 * kTiles) + 2 * tile + i / 2] = sums[tile][c][i];
      }
    }
  }
  __syncthreads();
  if (unit >= units) return;
  const auto* leaves = reinterpret_cast<const float*>(rings + slot * plan.leaves * kStreamRing);
  auto sum_of = [&](int item) {
    float sum = leaves[item];
    for (int other = 1; other < plan.leaves; ++other) {
      sum = __fadd_rn(sum, leaves[other * kStreamRing * 4 + item]);
    }
    return sum;
  };
  int apart = is_gated(params.weight.activation) ? 2 : 1;  // a gate and its up are one item
  for (int turn = leaf * kWarpSize + lane; turn * apart < kItems; turn += plan.leaves * kWarpSize) {
    int item = turn * apart;
    int row = item / kOutputs, i = item % kOutputs;
    int64_t output = unit * kOutputs + i;
    // With kTiles == 1, a tile has every second pair of outputs of its group.
    if (kTiles == 1) output = unit / 2 * kWeightGroup + i / 2 * 4 + unit % 2 * 2 + i % 2;
    if (row >= params.rows || output >= params.weight.num_outputs) continue;
    if (is_gated(params.weight.activation)) {
      float value = finish_gated<T>(params, output / 2, sum_of(item), sum_of(item + 1));
      store_gated<T>(params, row, output / 2, value);
    } else {
      finish<T>(params, row, output, sum_of(item));
    }
  }
}

}  // namespace specops
