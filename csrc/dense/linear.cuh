// SPDX-License-Identifier: Apache-2.0
// Weights are the 16 rows of mma.m16n8k16 and rows of x its 8 columns, in every kernel here: each
// output element is its own chain of products, whatever stands beside it. The inputs of a step of 32
// are dealt to the two instructions as the packed layout has them: of lane t's eight, the first four
// to the first. A vector of packed weights is the A fragment of one instruction, in the order of its
// registers. sum_leaves() says where chains begin anew and how they are added.
#pragma once

#include "dense/linear.h"
#include "gemm/finish.cuh"

namespace specops {

struct LinearPlan {
  int stages;  // as sum_leaves() has them
  int leaf_stages;
  int leaves;
  bool split;    // each leaf of a tile has a block of its own
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

// d += the products of half a step: of a tile with eight rows of x.
template <typename T, int kHalf>
__device__ inline void multiply(float (&d)[4], uint4 w, uint4 x) {
  uint2 half = kHalf == 0 ? make_uint2(x.x, x.y) : make_uint2(x.z, x.w);
  ptx::mma_m16n8k16<T>(d, {w.x, w.y, w.z, w.w}, {half.x, half.y});
}

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
__global__ void __launch_bounds__(128) linear_stream_kernel(LinearParams params, LinearPlan plan) {
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

// How linear_tile_kernel cuts its work: 8 warps, or 4 for 64 rows; each has kWarpTiles tiles of 16
// outputs and 64 rows. With four tiles the sums of a leaf take all registers there are, and what
// came before waits in shared memory.
template <int kWarpTiles, int kRows>
struct TileShape {
  static constexpr int kTiles = 4 * kWarpTiles;
  static constexpr int kOutputs = 16 * kTiles;
  static constexpr int kThreads = 2 * kRows;
  static constexpr int kSteps = kWarpTiles == 2 ? 2 : 1;  // of a stage
  static constexpr int kStages = kRows == 128 && kSteps == 2 ? 3 : 4;
  static constexpr int kWeights = kTiles * kSteps * kStepVectors;  // uint4 of a stage
  static constexpr int kInputs = kRows * kSteps * 4;               // uint4 of a stage
  static constexpr bool kKeepTotals = kWarpTiles == 4;             // in shared memory
  static constexpr bool kSplits = kWarpTiles == 2;  // whether blocks may share a tile by leaves
  static constexpr int kTotals = kKeepTotals ? kThreads * kWarpTiles * 8 : 0;  // float4
  static constexpr int kSmemBytes = (kStages * (kWeights + kInputs) + kTotals) * 16;
};

constexpr int kTileBand = 16;    // tiles of rows
constexpr int kFoldedItems = 4;  // whose leaves are read at once

__device__ inline uint4* moved(uint4* pointer, int num_bytes) {
  return reinterpret_cast<uint4*>(reinterpret_cast<char*>(pointer) + num_bytes);
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
    linear_tile_kernel(LinearParams params, LinearPlan plan) {
  wait_for_previous_kernel();
  using Shape = TileShape<kWarpTiles, kRows>;
  constexpr int kThreads = Shape::kThreads;
  constexpr int kSteps = Shape::kSteps;
  constexpr int kStages = Shape::kStages;
  constexpr int kRing = Shape::kWeights + Shape::kInputs;
  int thread = static_cast<int>(threadIdx.x);
  int lane = thread % kWarpSize, warp = thread / kWarpSize;
  auto* smem = reinterpret_cast<uint4*>(shared_memory());

  // Which tile
  int64_t row_tiles = (params.rows + kRows - 1) / kRows;
  int64_t output_tiles = (params.weight.num_outputs + Shape::kOutputs - 1) / Shape::kOutputs;
  int64_t band = blockIdx.x / (output_tiles * kTileBand);
  int64_t in_band = blockIdx.x % (output_tiles * kTileBand);
  int64_t band_rows = min(row_tiles - band * kTileBand, int64_t{kTileBand});
  int64_t first_row = (band * kTileBand + in_band % band_rows) * kRows;
  int64_t output_tile = in_band / band_rows;

  // Which leaves, and of them stage by stage
  constexpr int kStagesOfPlan = 2 / kSteps;
  int leaf_stages = plan.leaf_stages * kStagesOfPlan;
  int first_leaf = static_cast<int>(blockIdx.y);
  int last_leaf = plan.split ? first_leaf + 1 : plan.leaves;
  int first_stage = first_leaf * leaf_stages;
  int last_stage = min(last_leaf * leaf_stages, plan.stages * kStagesOfPlan);

  // What a thread copies: vectors of one tile, and one chunk of every kRowsApart-th row. Eight lanes
  // that read chunks of two rows must meet all banks: rows of 64 bytes do that by themselves; of
  // rows of 128 bytes every other one has its halves exchanged. Instead of tiles and rows past the
  // last one, that one is copied: what comes of it is dropped.
  constexpr int kTileVectors = kSteps * kStepVectors;
  constexpr int kTileThreads = kThreads / Shape::kTiles;
  constexpr int kRowChunks = kSteps * 4;
  constexpr int kRowsApart = kThreads / kRowChunks;
  constexpr int kCopiedRows = kRows / kRowsApart;
  auto x_place = [](int row, int chunk) {
    return row * kRowChunks + (kSteps == 2 ? chunk ^ (row % 2 * 4) : chunk);
  };
  int64_t tile = min(output_tile * Shape::kTiles + thread / kTileThreads,
                     weight_groups(params.weight.num_outputs) * 2 - 1);
  const uint4* weights = static_cast<const uint4*>(params.weight.data) +
                         tile * plan.stages * kStageVectors + thread % kTileThreads;
  ptx::forget(weights);
  uint4* w_to = smem + thread / kTileThreads * kTileVectors + thread % kTileThreads;
  int x_row = thread / kRowChunks, x_chunk = thread % kRowChunks;
  int rows_left = static_cast<int>(min(params.rows - first_row, int64_t{kRows}));
  const T* xs[kCopiedRows];
#pragma unroll
  for (int i = 0; i < kCopiedRows; ++i) {
    int64_t row = first_row + min(x_row + i * kRowsApart, rows_left - 1);
    xs[i] = static_cast<const T*>(params.x) + row * params.x_stride + x_chunk * 8;
    ptx::forget(xs[i]);
  }
  uint4* x_to = smem + Shape::kWeights + x_place(x_row, x_chunk);

  // Stages are copied one after the other to the slots of the ring in turn. Behind the last one zeros
  // are written and nothing is read, so that no turn of the loop differs from another.
  constexpr int kStageInputs = kSteps * 32;
  int num_inputs = static_cast<int>(params.weight.num_inputs);
  int input = first_stage * kStageInputs, end_input = last_stage * kStageInputs;
  int x_end = min(end_input, num_inputs) - x_chunk * 8;
  auto fetch_weights = [&](uint4* put) {
#pragma unroll
    for (int i = 0; i < kTileVectors; i += kTileThreads) {
      const uint4* from = weights + int64_t{input} * (kStepVectors / 32) + i;
      ptx::cp_async_16(put + i, from, input < end_input);
    }
  };
  auto fetch_x = [&](uint4* put) {
#pragma unroll
    for (int i = 0; i < kCopiedRows; ++i) {
      uint4* to = put + i * kThreads;
      if constexpr (kAligned) {
        ptx::cp_async_16(to, xs[i] + input, input < x_end);
      } else {
        *to = load_inputs(input < x_end ? xs[i] : nullptr, input, num_inputs - x_chunk * 8, false);
      }
    }
    input += kStageInputs;
    ptx::cp_async_commit();
  };

  // What a warp multiplies, and what a lane holds of it: rows 8 c + 2 t, 2 t + 1 and of each pair of
  // tiles, which are a group, outputs 4 g to 4 g + 3. Fragments of the next step replace those at
  // hand as these have been used: weights of the first half-step, then x, then the other weights.
  constexpr int kColumns = 8;
  int warp_outputs = warp % 4 * kWarpTiles * 16, warp_rows = warp / 4 * 64;
  uint4* w_from = smem + warp % 4 * kWarpTiles * kTileVectors + lane;
  uint4* x_from[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    x_from[step] = smem + Shape::kWeights + x_place(warp_rows + lane / 4, step * 4 + lane % 4);
  }
  uint4 w[kWarpTiles][2], x[kColumns];
  auto load_weights = [&](int slot, int step, int half) {
#pragma unroll
    for (int i = 0; i < kWarpTiles; ++i) {
      w[i][half] = moved(w_from, slot)[(i * kSteps + step) * kStepVectors + half * kWarpSize];
    }
  };
  auto load_x = [&](int slot, int step, int c) {
    x[c] = moved(x_from[step], slot)[8 * c * kRowChunks];
  };
  float sums[kWarpTiles][kColumns][4] = {};
  float totals[Shape::kKeepTotals ? 1 : kWarpTiles][kColumns][4] = {};
  auto* kept = reinterpret_cast<float4*>(smem + kStages * kRing) + thread;

  int64_t output = output_tile * Shape::kOutputs + warp_outputs + lane / 4 * 4;
  constexpr int kSlotBytes = kRing * 16;
#pragma unroll
  for (int i = 0; i < kStages; ++i) {
    fetch_weights(moved(w_to, i * kSlotBytes));
    fetch_x(moved(x_to, i * kSlotBytes));
  }
  ptx::cp_async_wait<kStages - 1>();
  __syncthreads();
  load_weights(0, 0, 0);
  load_weights(0, 0, 1);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) load_x(0, 0, c);
  int slot = 0;                        // of the stage at hand: where it begins, in bytes
  uint4 *w_put = w_to, *x_put = x_to;  // in it
  for (int leaf = first_leaf; leaf < last_leaf; ++leaf) {
    int end = min((leaf + 1) * leaf_stages, last_stage);
    for (int stage = leaf * leaf_stages; stage < end; ++stage) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < kWarpTiles * kColumns; ++i) {
          int tile_of = i % kWarpTiles, c = i / kWarpTiles;
          multiply<T, 0>(sums[tile_of][c], w[tile_of][0], x[c]);
        }
        int next = (step + 1) % kSteps;
        if (next == 0) {
          // The next stage has arrived, and all warps have read this one.
          ptx::cp_async_wait<kStages - 2>();
          __syncthreads();
          slot = slot == (kStages - 1) * kSlotBytes ? 0 : slot + kSlotBytes;
        }
        load_weights(slot, next, 0);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          if (c == kColumns / 2 && next == 0) fetch_weights(w_put);
#pragma unroll
          for (int i = 0; i < kWarpTiles; ++i) multiply<T, 1>(sums[i][c], w[i][1], x[c]);
          load_x(slot, next, c);
        }
        load_weights(slot, next, 1);
        if (next == 0) {
          fetch_x(x_put);
          w_put = moved(w_to, slot);
          x_put = moved(x_to, slot);
        }
      }
    }
    // What was, plus the leaf; the last leaf leaves it in `sums`.
    bool is_first = leaf == first_leaf, is_last = leaf + 1 == last_leaf;
#pragma unroll
    for (int i = 0; i < kWarpTiles * kColumns; ++i) {
      auto& sum = sums[i / kColumns][i % kColumns];
      float4 total;
      if constexpr (Shape::kKeepTotals) {
        if (!is_first) total = kept[i * kThreads];
      } else {
        const auto& t = totals[i / kColumns][i % kColumns];
        total = make_float4(t[0], t[1], t[2], t[3]);
      }
      if (!is_first) {
        sum[0] = __fadd_rn(total.x, sum[0]);
        sum[1] = __fadd_rn(total.y, sum[1]);
        sum[2] = __fadd_rn(total.z, sum[2]);
        sum[3] = __fadd_rn(total.w, sum[3]);
      }
      if (is_last) continue;
      if constexpr (Shape::kKeepTotals) {
        kept[i * kThreads] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (!Shape::kKeepTotals) totals[i / kColumns][i % kColumns][j] = sum[j];
        sum[j] = 0.0f;
      }
    }
  }
  // Item i of a lane: four outputs of one row.
  constexpr int kItems = kWarpTiles * kColumns;
  auto row_of = [&](int i) { return warp_rows + i / 2 % kColumns * 8 + lane % 4 * 2 + i % 2; };
  auto output_of = [&](int i) { return output + i / 2 / kColumns * kWeightGroup; };
  auto sum_of = [&](int i) {
    int c = i / 2 % kColumns, pair = i / 2 / kColumns;
    const auto& low = sums[2 * pair][c];
    const auto& high = sums[2 * pair + 1][c];
    return make_float4(low[i % 2], low[2 + i % 2], high[i % 2], high[2 + i % 2]);
  };
  if constexpr (Shape::kSplits) {
    if (plan.split) {
      int64_t width = weight_groups(params.weight.num_outputs) * kWeightGroup;
      auto leaf_at = [&](int leaf, int i) {
        int64_t row = leaf * params.rows + first_row + row_of(i);
        return params.workspace + kLinearCounters + row * width + output_of(i);
      };
      auto exists = [&](int i) { return row_of(i) < rows_left && output_of(i) < width; };
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        float4 sum = sum_of(i);
        float values[4] = {sum.x, sum.y, sum.z, sum.w};
        if (exists(i)) ptx::store_vector(leaf_at(first_leaf, i), pack_chunk<float>(values));
      }
      // The last block of the tile to arrive adds what all have left, in the order of leaves.
      __threadfence();
      __syncthreads();
      bool is_last = false;
      if (thread == 0) {
        int32_t* counter = reinterpret_cast<int32_t*>(params.workspace) + blockIdx.x;
        is_last = count_arrival(counter, plan.leaves, params.error, ErrorCode::kLinearWorkspace);
      }
      if (!__syncthreads_or(is_last)) return;
      __threadfence();
#pragma unroll
      for (int first = 0; first < kItems; first += kFoldedItems) {
        float4 leaves[kFoldedItems][kMaxLeaves];
#pragma unroll
        for (int i = 0; i < kFoldedItems; ++i) {
#pragma unroll
          for (int leaf = 0; leaf < kMaxLeaves; ++leaf) {
            leaves[i][leaf] = sum_of(first + i);
            if (leaf == first_leaf || leaf >= plan.leaves || !exists(first + i)) continue;
            leaves[i][leaf] = *reinterpret_cast<const float4*>(leaf_at(leaf, first + i));
          }
        }
#pragma unroll
        for (int i = 0; i < kFoldedItems; ++i) {
          float4 sum = leaves[i][0];
#pragma unroll
          for (int leaf = 1; leaf < kMaxLeaves; ++leaf) {
            if (leaf >= plan.leaves) continue;
            const float4& more = leaves[i][leaf];
            sum.x = __fadd_rn(sum.x, more.x);
            sum.y = __fadd_rn(sum.y, more.y);
            sum.z = __fadd_rn(sum.z, more.z);
            sum.w = __fadd_rn(sum.w, more.w);
          }
          int row = row_of(first + i);
          if (row >= rows_left) continue;
          finish4<T>(params, plan.quads, first_row + row, output_of(first + i), sum);
        }
      }
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (row_of(i) >= rows_left) continue;
    finish4<T>(params, plan.quads, first_row + row_of(i), output_of(i), sum_of(i));
  }
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
__global__ void __launch_bounds__(128) linear_float_kernel(LinearParams params, LinearPlan plan) {
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
