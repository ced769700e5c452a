// SPDX-License-Identifier: Apache-2.0
// The kernels that multiply many rows with quantized weights, of one expert or of several: one
// rounds the rows, the next one multiplies tiles of them (gemm/code_tile.cuh).
#pragma once

#include "gemm/band.cuh"
#include "gemm/code_tile.cuh"
#include "gemm/expert_rows.cuh"

namespace specops {

constexpr int kRoundThreads = 128;
constexpr int kRoundRows = kWarpSize / kCodeSteps;  // rows of a stage that a warp rounds
static_assert(kRoundedRows % kRoundRows == 0);

// Returns tile `index` of rounded rows. Every warp of a block calls it.
__device__ inline ExpertTile rounded_tile(const ExpertsParams& params, int64_t index) {
  constexpr int kRows = static_cast<int>(kRoundedRows);
  if (params.expert_indptr != nullptr) return expert_tile<kRows>(params, index);
  int first = static_cast<int>(index) * kRows;
  return {0, first, min(static_cast<int>(params.rows) - first, kRows)};
}

// Rounds rows of x to `rounded`: tiles of kRoundedRows rows, each an ExpertTile and its stages as
// RoundedStage. The rest of an incomplete tile becomes zeros; of a tile that does not exist only the
// ExpertTile is written.
// Grid:    x = tiles of rows, for experts as many as possible, times stages * 2; a warp rounds eight
//          rows of a stage (unbounded).
// Block:   128 threads; each thread owns 32 inputs of a row.
// Smem:    none.
// Cost:    x is read once, for experts once per pair; a byte per input and plane is written, and an
//          eighth of that for scales. 4 bytes of expert_indptr per expert and block.
// Assumes: x as in linear; `rounded` aligned to 16 bytes.
// Order:   integer_rows.h; four neighboring lanes share the maximum of a group of 128 inputs.
// Source:  -
template <typename Numbers>
__global__ void __launch_bounds__(kRoundThreads)
    round_rows_kernel(ExpertsParams params, unsigned char* rounded, int stages, bool aligned) {
  wait_for_previous_kernel();
  constexpr int kWarpsPerStage = static_cast<int>(kRoundedRows) / kRoundRows;
  int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  int64_t warp = (int64_t{blockIdx.x} * kRoundThreads + threadIdx.x) / kWarpSize;
  int row = static_cast<int>(warp % kWarpsPerStage) * kRoundRows + lane / kCodeSteps;
  int64_t index = warp / kWarpsPerStage;  // of the stage, over all tiles
  int stage = static_cast<int>(index % stages);
  ExpertTile tile = rounded_tile(params, index / stages);
  unsigned char* to = rounded + index / stages * rounded_tile_bytes(stages, Numbers::kPlanes);
  if (stage == 0 && row == 0 && lane == 0) *reinterpret_cast<ExpertTile*>(to) = tile;
  if (tile.rows == 0) return;
  to += kTileHeadBytes + int64_t{stage} * RoundedStage<Numbers>::kBytes;
  int step = lane % kCodeSteps;
  int first = stage * static_cast<int>(kCodeStage) + 32 * step;
  const void* x = nullptr;
  if (row < tile.rows && params.dtype == DType::kFloat32) {
    x = expert_row<float>(params, tile, row);
  } else if (row < tile.rows) {
    x = expert_row<bfloat16>(params, tile, row);  // also used for float16
  }
  RawInputs raw;
  load_raw(raw, params, x, first, aligned, params.error);
  float values[32];
  unpack_raw(values, raw, params.dtype);
  store_integers(RoundedStep<Numbers>{to, row, step}, values, params.weight.offsets != nullptr);
}

// Computes the same as linear_codes_kernel and moe_codes_kernel, for rows that round_rows_kernel has
// rounded.
// Grid:    x = tiles of 128 outputs by 64 rows, rows fastest within bands of 16 row tiles, so that
//          a wave of blocks shares weights and rows in L2 (unbounded). Blocks without a tile exit at
//          once.
// Block:   4 warps; each has 32 outputs and all rows of the tile.
// Smem:    two slots of a stage: weights, rows, scales. 35 to 68 KiB by formats. At the end, the
//          totals.
// Cost:    2 * 128 * 64 * num_inputs operations per tile, even an incomplete one. With 8-bit rows, a
//          sum of 32 products takes three float operations besides (two, if each output has one
//          scale), which limit the kernel; with 16-bit rows, reads of shared memory do.
// Assumes: weights packed by pack_weight, experts in sequence; tiles of round_rows_kernel.
// Order:   as linear_codes_kernel.
// Source:  double-buffered cp.async GEMM, with the scales of both operands applied to exact sums.
template <typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks) code_tile_kernel(
    ExpertsParams params, CodeTilePlan plan, const unsigned char* rounded, int64_t row_tiles) {
  wait_for_previous_kernel();
  BandPlace place(row_tiles, output_tiles<Shape>(params));
  const unsigned char* row_tile =
      rounded + place.row_tile * rounded_tile_bytes(plan.stages, Shape::Numbers::kPlanes);
  auto product_of = [&] {
    ExpertTile tile = *reinterpret_cast<const ExpertTile*>(row_tile);
    return of_expert(params, tile.expert, tile.first, tile.rows);
  };
  if (product_of().rows == 0) ptx::end_thread();
  code_tile<Shape>(product_of, plan, row_tile + kTileHeadBytes, place.output_tile * Shape::kSides);
}

}  // namespace specops
