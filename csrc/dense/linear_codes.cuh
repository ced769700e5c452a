// SPDX-License-Identifier: Apache-2.0
// The kernels of linear for quantized weights (gemm/code_product.cuh), and of pack_weight.
#pragma once

#include "dense/linear.h"
#include "gemm/code_product.cuh"

namespace specops {

constexpr int kPackCodesThreads = 256;

// Writes quantized weights to `packed` in the layout of weight.h.
// Grid:    x = vectors of the layout / 256 (unbounded).
// Block:   256 threads; each thread owns a vector of 16 bytes.
// Smem:    none.
// Cost:    the weights are read and written once; a warp reads 32 bytes from each of 16 rows.
// Assumes: rows of weights contiguous.
// Order:   a permutation; two int4 values are packed into a byte.
// Source:  -
template <bool kInt4>
__global__ void __launch_bounds__(kPackCodesThreads)
    pack_codes_kernel(PackWeightParams params, int64_t stages, int64_t vectors) {
  wait_for_previous_kernel();
  int64_t index = int64_t{blockIdx.x} * kPackCodesThreads + threadIdx.x;
  if (index >= vectors) return;
  constexpr int kVectors = kInt4 ? Int4Codes::kVectors : Int8Codes::kVectors;
  constexpr int kSteps = kCodeSteps / kVectors;  // steps per vector
  int lane = static_cast<int>(index % kWarpSize);
  int vector = static_cast<int>(index / kWarpSize % kVectors);
  int tile = static_cast<int>(index / kWarpSize / kVectors % 2);
  int64_t stage = index / kWarpSize / kVectors / 2 % stages;
  int64_t group = index / kWarpSize / kVectors / 2 / stages;
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // A word holds four of eight int8 values, or all eight int4 values.
    int64_t output = group * kWeightGroup + lane / 4 * 4 + tile * 2 + i % 2;
    int step = vector * kSteps + (kInt4 ? i / 2 : 0);
    int64_t first = stage * kCodeStage + step * 32 + lane % 4 * 8 + (kInt4 ? 0 : i / 2 * 4);
    if (output >= params.num_outputs) continue;
    int64_t half = params.num_outputs / 2;
    int64_t from = is_gated(params.activation) ? output / 2 + output % 2 * half : output;
    const auto* row = static_cast<const uint8_t*>(params.weight) + from * params.weight_stride;
#pragma unroll
    for (int j = 0; j < (kInt4 ? 8 : 4); ++j) {
      uint32_t code = first + j < params.num_inputs ? row[first + j] : 0;
      if constexpr (kInt4) {
        words[i] |= ((code & 15) ^ 8) << (8 * (j % 4) + 4 * (j / 4));
      } else {
        words[i] |= code << (8 * j);
      }
    }
  }
  static_cast<uint4*>(params.packed)[index] = make_uint4(words[0], words[1], words[2], words[3]);
}

// Computes out[row, n] = bias[n] + sum_k x[row, k] * weight[n, k] for quantized weights. If gated,
// computes activation(out[row, n]) * out[row, width + n], where both factors are rounded first.
// Grid:    x = tiles of outputs times tiles of rows, rows fastest (unbounded).
// Block:   4 warps. Few rows (Shape::kSplits): each warp owns every fourth stage of the same 32
//          outputs, and sums of pieces go to shared memory, where each thread adds some outputs'
//          sums in order. In narrow layers 8 warps own every eighth stage. In wide layers each warp
//          owns every second stage, and another pair of warps owns 32 more outputs. Many rows: each
//          warp owns all stages of its own 32 outputs, and 32 or 64 rows.
// Smem:    rings of three stages of weights; the rounded rows of a stage; the sums to combine. 30
//          to 159 KiB by kind, group and number of warps.
// Cost:    the weights once from memory for every tile of rows. Few rows: rows are rounded once per
//          32 outputs (64 in wide layers), which takes as many instructions as everything else.
//          Many rows: three float operations per sum of a piece, output and row, besides the
//          products.
// Assumes: weights packed by pack_weight. Pieces of 16 inputs: Shape::kHalves.
// Order:   a piece's sum is exact (for fp8 a chain of mma.m16n8k16 from zero). Pieces are added in
//          order by one chain of fused multiply-adds; then come the output's scale and the bias.
//          Integer weights give the bits of the CPU kernels.
// Source:  weights on the M side of mma, packed offline in its layout, as in Marlin.
template <typename Codes, typename Numbers, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 256 / Shape::kThreads)
    linear_codes_kernel(LinearParams params, CodePlan plan) {
  int64_t row_tiles = (params.rows + Shape::kRows - 1) / Shape::kRows;
  int64_t first_row = blockIdx.x % row_tiles * Shape::kRows;
  auto row_at = [&](int64_t row) -> const void* {
    int64_t bytes = params.dtype == DType::kFloat32 ? 4 : 2;
    return static_cast<const char*>(params.x) + row * params.x_stride * bytes;
  };
  code_rows<Codes, Numbers, Shape>(
      params, plan, params.error, first_row, blockIdx.x / row_tiles, row_at);
}

}  // namespace specops
