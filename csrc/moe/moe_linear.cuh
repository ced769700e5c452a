// SPDX-License-Identifier: Apache-2.0
// The kernels of moe_linear. They are the kernels of linear, run on tiles of rows that have the
// same expert; each block looks up its tile.
#pragma once

#include "gemm/code_product.cuh"
#include "gemm/float_rows.cuh"
#include "gemm/stream.cuh"
#include "gemm/tile.cuh"
#include "moe/moe_linear.h"

namespace specops {

constexpr int kExpertRows = 8;  // rows per tile, except in moe_tile_kernel
static_assert(kExpertRows == kFloatRows);

// Returns an upper bound on the number of tiles of `tile_rows` rows for `pairs` pairs: each expert
// may have one incomplete tile.
inline int64_t most_row_tiles(int64_t pairs, int64_t num_experts, int64_t tile_rows = kExpertRows) {
  return pairs / tile_rows + (num_experts < pairs ? num_experts : pairs);
}

// A tile of rows of one expert. rows is 0 if the tile does not exist.
struct ExpertTile {
  int expert, first, rows;
};

// Returns tile `index`, counted over the rows of all experts in order. Every warp of a block calls
// it. There are no tiles from the first expert with a fault on, because later row ranges could
// overlap earlier ones.
template <int kTileRows = kExpertRows>
__device__ inline ExpertTile expert_tile(const MoeLinearParams& params, int64_t index) {
  int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  int experts = static_cast<int>(params.num_experts), left = static_cast<int>(index);
  for (int first = 0; first < experts; first += kWarpSize) {
    int expert = first + lane, begin = 0, end = 0;
    bool is_wrong = false;
    if (expert < experts) {
      Fault fault = find_expert_fault(params, expert);
      is_wrong = fault.found();
      if (is_wrong) {
        report_error(params.error, fault.code);
      } else {
        begin = params.expert_indptr[expert];
        end = params.expert_indptr[expert + 1];
      }
    }
    unsigned wrong = __ballot_sync(kFullMask, is_wrong);
    if (wrong != 0 && lane >= __ffs(static_cast<int>(wrong))) end = begin;
    int tiles = (end - begin + kTileRows - 1) / kTileRows, sum = tiles;
#pragma unroll
    for (int apart = 1; apart < kWarpSize; apart *= 2) {
      int other = __shfl_up_sync(kFullMask, sum, apart);
      if (lane >= apart) sum += other;
    }
    unsigned reach = __ballot_sync(kFullMask, sum > left);
    if (reach != 0) {
      int owner = __ffs(static_cast<int>(reach)) - 1;
      int within = left - __shfl_sync(kFullMask, sum - tiles, owner);
      int at = __shfl_sync(kFullMask, begin, owner) + within * kTileRows;
      int rows = min(__shfl_sync(kFullMask, end, owner) - at, kTileRows);
      return {first + owner, at, rows};
    }
    if (wrong != 0) break;
    left -= __shfl_sync(kFullMask, sum, kWarpSize - 1);
  }
  return {0, 0, 0};
}

// Returns the address in x of row `row` of a tile. An invalid row is reported as a fault and reads
// as zeros.
template <typename T>
__device__ inline const T* expert_row(const MoeLinearParams& params,
                                      const ExpertTile& tile,
                                      int64_t row) {
  int64_t from = tile.first + row;
  if (params.row_indices != nullptr) {
    Fault fault = find_row_fault(params, from);
    if (fault.found()) {
      report_error(params.error, fault.code);
      return nullptr;
    }
    from = params.row_indices[from];
  }
  return static_cast<const T*>(params.x) + from * params.x_stride;
}

// Computes out[pair] = (weight of the pair's expert) * x[row of the pair], for 16-bit types.
// Grid:    x = tiles of eight rows of one expert, as many as possible, times tiles of outputs as in
//          linear_stream_kernel, rows fastest (unbounded). Blocks without a tile exit at once.
// Block:   as linear_stream_kernel.
// Smem:    as linear_stream_kernel.
// Cost:    the weights of each expert that has rows, once per eight rows; blocks that share weights
//          run side by side. 4 bytes of expert_indptr per expert and block.
// Assumes: weights packed by pack_weight, experts in sequence.
// Order:   as linear_stream_kernel: a pair's bits equal those of linear with its expert alone.
// Source:  -
template <typename T>
__global__ void __launch_bounds__(128)
    moe_stream_kernel(MoeLinearParams params, GemmPlan plan, int64_t row_tiles) {
  wait_for_previous_kernel();
  ExpertTile tile = expert_tile(params, blockIdx.x % row_tiles);
  if (tile.rows == 0) return;
  GemmParams one = of_expert(params, tile.expert, tile.first, tile.rows);
  stream_rows<T, 2, 1>(one, plan, blockIdx.x / row_tiles, [&](int64_t row) {
    return expert_row<T>(params, tile, row);
  });
}

// Computes the same as moe_stream_kernel for many rows, in the way of linear_tile_kernel.
// Grid:    x = tiles of kRows rows of one expert, as many as possible, times tiles of outputs, in
//          bands as in linear_tile_kernel (unbounded). Blocks without a tile exit at once.
// Block:   as linear_tile_kernel.
// Smem:    as linear_tile_kernel.
// Cost:    as linear_tile_kernel, for the experts that have rows; an incomplete tile costs as much
//          as a complete one.
// Assumes: weights packed by pack_weight, experts in sequence; rows of x in chunks of 16 bytes.
// Order:   as linear_tile_kernel.
// Source:  -
template <typename T, int kRows>
__global__ void __launch_bounds__(2 * kRows)
    moe_tile_kernel(MoeLinearParams params, GemmPlan plan, int64_t row_tiles) {
  wait_for_previous_kernel();
  using Shape = TileShape<2, kRows>;
  BandPlace band(row_tiles, output_tiles<Shape>(params));
  ExpertTile tile = expert_tile<kRows>(params, band.row_tile);
  if (tile.rows == 0) ptx::end_thread();
  GemmParams one = of_expert(params, tile.expert, tile.first, tile.rows);
  plan.split = false;
  TilePlace<Shape> place(one, plan, 0, band.output_tile);
  auto row_at = [&](int64_t row) { return expert_row<T>(params, tile, row); };
  tile_rows<T, Shape, true, true>(one, plan, place, row_at, LeafWorkspace{});
}

// Computes the same as moe_stream_kernel for float32, in the way of linear_float_kernel.
// Grid:    as moe_stream_kernel, with linear_float_kernel's tiles of outputs.
// Block:   as linear_float_kernel.
// Smem:    as linear_float_kernel.
// Cost:    as linear_float_kernel, for the experts that have rows.
// Assumes: weights packed by pack_weight, experts in sequence.
// Order:   as linear_float_kernel.
// Source:  -
template <bool kAligned>
__global__ void __launch_bounds__(128)
    moe_float_kernel(MoeLinearParams params, GemmPlan plan, int64_t row_tiles) {
  wait_for_previous_kernel();
  ExpertTile tile = expert_tile(params, blockIdx.x % row_tiles);
  if (tile.rows == 0) return;
  GemmParams one = of_expert(params, tile.expert, tile.first, tile.rows);
  float_rows<kAligned>(one, plan, 0, blockIdx.x / row_tiles, [&](int64_t row) {
    return expert_row<float>(params, tile, row);
  });
}

// Computes the same as moe_stream_kernel for quantized weights, in the way of linear_codes_kernel.
// Grid:    as moe_stream_kernel, with linear_codes_kernel's tiles of outputs.
// Block:   as linear_codes_kernel.
// Smem:    as linear_codes_kernel.
// Cost:    as linear_codes_kernel, for the experts that have rows.
// Assumes: weights packed by pack_weight, experts in sequence.
// Order:   as linear_codes_kernel.
// Source:  -
template <typename Codes, typename Numbers, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 2)
    moe_codes_kernel(MoeLinearParams params, CodePlan plan, int64_t row_tiles) {
  static_assert(Shape::kRows == kExpertRows);
  wait_for_previous_kernel();
  ExpertTile tile = expert_tile(params, blockIdx.x % row_tiles);
  if (tile.rows == 0) return;
  GemmParams one = of_expert(params, tile.expert, tile.first, tile.rows);
  auto row_at = [&](int64_t row) -> const void* {
    if (params.dtype == DType::kFloat32) return expert_row<float>(params, tile, row);
    return expert_row<bfloat16>(params, tile, row);  // also used for float16
  };
  code_rows<Codes, Numbers, Shape>(one, plan, params.error, 0, blockIdx.x / row_tiles, row_at);
}

}  // namespace specops
