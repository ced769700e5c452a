// SPDX-License-Identifier: Apache-2.0
// The kernels of linear for plain weights (gemm/fragments.cuh), and of pack_weight.
#pragma once

#include "dense/linear.h"
#include "gemm/float_rows.cuh"
#include "gemm/stream.cuh"
#include "gemm/tile.cuh"

namespace specops {

constexpr int kPackThreads = 256;

// Writes the weight to `packed` in the layout of gemm/weight.h.
// Grid:    x = lanes of the layout / 256 (unbounded).
// Block:   256 threads; each thread owns one lane of one step: one or two vectors of 16 bytes.
// Smem:    none.
// Cost:    the weight is read and written once; a warp reads 64 bytes from each of 16 rows.
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
  int64_t block = index / kWarpSize / steps;  // the group of outputs; for 16-bit types the tile
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

// Computes out[row, n] = bias[n] + sum_k x[row, k] * weight[n, k] for at most 8 * kColumns rows. If
// gated, computes activation(out[row, n]) * out[row, width + n], where both factors are rounded
// first.
// Grid:    x = kTiles tiles of 16 outputs each, with several of these per block if there are few
//          leaves.
// Block:   up to 4 warps; each warp owns one leaf of kTiles tiles and all rows.
// Smem:    80 KiB: a ring of 20 KiB per warp. Each lane reads back only what it copied itself, so
//          that no warp waits for another. Leaves are combined in the rings at the end.
// Cost:    the weights once from memory: 16 KiB in flight per warp, 64 to 128 KiB per SM. The first
//          loads start before the previous kernel has ended. Of x, whatever L1 does not hold:
//          num_inputs * 2 bytes per row and block.
// Assumes: rows <= 8 * kColumns; weights packed by pack_weight.
// Order:   sum_leaves(): one chain of mma.m16n8k16 per leaf, then leaves in order, then the bias.
// Source:  weights on the M side ("swap AB"), as TensorRT-LLM and FlashInfer do for few rows.
template <typename T, int kTiles, int kColumns>
__global__ void __launch_bounds__(128) linear_stream_kernel(LinearParams params, GemmPlan plan) {
  stream_rows<T, kTiles, kColumns>(params, plan, blockIdx.x, [&](int64_t row) {
    return static_cast<const T*>(params.x) + row * params.x_stride;
  });
}

// Computes the same as linear_stream_kernel for any number of rows, in tiles of 128 or 256 outputs
// and 64 or 128 rows.
// Grid:    x = tiles, rows fastest within bands of 16 row tiles, so that a wave of blocks shares
//          weights and x in L2 (unbounded); y = 1 or, if leaves are split, leaves.
// Block:   2 * kRows threads; each warp owns 32 or 64 outputs and 64 rows.
// Smem:    96 KiB: 3 or 4 stages of 64 inputs for 128 outputs, or of 32 inputs for 256. For 256
//          outputs also 128 KiB of totals, float4 by thread; a thread accesses only its own.
// Cost:    2 * kOutputs * kRows * num_inputs flops and 2 * (kOutputs + kRows) * num_inputs bytes
//          per tile, from memory or cache; bound by the tensor cores from about 200 rows on. Totals
//          in shared memory add 6 % at 4,096 inputs. If split, 4 bytes per output and leaf are
//          written, and read by the last block of each tile.
// Assumes: weights packed by pack_weight. If split, a workspace of kWorkspaceCounters counters, which
//          are zero before and after, then [leaves, rows, outputs rounded up to 32].
// Order:   as linear_stream_kernel: leaves are added as they end, or by the last block to arrive.
// Source:  multistage cp.async GEMM as in CUTLASS, with fragments read whole from both layouts.
template <typename T, int kWarpTiles, int kRows, bool kAligned>
__global__ void __launch_bounds__(2 * kRows)
    linear_tile_kernel(LinearParams params, GemmPlan plan) {
  wait_for_previous_kernel();
  using Shape = TileShape<kWarpTiles, kRows>;
  BandPlace band((params.rows + kRows - 1) / kRows, output_tiles<Shape>(params));
  TilePlace<Shape> place(params, plan, band.row_tile * kRows, band.output_tile);
  auto row_at = [&](int64_t row) {
    return static_cast<const T*>(params.x) + row * params.x_stride;
  };
  LeafWorkspace workspace{reinterpret_cast<int32_t*>(params.workspace),
                          params.workspace + kWorkspaceCounters,
                          params.error,
                          kLinearWorkspace};
  tile_rows<T, Shape, kAligned, false>(params, plan, place, row_at, workspace);
}

// Computes the same as linear_stream_kernel for float32, without tensor cores, in tiles of 32
// outputs and 8 rows.
// Grid:    x = groups of 32 outputs, several per block if there are few leaves, times tiles of
//          rows, rows fastest (unbounded).
// Block:   up to 4 warps; each warp owns one leaf, each lane one output and eight rows.
// Smem:    1 KiB per warp, in which leaves are combined.
// Cost:    4 * num_inputs bytes of weights per output and tile of rows; below about 30 rows bound
//          by memory, above by the reads of x from L1.
// Assumes: weights packed by pack_weight.
// Order:   sum_leaves(): one chain of fma per leaf, then leaves in order, then the bias.
// Source:  -
template <bool kAligned>
__global__ void __launch_bounds__(128) linear_float_kernel(LinearParams params, GemmPlan plan) {
  wait_for_previous_kernel();
  int64_t row_tiles = (params.rows + kFloatRows - 1) / kFloatRows;
  int64_t first_row = blockIdx.x % row_tiles * kFloatRows;
  float_rows<kAligned>(params, plan, first_row, blockIdx.x / row_tiles, [&](int64_t row) {
    return static_cast<const float*>(params.x) + row * params.x_stride;
  });
}

}  // namespace specops
