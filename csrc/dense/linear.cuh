// SPDX-License-Identifier: Apache-2.0
// Weights are the 16 rows of mma.m16n8k16 and rows of x its 8 columns, in every kernel here: each
// output element is its own chain of products, whatever stands beside it. The inputs of a step of 32
// are dealt to the two instructions as the packed layout has them: of lane t's eight, the first four
// to the first. linear_leaves() says where chains begin anew and how they are added.
#pragma once

#include "dense/chunk.cuh"
#include "dense/linear.h"

namespace specops {

struct LinearPlan {
  int stages;  // as linear_leaves() has them
  int leaf_stages;
  int leaves;
  int parts;     // blocks that share the leaves of a tile
  bool aligned;  // rows of x can be read by chunks of 16 bytes
  bool quads;    // out can be written by four outputs
};

constexpr int kStepVectors = 64;                 // uint4 of a tile and a step
constexpr int kStageVectors = 2 * kStepVectors;  // of a tile and a stage

// Inputs first to first + 7 of a row, zeros past the last; of no row: zeros.
template <typename T>
__device__ inline uint4 load_inputs(const T* row, int first, int num_inputs, bool aligned) {
  if (row == nullptr || first >= num_inputs) return make_uint4(0, 0, 0, 0);
  return load_chunk(row + first, num_inputs - first, aligned);
}

// d += the products of one step: of a tile's two halves with eight rows of x.
template <typename T, int kHalfStep>
__device__ inline void multiply(float (&d)[4], uint4 low, uint4 high, uint4 x) {
  if constexpr (kHalfStep == 0) {
    ptx::mma_m16n8k16<T>(d, {low.x, high.x, low.y, high.y}, {x.x, x.y});
  } else {
    ptx::mma_m16n8k16<T>(d, {low.z, high.z, low.w, high.w}, {x.z, x.w});
  }
}

// The only place outputs are finished: bias in fp32, then one rounding.
template <typename T>
__device__ inline void finish(const LinearParams& params, int64_t row, int64_t output, float sum) {
  if (params.bias != nullptr) {
    sum = __fadd_rn(sum, to_float(static_cast<const T*>(params.bias)[output]));
  }
  int64_t at = row * params.num_outputs + output;
  if (params.out_dtype == DType::kFloat32) {
    static_cast<float*>(params.out)[at] = sum;
  } else {
    static_cast<T*>(params.out)[at] = from_float<T>(sum);
  }
}

// Four neighbouring outputs; the first is a multiple of four.
template <typename T>
__device__ inline void finish4(
    const LinearParams& params, bool quads, int64_t row, int64_t output, float4 sum) {
  float sums[4] = {sum.x, sum.y, sum.z, sum.w};
  if (!quads || output + 4 > params.num_outputs) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (output + i < params.num_outputs) finish<T>(params, row, output + i, sums[i]);
    }
    return;
  }
  if (params.bias != nullptr) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[i] = __fadd_rn(sums[i], to_float(static_cast<const T*>(params.bias)[output + i]));
    }
  }
  int64_t at = row * params.num_outputs + output;
  if (params.out_dtype == DType::kFloat32) {
    reinterpret_cast<float4*>(static_cast<float*>(params.out) + at)[0] =
        make_float4(sums[0], sums[1], sums[2], sums[3]);
  } else {
    reinterpret_cast<uint2*>(static_cast<T*>(params.out) + at)[0] =
        make_uint2(ptx::pack2<T>(sums[0], sums[1]), ptx::pack2<T>(sums[2], sums[3]));
  }
}

// packed = weight in the layout of linear.h.
// Grid:    x = vectors of 16 bytes of packed / 256 (unbounded).
// Block:   256 threads; a thread owns one vector.
// Smem:    none.
// Cost:    the weight read and written once; a warp reads 64 bytes of each of 8 rows.
// Assumes: rows of weight contiguous.
// Order:   a permutation.
// Source:  -
constexpr int kPackThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kPackThreads)
    pack_weight_kernel(PackWeightParams params, int64_t steps, int64_t vectors, bool aligned) {
  int64_t vector = int64_t{blockIdx.x} * kPackThreads + threadIdx.x;
  if (vector >= vectors) return;
  int64_t lane = vector % kWarpSize, output, first;
  if constexpr (sizeof(T) == 4) {
    output = vector / kWarpSize / steps * kLinearGroup + lane;
    first = vector / kWarpSize % steps * 4;
  } else {
    int64_t half = vector / kWarpSize % 2, tile = vector / kStepVectors / steps;
    output = tile / 2 * kLinearGroup + lane / 4 * 4 + tile % 2 * 2 + half;
    first = vector / kStepVectors % steps * 32 + lane % 4 * 8;
  }
  uint4 chunk = make_uint4(0, 0, 0, 0);
  if (output < params.num_outputs && first < params.num_inputs) {
    const T* row = static_cast<const T*>(params.weight) + output * params.weight_stride;
    int n = static_cast<int>(min(params.num_inputs - first, int64_t{kChunk<T>}));
    chunk = load_chunk(row + first, n, aligned);
  }
  static_cast<uint4*>(params.packed)[vector] = chunk;
}

// out[row, n] = bias[n] + sum_k x[row, k] * weight[n, k], for at most 8 * kColumns rows.
// Grid:    x = kTiles tiles of 16 outputs each, several to a block where there are few leaves.
// Block:   up to 4 warps; a warp owns one leaf of kTiles tiles and all rows.
// Smem:    a ring of 16 KiB a warp; a lane reads back what it copied itself, so that no warp waits
//          for another. Leaves meet in the rings at the end. 64 KiB.
// Cost:    the weights once from memory: 12 to 14 KiB a warp under way, 48 KiB and more an SM. Of x
//          what the first-level cache does not hold: num_inputs * 2 bytes a row and block.
// Assumes: rows <= 8 * kColumns; weights packed by pack_weight.
// Order:   linear_leaves(): a chain of mma.m16n8k16 a leaf, then leaves in order, then the bias.
// Source:  weights on the M side ("swap AB"), as TensorRT-LLM and FlashInfer do for few rows.
constexpr int kStreamRing = 1024;  // uint4 of a warp

template <typename T, int kTiles, int kColumns>
__global__ void __launch_bounds__(128) linear_stream_kernel(LinearParams params, LinearPlan plan) {
  constexpr int kDepth = kStreamRing / (kTiles * kStageVectors);  // stages
  constexpr int kOutputs = 16 * kTiles;
  constexpr int kItems = 8 * kColumns * kOutputs;
  int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  int slots = static_cast<int>(blockDim.x) / (kWarpSize * plan.leaves);
  int slot = warp / plan.leaves, leaf = warp % plan.leaves;
  int64_t unit = int64_t{blockIdx.x} * slots + slot;
  int64_t units = linear_groups(params.num_outputs) * 2 / kTiles;
  auto* rings = reinterpret_cast<uint4*>(shared_memory());
  uint4* ring = rings + warp * kStreamRing;

  int first_stage = leaf * plan.leaf_stages;
  int count = unit < units ? min(plan.leaf_stages, plan.stages - first_stage) : 0;
  int64_t tile_vectors = int64_t{plan.stages} * kStageVectors;
  const uint4* weights = static_cast<const uint4*>(params.packed) + unit * kTiles * tile_vectors +
                         int64_t{first_stage} * kStageVectors + lane;
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
  int num_inputs = static_cast<int>(params.num_inputs);
  uint4 next[2][kColumns];
  auto fetch_x = [&](int stage) {
    int first = static_cast<int>((first_stage + stage) * kLinearStage) + lane % 4 * 8;
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
          multiply<T, 0>(sums[tile][c], w[tile][step][0], w[tile][step][1], x[step][c]);
        }
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          multiply<T, 1>(sums[tile][c], w[tile][step][0], w[tile][step][1], x[step][c]);
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
  for (int item = leaf * kWarpSize + lane; item < kItems; item += plan.leaves * kWarpSize) {
    int row = item / kOutputs, i = item % kOutputs;
    int64_t output = unit * kOutputs + i;
    // One tile alone has every other pair of its group.
    if (kTiles == 1) output = unit / 2 * kLinearGroup + i / 2 * 4 + unit % 2 * 2 + i % 2;
    if (row >= params.rows || output >= params.num_outputs) continue;
    float sum = leaves[item];
    for (int other = 1; other < plan.leaves; ++other) {
      sum = __fadd_rn(sum, leaves[other * kStreamRing * 4 + item]);
    }
    finish<T>(params, row, output, sum);
  }
}

// The same for any number of rows, in tiles of 128 outputs and kRows rows.
// Grid:    x = tiles, rows fastest within bands of 16 row tiles, so that a wave of blocks shares
//          weights and x in the second-level cache (unbounded); y = parts of the leaves.
// Block:   2 * kRows threads; a warp owns 32 outputs and 64 rows.
// Smem:    stages of 64 inputs: 16 KiB of weights and kRows * 128 bytes of x; 96 KiB in all.
// Cost:    2 * 128 * kRows * num_inputs flops and 2 * (128 + kRows) * num_inputs bytes a tile, from
//          memory or cache; bound by the tensor cores from about 200 rows on.
// Assumes: weights packed by pack_weight; with several parts a workspace of all leaves.
// Order:   as linear_stream_kernel: leaves are added in registers, or by linear_fold_kernel.
// Source:  multistage cp.async GEMM as in CUTLASS, with fragments read whole from both layouts.
template <int kRows>
constexpr int kTileStages = kRows == 64 ? 4 : 3;

constexpr int kTileBand = 16;  // row tiles

template <int kRows>
constexpr int kTileStageVectors = 8 * kStageVectors + kRows * 8;

template <typename T, int kRows>
__global__ void __launch_bounds__(2 * kRows)
    linear_tile_kernel(LinearParams params, LinearPlan plan) {
  constexpr int kThreads = 2 * kRows;
  constexpr int kStages = kTileStages<kRows>;
  int thread = static_cast<int>(threadIdx.x);
  int lane = thread % kWarpSize, warp = thread / kWarpSize;
  auto* smem = reinterpret_cast<uint4*>(shared_memory());

  // Which tile
  int64_t row_tiles = (params.rows + kRows - 1) / kRows;
  int64_t output_tiles = (params.num_outputs + kLinearTileOutputs - 1) / kLinearTileOutputs;
  int64_t band = blockIdx.x / (output_tiles * kTileBand);
  int64_t in_band = blockIdx.x % (output_tiles * kTileBand);
  int64_t band_rows = min(row_tiles - band * kTileBand, int64_t{kTileBand});
  int64_t first_row = (band * kTileBand + in_band % band_rows) * kRows;
  int64_t output_tile = in_band / band_rows;

  // Which leaves, and of them stage by stage
  int first_leaf = static_cast<int>(blockIdx.y) * plan.leaves / plan.parts;
  int last_leaf = (static_cast<int>(blockIdx.y) + 1) * plan.leaves / plan.parts;
  int first_stage = first_leaf * plan.leaf_stages;
  int last_stage = min(last_leaf * plan.leaf_stages, plan.stages);

  // What a thread copies: the same vector of every second (or fourth) tile, the same chunk of rows
  // 16 (or 32) apart. Odd rows have the halves of their 128 bytes exchanged, so that eight lanes
  // that read two rows meet all banks.
  constexpr int kTilesApart = kThreads / kStageVectors;
  constexpr int kRowsApart = kThreads / 8;
  int64_t tile_vectors = int64_t{plan.stages} * kStageVectors;
  int64_t tiles = linear_groups(params.num_outputs) * 2;
  int64_t tile = output_tile * 8 + thread / kStageVectors;
  const uint4* weights =
      static_cast<const uint4*>(params.packed) + tile * tile_vectors + thread % kStageVectors;
  int x_row = thread / 8, x_chunk = thread % 8;
  const T* x = static_cast<const T*>(params.x) + (first_row + x_row) * params.x_stride;
  int x_to = 8 * kStageVectors + x_row * 8 + (x_chunk ^ (x_row % 2 * 4));
  int num_inputs = static_cast<int>(params.num_inputs);
  int rows_left = static_cast<int>(min(params.rows - first_row, int64_t{kRows}));

  auto fetch = [&](int stage) {
    if (stage < last_stage) {
      uint4* to = smem + (stage - first_stage) % kStages * kTileStageVectors<kRows>;
#pragma unroll
      for (int i = 0; i < 8 / kTilesApart; ++i) {
        ptx::cp_async_16(to + thread + i * kThreads,
                         weights + i * kTilesApart * tile_vectors + int64_t{stage} * kStageVectors,
                         tile + i * kTilesApart < tiles);
      }
      int first = static_cast<int>(stage * kLinearStage) + x_chunk * 8;
#pragma unroll
      for (int i = 0; i < kRows / kRowsApart; ++i) {
        bool valid = x_row + i * kRowsApart < rows_left && first < num_inputs;
        const T* from = x + i * kRowsApart * params.x_stride;
        if (plan.aligned) {
          ptx::cp_async_16(to + x_to + i * kRowsApart * 8, valid ? from + first : from, valid);
        } else {
          to[x_to + i * kRowsApart * 8] =
              load_inputs(valid ? from : nullptr, first, num_inputs, false);
        }
      }
    }
    ptx::cp_async_commit();
  };

  // What a warp multiplies: outputs 32 * (warp % 4), rows 64 * (warp / 4); 8 columns of 8 rows.
  constexpr int kColumns = 8;
  const uint4* w_from = smem + warp % 4 * 2 * kStageVectors + lane;
  const uint4* x_from = smem + 8 * kStageVectors + (warp / 4 * 64 + lane / 4) * 8;
  int x_lane = lane % 4 + lane / 4 % 2 * 4;  // of the first step; the second has the other half

  float totals[2][kColumns][4];
  float sums[2][kColumns][4];
#pragma unroll
  for (int i = 0; i < 2 * kColumns * 4; ++i) {
    totals[i / 32][i / 4 % 8][i % 4] = 0.0f;
    sums[i / 32][i / 4 % 8][i % 4] = 0.0f;
  }
  int64_t output = output_tile * kLinearTileOutputs + warp % 4 * 32 + lane / 4 * 4;
  int64_t padded_outputs = linear_groups(params.num_outputs) * kLinearGroup;
  auto row_of = [&](int c, int i) { return warp / 4 * 64 + 8 * c + lane % 4 * 2 + i; };

#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) fetch(first_stage + i);
  for (int leaf = first_leaf; leaf < last_leaf; ++leaf) {
    int end = min((leaf + 1) * plan.leaf_stages, last_stage);
    for (int stage = leaf * plan.leaf_stages; stage < end; ++stage) {
      ptx::cp_async_wait<kStages - 2>();
      __syncthreads();
      fetch(stage + kStages - 1);
      int at = (stage - first_stage) % kStages * kTileStageVectors<kRows>;
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        uint4 w[2][2], xs[kColumns];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          w[i / 2][i % 2] = w_from[at + i / 2 * kStageVectors + step * kStepVectors + i % 2 * 32];
        }
#pragma unroll
        for (int c = 0; c < kColumns; ++c) xs[c] = x_from[at + c * 64 + (x_lane ^ (step * 4))];
#pragma unroll
        for (int i = 0; i < 2 * kColumns; ++i) {
          multiply<T, 0>(sums[i % 2][i / 2], w[i % 2][0], w[i % 2][1], xs[i / 2]);
        }
#pragma unroll
        for (int i = 0; i < 2 * kColumns; ++i) {
          multiply<T, 1>(sums[i % 2][i / 2], w[i % 2][0], w[i % 2][1], xs[i / 2]);
        }
      }
    }
    if (plan.parts > 1) {
#pragma unroll
      for (int i = 0; i < 2 * kColumns; ++i) {
        int row = row_of(i / 2, i % 2);
        if (row < rows_left && output < padded_outputs) {
          float* to =
              params.workspace + ((leaf * params.rows) + first_row + row) * padded_outputs + output;
          const auto& low = sums[0][i / 2];
          const auto& high = sums[1][i / 2];
          *reinterpret_cast<float4*>(to) =
              make_float4(low[i % 2], low[2 + i % 2], high[i % 2], high[2 + i % 2]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * kColumns * 4; ++i) {
      float& total = totals[i / 32][i / 4 % 8][i % 4];
      float& sum = sums[i / 32][i / 4 % 8][i % 4];
      total = leaf == first_leaf ? sum : __fadd_rn(total, sum);
      sum = 0.0f;
    }
  }
  if (plan.parts > 1) return;
#pragma unroll
  for (int i = 0; i < 2 * kColumns; ++i) {
    int row = row_of(i / 2, i % 2);
    if (row < rows_left) {
      const auto& low = totals[0][i / 2];
      const auto& high = totals[1][i / 2];
      finish4<T>(params,
                 plan.quads,
                 first_row + row,
                 output,
                 make_float4(low[i % 2], low[2 + i % 2], high[i % 2], high[2 + i % 2]));
    }
  }
}

// Adds the leaves that the parts of linear_tile_kernel have left in the workspace.
// Grid:    x = rows * outputs / 4 / 256 (unbounded).
// Block:   256 threads; a thread owns four neighbouring outputs of a row.
// Smem:    none.
// Cost:    leaves * 4 bytes an output, from the second-level cache.
// Assumes: workspace is [leaves, rows, outputs rounded up to 32].
// Order:   leaves in order, then the bias, then one rounding.
// Source:  -
constexpr int kFoldThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kFoldThreads)
    linear_fold_kernel(LinearParams params, LinearPlan plan) {
  int64_t quads = linear_groups(params.num_outputs) * (kLinearGroup / 4);
  int64_t item = int64_t{blockIdx.x} * kFoldThreads + threadIdx.x;
  int64_t items = params.rows * quads;
  if (item >= items) return;
  const auto* from = reinterpret_cast<const float4*>(params.workspace) + item;
  float4 total = from[0];
  for (int leaf = 1; leaf < plan.leaves; ++leaf) {
    float4 sum = from[leaf * items];
    total = make_float4(__fadd_rn(total.x, sum.x),
                        __fadd_rn(total.y, sum.y),
                        __fadd_rn(total.z, sum.z),
                        __fadd_rn(total.w, sum.w));
  }
  finish4<T>(params, plan.quads, item / quads, item % quads * 4, total);
}

// The same for float32, without tensor cores, in tiles of 32 outputs and 8 rows.
// Grid:    x = groups of 32 outputs, several to a block where there are few leaves, times tiles of
//          rows, rows fastest (unbounded).
// Block:   up to 4 warps; a warp owns one leaf, a lane one output and eight rows.
// Smem:    1 KiB a warp, where leaves meet.
// Cost:    4 * num_inputs bytes of weights an output and tile of rows; below about 30 rows bound by
//          memory, above by the reads of x from the first-level cache.
// Assumes: weights packed by pack_weight.
// Order:   linear_leaves(): a chain of fma a leaf, then leaves in order, then the bias.
// Source:  -
constexpr int kFloatRows = 8;

template <bool kAligned>
__global__ void __launch_bounds__(128) linear_float_kernel(LinearParams params, LinearPlan plan) {
  constexpr int kQuads = 4;  // loaded together
  int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  int slots = static_cast<int>(blockDim.x) / (kWarpSize * plan.leaves);
  int slot = warp / plan.leaves, leaf = warp % plan.leaves;
  int64_t row_tiles = (params.rows + kFloatRows - 1) / kFloatRows;
  int64_t first_row = blockIdx.x % row_tiles * kFloatRows;
  int64_t group = blockIdx.x / row_tiles * slots + slot;
  bool present = group < linear_groups(params.num_outputs);

  int quads = static_cast<int>((params.num_inputs + 3) / 4);
  int leaf_quads = plan.leaf_stages * static_cast<int>(kLinearStage / 4);
  int first = leaf * leaf_quads;
  int last = present ? min(first + leaf_quads, quads) : first;
  const auto* weights = static_cast<const uint4*>(params.packed) + group * quads * kWarpSize + lane;
  int num_inputs = static_cast<int>(params.num_inputs);
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
  int64_t output = group * kLinearGroup + lane;
  if (output >= params.num_outputs) return;
  for (int r = leaf; r < kFloatRows && first_row + r < params.rows; r += plan.leaves) {
    const float* from = leaves + (slot * plan.leaves * kFloatRows + r) * kWarpSize + lane;
    float sum = from[0];
    for (int other = 1; other < plan.leaves; ++other) {
      sum = __fadd_rn(sum, from[other * kFloatRows * kWarpSize]);
    }
    finish<float>(params, first_row + r, output, sum);
  }
}

}  // namespace specops
