// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "dense/linear.h"
#include "gemm/int8_rows.cuh"

namespace specops {

// linear of integer weights, in tiles of 32 outputs and 8 rows. Rows become integers in every block
// anew; no tensor cores.
// Grid:    x = groups of 32 outputs times tiles of rows, rows fastest (unbounded).
// Block:   4 warps; each has every fourth group of 128 inputs, a lane one output and eight rows.
// Smem:    12 KiB and some: the integers of a group and their products, of each warp.
// Cost:    num_inputs bytes of weights an output and tile of rows.
// Assumes: weights packed by pack_weight.
// Order:   a group's sum is exact, rounded to float32 and scaled; groups are added in order, by one
//          chain; then the output's scale, then the bias. The bits are those of the CPU's kernels.
// Source:  -
template <typename T>
__global__ void __launch_bounds__(kInt8Warps* kWarpSize) linear_int8_kernel(LinearParams params) {
  wait_for_previous_kernel();
  int64_t row_tiles = (params.rows + kInt8Rows - 1) / kInt8Rows;
  int64_t first_row = blockIdx.x % row_tiles * kInt8Rows;
  int8_rows<T>(params, first_row, blockIdx.x / row_tiles, [&](int64_t row) {
    return static_cast<const T*>(params.x) + row * params.x_stride;
  });
}

}  // namespace specops
