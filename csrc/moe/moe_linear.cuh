// SPDX-License-Identifier: Apache-2.0
// The kernels of moe_linear. They are the kernels of linear, run on tiles of rows that have the
// same expert; each block looks up its tile.
#pragma once

#include "gemm/code_product.cuh"
#include "gemm/expert_rows.cuh"
#include "gemm/float_rows.cuh"
#include "gemm/stream.cuh"
#include "gemm/tile.cuh"
#include "moe/moe_linear.h"

namespace specops {

static_assert(kExpertRows == kFloatRows);

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
    moe_stream_kernel(ExpertsParams params, GemmPlan plan, int64_t row_tiles) {
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
    moe_tile_kernel(ExpertsParams params, GemmPlan plan, int64_t row_tiles) {
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
    moe_float_kernel(ExpertsParams params, GemmPlan plan, int64_t row_tiles) {
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
    moe_codes_kernel(ExpertsParams params, CodePlan plan, int64_t row_tiles) {
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
