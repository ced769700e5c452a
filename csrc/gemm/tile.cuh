// SPDX-License-Identifier: Apache-2.0
// Product of many rows and 16-bit weights on tensor cores, in tiles. The file has four parts: the
// copies of a block, the products of a warp, the folding of leaves, and the finishing of sums.
#pragma once

#include "common/device.cuh"
#include "gemm/band.cuh"
#include "gemm/finish.cuh"
#include "gemm/fragments.cuh"

namespace specops {

// Division of a block's tile. It has 8 warps, or 4 for 64 rows; each warp has kWarpTiles tiles of
// 16 outputs by 64 rows. With four tiles, the sums of a leaf take all registers, so the totals of
// earlier leaves are kept in shared memory.
template <int kWarpTilesOf, int kRowsOf>
struct TileShape {
  static constexpr int kWarpTiles = kWarpTilesOf;  // tiles of 16 outputs per warp
  static constexpr int kRows = kRowsOf;
  static constexpr int kTiles = 4 * kWarpTiles;
  static constexpr int kOutputs = 16 * kTiles;
  static constexpr int kThreads = 2 * kRows;
  static constexpr int kSteps = kWarpTiles == 2 ? 2 : 1;  // per stage
  static constexpr int kStages = kRows == 128 && kSteps == 2 ? 3 : 4;
  static constexpr int kWeights = kTiles * kSteps * kStepVectors;  // uint4 per stage
  static constexpr int kInputs = kRows * kSteps * 4;               // uint4 per stage
  static constexpr bool kKeepTotals = kWarpTiles == 4;             // in shared memory
  static constexpr bool kSplits = kWarpTiles == 2;  // blocks may share a tile by leaves
  static constexpr int kTotals = kKeepTotals ? kThreads * kWarpTiles * 8 : 0;  // float4
  static constexpr int kSmemBytes = (kStages * (kWeights + kInputs) + kTotals) * 16;
};

constexpr int kFoldedItems = 4;  // items for which the sums of all leaves are read at once

__device__ inline uint4* moved(uint4* pointer, int num_bytes) {
  return reinterpret_cast<uint4*>(reinterpret_cast<char*>(pointer) + num_bytes);
}
__device__ inline const uint4* moved(const uint4* pointer, int num_bytes) {
  return reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(pointer) + num_bytes);
}

// Workspace for the sums of blocks that compute different leaves of the same tile.
struct LeafWorkspace {
  int32_t* counters;  // arrivals per tile; zeros before and after
  float* leaves;      // [leaves, rows, outputs rounded up to 32]
  ErrorFlag error;
  ErrorCode fault;  // code for a counter that was not zero
};

// The tile of a block, and the range of leaves and stages that the block sums.
template <typename Shape>
struct TilePlace {
  int64_t first_row, output_tile;
  int rows_left;
  int leaf_stages, first_leaf, last_leaf, first_stage, last_stage;

  __device__ TilePlace(const GemmParams& params, const GemmPlan& plan, int64_t row, int64_t tile)
      : first_row(row), output_tile(tile) {
    rows_left = static_cast<int>(min(params.rows - first_row, int64_t{Shape::kRows}));

    constexpr int kStagesOfPlan = 2 / Shape::kSteps;
    leaf_stages = plan.leaf_stages * kStagesOfPlan;
    first_leaf = static_cast<int>(blockIdx.y);
    last_leaf = plan.split ? first_leaf + 1 : plan.leaves;
    first_stage = first_leaf * leaf_stages;
    last_stage = min(last_leaf * leaf_stages, plan.stages * kStagesOfPlan);
  }
};

// The copies that one thread makes: vectors of one tile of weights, and one chunk of every
// kRowsApart-th row of x.
// Eight lanes that read chunks of two rows must hit all banks. Rows of 64 bytes do so without
// further measures; of rows of 128 bytes, every second one has its halves swapped. Tiles and rows
// past the last one are replaced by copies of the last one, and their results are dropped. With
// kGathered, row_at(row) may return nullptr for a row of zeros.
// Stages are copied to the slots of the ring in turn. Past the last stage, zeros are written and
// nothing is read, so that all iterations of the loop are alike.
template <typename T, typename Shape, bool kAligned, bool kGathered>
struct TileCopy {
  static constexpr int kTileVectors = Shape::kSteps * kStepVectors;
  static constexpr int kTileThreads = Shape::kThreads / Shape::kTiles;
  static constexpr int kRowChunks = Shape::kSteps * 4;
  static constexpr int kRowsApart = Shape::kThreads / kRowChunks;
  static constexpr int kCopiedRows = Shape::kRows / kRowsApart;
  static constexpr int kStageInputs = Shape::kSteps * 32;

  const uint4* weights;
  const T* xs[kCopiedRows];
  uint4 *w_to, *x_to;  // in the first slot
  int x_chunk, num_inputs, input, end_input;
  int x_ends[kGathered ? kCopiedRows : 1];  // the rows are zero from this input on

  static __device__ int x_place(int row, int chunk) {
    return row * kRowChunks + (Shape::kSteps == 2 ? chunk ^ (row % 2 * 4) : chunk);
  }

  template <typename RowAt>
  __device__ TileCopy(const GemmParams& params,
                      const GemmPlan& plan,
                      const TilePlace<Shape>& place,
                      const RowAt& row_at,
                      uint4* smem) {
    int thread = static_cast<int>(threadIdx.x);
    int64_t tile = min(place.output_tile * Shape::kTiles + thread / kTileThreads,
                       weight_groups(params.weight.num_outputs) * 2 - 1);
    weights = static_cast<const uint4*>(params.weight.data) + tile * plan.stages * kStageVectors +
              thread % kTileThreads;
    ptx::forget(weights);
    w_to = smem + thread / kTileThreads * kTileVectors + thread % kTileThreads;
    num_inputs = static_cast<int>(params.weight.num_inputs);
    input = place.first_stage * kStageInputs;
    end_input = place.last_stage * kStageInputs;
    int x_row = thread / kRowChunks;
    x_chunk = thread % kRowChunks;
    x_ends[0] = min(end_input, num_inputs) - x_chunk * 8;
#pragma unroll
    for (int i = kCopiedRows - 1; i >= 0; --i) {
      int64_t row = place.first_row + min(x_row + i * kRowsApart, place.rows_left - 1);
      const T* start = row_at(row);
      if constexpr (kGathered) x_ends[i] = start == nullptr ? 0 : x_ends[0];
      xs[i] = start + x_chunk * 8;
      ptx::forget(xs[i]);
    }
    x_to = smem + Shape::kWeights + x_place(x_row, x_chunk);
  }

  __device__ void fetch_weights(uint4* put) const {
#pragma unroll
    for (int i = 0; i < kTileVectors; i += kTileThreads) {
      const uint4* from = weights + int64_t{input} * (kStepVectors / 32) + i;
      ptx::cp_async_16(put + i, from, input < end_input);
    }
  }

  // Copies the rows of a stage. Must be called after fetch_weights(), because it completes the
  // stage.
  __device__ void fetch_x(uint4* put) {
#pragma unroll
    for (int i = 0; i < kCopiedRows; ++i) {
      uint4* to = put + i * Shape::kThreads;
      bool has_inputs = input < x_ends[kGathered ? i : 0];
      if constexpr (kAligned) {
        ptx::cp_async_16(to, xs[i] + input, has_inputs);
      } else {
        *to = load_inputs(has_inputs ? xs[i] : nullptr, input, num_inputs - x_chunk * 8, false);
      }
    }
    input += kStageInputs;
    ptx::cp_async_commit();
  }
};

// The products of one warp. A lane holds the rows 8 c + 2 t and 8 c + 2 t + 1 and, for each pair of
// tiles (a group), the outputs 4 g to 4 g + 3. The fragments of the next step overwrite the current
// ones as soon as those have been used: first the weights of the first half-step, then x, then the
// other weights. Only load_weights() depends on how copied data become fragments of weights.
template <typename T, typename Shape>
struct TileProducts {
  static constexpr int kColumns = 8;
  static constexpr int kSteps = Shape::kSteps;
  static constexpr int kRing = Shape::kWeights + Shape::kInputs;
  static constexpr int kSlotBytes = kRing * 16;
  static constexpr int kWarpTiles = Shape::kWarpTiles;
  static constexpr int kTileVectors = kSteps * kStepVectors;

  const uint4 *w_from, *x_from[kSteps];  // in the first slot
  uint4 w[kWarpTiles][2], x[kColumns];
  float sums[kWarpTiles][kColumns][4] = {};
  int slot = 0;  // offset of the current stage's slot, in bytes

  template <typename Copy>
  __device__ TileProducts(const Copy& copy, const uint4* smem) {
    int thread = static_cast<int>(threadIdx.x);
    int lane = thread % kWarpSize, warp = thread / kWarpSize;
    w_from = smem + warp % 4 * kWarpTiles * kTileVectors + lane;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      int row = warp / 4 * 64 + lane / 4;
      x_from[step] = smem + Shape::kWeights + copy.x_place(row, step * 4 + lane % 4);
    }
  }

  // Loads the first fragments, once the first stage has arrived.
  __device__ void start() {
    load_weights(0, 0);
    load_weights(0, 1);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) load_x(0, c);
  }

  __device__ void load_weights(int step, int half) {
#pragma unroll
    for (int i = 0; i < kWarpTiles; ++i) {
      w[i][half] = *moved(w_from + ((i * kSteps + step) * kStepVectors + half * kWarpSize), slot);
    }
  }

  __device__ void load_x(int step, int c) { x[c] = moved(x_from[step], slot)[8 * c * kSteps * 4]; }

  // Adds the products of the current stage while copies fill the slot at w_put and x_put.
  template <typename Copy>
  __device__ void add_stage(Copy& copy, uint4*& w_put, uint4*& x_put) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < kWarpTiles * kColumns; ++i) {
        int tile_of = i % kWarpTiles, c = i / kWarpTiles;
        multiply<T, 0>(sums[tile_of][c], w[tile_of][0], x[c]);
      }
      int next = (step + 1) % kSteps;
      if (next == 0) {
        // The next stage has arrived, and all warps have read the current one.
        ptx::cp_async_wait<Shape::kStages - 2>();
        __syncthreads();
        slot = slot == (Shape::kStages - 1) * kSlotBytes ? 0 : slot + kSlotBytes;
      }
      load_weights(next, 0);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (c == kColumns / 2 && next == 0) copy.fetch_weights(w_put);
#pragma unroll
        for (int i = 0; i < kWarpTiles; ++i) multiply<T, 1>(sums[i][c], w[i][1], x[c]);
        load_x(next, c);
      }
      load_weights(next, 1);
      if (next == 0) {
        copy.fetch_x(x_put);
        w_put = moved(copy.w_to, slot);
        x_put = moved(copy.x_to, slot);
      }
    }
  }
};

// Totals of the leaves before the current one. They are in registers or, if registers are scarce,
// in shared memory.
template <typename Shape>
struct TileTotals {
  static constexpr int kColumns = 8;
  static constexpr int kItems = Shape::kWarpTiles * kColumns;

  float totals[Shape::kKeepTotals ? 1 : Shape::kWarpTiles][kColumns][4] = {};
  float4* kept;  // this thread's totals in shared memory

  __device__ explicit TileTotals(uint4* smem) {
    constexpr int kRing = Shape::kWeights + Shape::kInputs;
    kept = reinterpret_cast<float4*>(smem + Shape::kStages * kRing) + threadIdx.x;
  }

  // Adds the leaf in `sums` to the totals. After the last leaf, the result is in `sums`.
  __device__ void fold(float (&sums)[Shape::kWarpTiles][kColumns][4], bool is_first, bool is_last) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      auto& sum = sums[i / kColumns][i % kColumns];
      float4 total;
      if constexpr (Shape::kKeepTotals) {
        if (!is_first) total = kept[i * Shape::kThreads];
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
        kept[i * Shape::kThreads] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (!Shape::kKeepTotals) totals[i / kColumns][i % kColumns][j] = sum[j];
        sum[j] = 0.0f;
      }
    }
  }
};

// Access to the sums of a thread as items. An item is four neighboring outputs of one row.
template <typename Shape>
struct TileItems {
  static constexpr int kColumns = 8;
  static constexpr int kItems = Shape::kWarpTiles * kColumns;

  const float (&sums)[Shape::kWarpTiles][kColumns][4];
  int warp_rows, lane;
  int64_t output;

  __device__ TileItems(const float (&of)[Shape::kWarpTiles][kColumns][4],
                       const TilePlace<Shape>& place)
      : sums(of) {
    int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    lane = static_cast<int>(threadIdx.x) % kWarpSize;
    warp_rows = warp / 4 * 64;
    int warp_outputs = warp % 4 * Shape::kWarpTiles * 16;
    output = place.output_tile * Shape::kOutputs + warp_outputs + lane / 4 * 4;
  }

  __device__ int row_of(int i) const {
    return warp_rows + i / 2 % kColumns * 8 + lane % 4 * 2 + i % 2;
  }
  __device__ int64_t output_of(int i) const { return output + i / 2 / kColumns * kWeightGroup; }
  __device__ float4 sum_of(int i) const {
    int c = i / 2 % kColumns, pair = i / 2 / kColumns;
    const auto& low = sums[2 * pair][c];
    const auto& high = sums[2 * pair + 1][c];
    return make_float4(low[i % 2], low[2 + i % 2], high[i % 2], high[2 + i % 2]);
  }
};

// Combines the leaves of a tile whose leaves were computed by different blocks. Each block stores
// its leaf in the workspace. The last block of the tile to arrive adds all leaves in order and
// passes each item to `end`.
template <typename Shape, typename End>
__device__ inline void meet_leaves(const TileItems<Shape>& items,
                                   const GemmParams& params,
                                   const GemmPlan& plan,
                                   const TilePlace<Shape>& place,
                                   const LeafWorkspace& workspace,
                                   const End& end) {
  constexpr int kItems = TileItems<Shape>::kItems;
  int64_t width = weight_groups(params.weight.num_outputs) * kWeightGroup;
  auto leaf_at = [&](int leaf, int i) {
    int64_t row = leaf * params.rows + place.first_row + items.row_of(i);
    return workspace.leaves + row * width + items.output_of(i);
  };
  auto exists = [&](int i) {
    return items.row_of(i) < place.rows_left && items.output_of(i) < width;
  };
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    float4 sum = items.sum_of(i);
    float values[4] = {sum.x, sum.y, sum.z, sum.w};
    if (exists(i)) ptx::store_vector(leaf_at(place.first_leaf, i), pack_chunk<float>(values));
  }
  __threadfence();
  __syncthreads();
  bool is_last = false;
  if (threadIdx.x == 0) {
    int32_t* counter = workspace.counters + blockIdx.x;
    is_last = count_arrival(counter, plan.leaves, workspace.error, workspace.fault);
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
        leaves[i][leaf] = items.sum_of(first + i);
        if (leaf == place.first_leaf || leaf >= plan.leaves || !exists(first + i)) continue;
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
      end(first + i, sum);
    }
  }
}

// Computes the outputs of one tile. row_at(row) returns the start of a row of x (see TileCopy).
template <typename T, typename Shape, bool kAligned, bool kGathered, typename RowAt>
__device__ inline void tile_rows(const GemmParams& params,
                                 const GemmPlan& plan,
                                 const TilePlace<Shape>& place,
                                 const RowAt& row_at,
                                 const LeafWorkspace& workspace) {
  auto* smem = reinterpret_cast<uint4*>(shared_memory());
  TileCopy<T, Shape, kAligned, kGathered> copy(params, plan, place, row_at, smem);
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
  uint4 *w_put = copy.w_to, *x_put = copy.x_to;  // destinations in the slot of the current stage
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
    if (plan.split) return meet_leaves(items, params, plan, place, workspace, finish_item);
  }
#pragma unroll
  for (int i = 0; i < TileItems<Shape>::kItems; ++i) finish_item(i, items.sum_of(i));
}

}  // namespace specops
