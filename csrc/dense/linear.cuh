// SPDX-License-Identifier: Apache-2.0
// The kernels of linear for plain weights (gemm/fragments.cuh), and pack_weight's.
#pragma once

#include "dense/linear.h"
#include "gemm/tile.cuh"

namespace specops {

constexpr int kPackThreads = 256;

// packed = weight in the layout of linear.h.
// Grid:    x = lanes of the layout / 256 (unbounded).
// Block:   256 threads; a thread owns a lane of one step: a vector of 16 bytes, or two.
// Smem:    none.
// Cost:    the weight read and written once; a warp reads 64 bytes of each of 16 rows.
// Assumes: rows of weight contiguous.
// Order:   a permutation.
// Source:  -
template <typename T>
__global__ void __launch_bounds__(kPackThreads)
    pack_weight_kernel(PackWeightParams params, int64_t steps, int64_t lanes, bool aligned) {
  wait_for_previous_kernel();
  int64_t index = int64_t{blockIdx.x} * kPackThreads + threadIdx.x;
  if (index >= lanes) return;
  int64_t lane = index % kWarpSize, step = index / kWarpSize % steps;
  int64_t block = index / kWarpSize / steps;  // the group; of 16-bit types the tile
  auto load = [&](int64_t output, int64_t first) {
    if (output >= params.num_outputs || first >= params.num_inputs) return make_uint4(0, 0, 0, 0);
    int64_t from =
        is_gated(params.activation) ? output / 2 + output % 2 * (params.num_outputs / 2) : output;
    const T* row = static_cast<const T*>(params.weight) + from * params.weight_stride;
    int n = static_cast<int>(min(params.num_inputs - first, int64_t{kChunk<T>}));
    return load_chunk(row + first, n, aligned);
  };
  auto* packed = static_cast<uint4*>(params.packed);
  if constexpr (sizeof(T) != 2) {
    packed[index] = load(block * kWeightGroup + lane, step * kChunk<T>);
  } else {
    int64_t output = block / 2 * kWeightGroup + lane / 4 * 4 + block % 2 * 2;
    int64_t first = step * 32 + lane % 4 * 8;
    uint4 low = load(output, first), high = load(output + 1, first);
    uint4* to = packed + index / kWarpSize * kStepVectors + lane;
    to[0] = make_uint4(low.x, high.x, low.y, high.y);
    to[kWarpSize] = make_uint4(low.z, high.z, low.w, high.w);
  }
}

constexpr int kStreamRing = 1280;  // uint4 of a warp

// out[row, n] = bias[n] + sum_k x[row, k] * weight[n, k], for at most 8 * kColumns rows; of gate and
// up: activation(out[row, n]) * out[row, width + n], both rounded first.
// Grid:    x = kTiles tiles of 16 outputs each, several to a block where there are few leaves.
// Block:   up to 4 warps; a warp owns one leaf of kTiles tiles and all rows.
// Smem:    a ring of 20 KiB a warp; a lane reads back what it copied itself, so that no warp waits
//          for another. Leaves meet in the rings at the end. 80 KiB.
// Cost:    the weights once from memory: 16 KiB a warp under way, 64 to 128 KiB an SM, the first of
//          them asked for before the kernel before this one has ended. Of x what the first-level
//          cache does not hold: num_inputs * 2 bytes a row and block.
// Assumes: rows <= 8 * kColumns; weights packed by pack_weight.
// Order:   sum_leaves(): a chain of mma.m16n8k16 a leaf, then leaves in order, then the bias.
// Source:  weights on the M side ("swap AB"), as TensorRT-LLM and FlashInfer do for few rows.
template <typename T, int kTiles, int kColumns>
__global__ void __launch_bounds__(128) linear_stream_kernel(LinearParams params, GemmPlan plan) {
  constexpr int kDepth = kStreamRing / (kTiles * kStageVectors);  // stages
  constexpr int kOutputs = 16 * kTiles;
  constexpr int kItems = 8 * kColumns * kOutputs;
  int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  int slots = static_cast<int>(blockDim.x) / (kWarpSize * plan.leaves);
  int slot = warp / plan.leaves, leaf = warp % plan.leaves;
  int64_t unit = int64_t{blockIdx.x} * slots + slot;
  int64_t units = weight_groups(params.weight.num_outputs) * 2 / kTiles;
  auto* rings = reinterpret_cast<uint4*>(shared_memory());
  uint4* ring = rings + warp * kStreamRing;

  int first_stage = leaf * plan.leaf_stages;
  int count = unit < units ? min(plan.leaf_stages, plan.stages - first_stage) : 0;
  int64_t tile_vectors = int64_t{plan.stages} * kStageVectors;
  const uint4* weights = static_cast<const uint4*>(params.weight.data) +
                         unit * kTiles * tile_vectors + int64_t{first_stage} * kStageVectors + lane;
  // What the ring holds first comes near while the kernel before this one ends. Near is the
  // second-level cache, which later writes reach, too: should weights be written just now, the new
  // ones are read below.
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
    rows[c] = row < params.rows ? static_cast<const T*>(params.x) + row * params.x_stride : nullptr;
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
    // Into the place of the stage before, whose fragments have been used.
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

  // Leaves into the rings, [row][output]: of lane (g, t) outputs g of both halves, rows 2 t, 2 t + 1.
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
    // One tile alone has every other pair of its group.
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

// The same for any number of rows, in tiles of 128 or 256 outputs and 64 or 128 rows.
// Grid:    x = tiles, rows fastest within bands of 16 tiles of rows, so that a wave of blocks shares
//          weights and x in the second-level cache (unbounded); y = 1, or one leaf each.
// Block:   2 * kRows threads; a warp owns 32 or 64 outputs and 64 rows.
// Smem:    96 KiB: 3 or 4 stages of 64 inputs of 128 outputs, or of 32 of 256. For 256 also 128 KiB
//          of totals, float4 by thread; a thread touches none but its own.
// Cost:    2 * kOutputs * kRows * num_inputs flops and 2 * (kOutputs + kRows) * num_inputs bytes a
//          tile, from memory or cache; bound by the tensor cores from about 200 rows on. Totals in
//          shared memory cost 6 % of that at 4,096 inputs.
//          Where split, 4 bytes an output and leaf written and read, by the last block of each tile.
// Assumes: weights packed by pack_weight; where split, a workspace whose counters are zero, as they
//          are left: kLinearCounters of them, then [leaves, rows, outputs rounded up to 32].
// Order:   as linear_stream_kernel: leaves are added as they end, or by the last block to arrive.
// Source:  multistage cp.async GEMM as in CUTLASS, with fragments read whole from both layouts.
template <typename T, int kWarpTiles, int kRows, bool kAligned>
__global__ void __launch_bounds__(2 * kRows)
    linear_tile_kernel(LinearParams params, GemmPlan plan) {
  wait_for_previous_kernel();
  using Shape = TileShape<kWarpTiles, kRows>;
  auto* smem = reinterpret_cast<uint4*>(shared_memory());
  TilePlace<Shape> place(params, plan);
  TileCopy<T, Shape, kAligned> copy(params, plan, place, smem);
  TileProducts<T, Shape> products(copy, smem);
  TileTotals<Shape> totals(smem);
  constexpr int kSlotBytes = TileProducts<T, Shape>::kSlotBytes;
#pragma unroll
  for (int i = 0; i < Shape::kStages; ++i) {
    copy.fetch_weights(moved(copy.w_to, i * kSlotBytes));
    copy.fetch_x(moved(copy.x_to, i * kSlotBytes));
  }
  ptx::cp_async_wait<Shape::kStages - 1>();
  __syncthreads();
  products.start();
  uint4 *w_put = copy.w_to, *x_put = copy.x_to;  // in the slot of the stage at hand
  for (int leaf = place.first_leaf; leaf < place.last_leaf; ++leaf) {
    int end = min((leaf + 1) * place.leaf_stages, place.last_stage);
    for (int stage = leaf * place.leaf_stages; stage < end; ++stage) {
      products.add_stage(copy, w_put, x_put);
    }
    totals.fold(products.sums, leaf == place.first_leaf, leaf + 1 == place.last_leaf);
  }

  TileItems<Shape> items(products.sums, place);
  auto finish_item = [&](int i, float4 sum) {
    int row = items.row_of(i);
    if (row >= place.rows_left) return;
    finish4<T>(params, plan.quads, place.first_row + row, items.output_of(i), sum);
  };
  if constexpr (Shape::kSplits) {
    if (plan.split) {
      LeafWorkspace workspace{reinterpret_cast<int32_t*>(params.workspace),
                              params.workspace + kLinearCounters,
                              params.error,
                              ErrorCode::kLinearWorkspace};
      return meet_leaves(items, params, plan, place, workspace, finish_item);
    }
  }
#pragma unroll
  for (int i = 0; i < TileItems<Shape>::kItems; ++i) finish_item(i, items.sum_of(i));
}

constexpr int kFloatRows = 8;

// The same for float32, without tensor cores, in tiles of 32 outputs and 8 rows.
// Grid:    x = groups of 32 outputs, several to a block where there are few leaves, times tiles of
//          rows, rows fastest (unbounded).
// Block:   up to 4 warps; a warp owns one leaf, a lane one output and eight rows.
// Smem:    1 KiB a warp, where leaves meet.
// Cost:    4 * num_inputs bytes of weights an output and tile of rows; below about 30 rows bound by
//          memory, above by the reads of x from the first-level cache.
// Assumes: weights packed by pack_weight.
// Order:   sum_leaves(): a chain of fma a leaf, then leaves in order, then the bias.
// Source:  -
template <bool kAligned>
__global__ void __launch_bounds__(128) linear_float_kernel(LinearParams params, GemmPlan plan) {
  wait_for_previous_kernel();
  constexpr int kQuads = 4;  // loaded together
  int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  int slots = static_cast<int>(blockDim.x) / (kWarpSize * plan.leaves);
  int slot = warp / plan.leaves, leaf = warp % plan.leaves;
  int64_t row_tiles = (params.rows + kFloatRows - 1) / kFloatRows;
  int64_t first_row = blockIdx.x % row_tiles * kFloatRows;
  int64_t group = blockIdx.x / row_tiles * slots + slot;
  bool present = group < weight_groups(params.weight.num_outputs);

  int quads = static_cast<int>((params.weight.num_inputs + 3) / 4);
  int leaf_quads = plan.leaf_stages * static_cast<int>(kWeightStage / 4);
  int first = leaf * leaf_quads;
  int last = present ? min(first + leaf_quads, quads) : first;
  const auto* weights =
      static_cast<const uint4*>(params.weight.data) + group * quads * kWarpSize + lane;
  int num_inputs = static_cast<int>(params.weight.num_inputs);
  const float* rows[kFloatRows];
#pragma unroll
  for (int r = 0; r < kFloatRows; ++r) {
    // Rows past the last are computed like it, and dropped.
    rows[r] =
        static_cast<const float*>(params.x) + min(first_row + r, params.rows - 1) * params.x_stride;
  }
  float sums[kFloatRows] = {};
  for (int quad = first; quad < last; quad += kQuads) {
    float w[kQuads][4];
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      uint4 chunk = make_uint4(0, 0, 0, 0);
      if (quad + i < last) chunk = ptx::load_streaming(weights + int64_t{quad + i} * kWarpSize);
      unpack_chunk<float>(w[i], chunk);
    }
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      if (quad + i >= last) continue;
#pragma unroll
      for (int r = 0; r < kFloatRows; ++r) {
        int at = (quad + i) * 4;
        float x[4];
        unpack_chunk<float>(x, load_inputs(rows[r], at, num_inputs, kAligned));
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[r] = __fmaf_rn(w[i][j], x[j], sums[r]);
      }
    }
  }
  auto* leaves = reinterpret_cast<float*>(shared_memory());
#pragma unroll
  for (int r = 0; r < kFloatRows; ++r) leaves[(warp * kFloatRows + r) * kWarpSize + lane] = sums[r];
  __syncthreads();
  int64_t output = group * kWeightGroup + lane;
  if (output >= params.weight.num_outputs) return;
  for (int r = leaf; r < kFloatRows && first_row + r < params.rows; r += plan.leaves) {
    auto sum_of = [&](int place) {
      const float* from = leaves + (slot * plan.leaves * kFloatRows + r) * kWarpSize + place;
      float sum = from[0];
      for (int other = 1; other < plan.leaves; ++other) {
        sum = __fadd_rn(sum, from[other * kFloatRows * kWarpSize]);
      }
      return sum;
    };
    if (!is_gated(params.weight.activation)) {
      finish<float>(params, first_row + r, output, sum_of(lane));
    } else if (lane % 2 == 0) {
      float value = finish_gated<float>(params, output / 2, sum_of(lane), sum_of(lane + 1));
      store_gated<float>(params, first_row + r, output / 2, value);
    }
  }
}

}  // namespace specops
