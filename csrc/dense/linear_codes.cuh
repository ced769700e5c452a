// SPDX-License-Identifier: Apache-2.0
// The kernels of linear for codes (gemm/code_product.cuh), and pack_weight's.
#pragma once

#include "dense/linear.h"
#include "gemm/code_product.cuh"

namespace specops {

constexpr int kPackCodesThreads = 256;

// packed = codes in the layout of weight.h.
// Grid:    x = vectors of the layout / 256 (unbounded).
// Block:   256 threads; a thread owns a vector of 16 bytes.
// Smem:    none.
// Cost:    the codes read and written once; a warp reads 32 bytes of each of 16 rows.
// Assumes: rows of codes contiguous.
// Order:   a permutation; of int4 two codes become a byte.
// Source:  -
template <bool kInt4>
__global__ void __launch_bounds__(kPackCodesThreads)
    pack_codes_kernel(PackWeightParams params, int64_t stages, int64_t vectors) {
  wait_for_previous_kernel();
  int64_t index = int64_t{blockIdx.x} * kPackCodesThreads + threadIdx.x;
  if (index >= vectors) return;
  constexpr int kVectors = kInt4 ? Int4Codes::kVectors : Int8Codes::kVectors;
  constexpr int kSteps = kCodeSteps / kVectors;  // of a vector
  int lane = static_cast<int>(index % kWarpSize);
  int vector = static_cast<int>(index / kWarpSize % kVectors);
  int tile = static_cast<int>(index / kWarpSize / kVectors % 2);
  int64_t stage = index / kWarpSize / kVectors / 2 % stages;
  int64_t group = index / kWarpSize / kVectors / 2 / stages;
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // Of int8 a word is four codes of eight, of int4 all of them.
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

// out[row, n] = bias[n] + sum_k x[row, k] * weight[n, k] of codes; of gate and up: activation(out[row,
// n]) * out[row, width + n], both rounded first.
// Grid:    x = tiles of outputs times tiles of rows, rows fastest (unbounded).
// Block:   4 warps. Few rows (Shape::kSplits): each has every fourth stage of the same 32 outputs, and
//          sums of pieces meet in shared memory, where each thread adds some outputs' in order; of wide
//          layers every second stage, beside a warp for 32 outputs more. Many rows: each has all
//          stages of its own 32 outputs, and 32 or 64 rows.
// Smem:    rings of three stages of weights; the rows of a stage, rounded; the sums that meet. 30 to
//          100 KiB by kind and group.
// Cost:    the weights once from memory for every tile of rows. Few rows: rows are rounded once for 32
//          outputs (of wide layers 64), which is as many instructions as all else. Many: three float
//          operations a sum of a piece, output and row, beside the products.
// Assumes: weights packed by pack_weight. Pieces of 16 inputs: Shape::kHalves.
// Order:   a piece's sum is exact (of fp8 a chain of mma.m16n8k16 from zero); pieces are added in order,
//          by one chain of fused multiply-adds; then the output's scale, then the bias. Of integers the
//          bits are those of the CPU's kernels.
// Source:  weights on the M side of mma, offline in its layout, as Marlin does.
template <typename Codes, typename Numbers, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 2)
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
