// SPDX-License-Identifier: Apache-2.0
// A thread's position in its block, and reductions over a warp.
#pragma once

#include "common/ptx.cuh"
#include "sampling/row/cuda/ranking.cuh"

namespace specops {

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x) % kWarpSize; }
__device__ inline int warp_id() { return static_cast<int>(threadIdx.x) / kWarpSize; }
__device__ inline int num_warps() { return static_cast<int>(blockDim.x) / kWarpSize; }

// Returns warp_id(), but computed again. Otherwise the compiler would keep values derived from the
// thread index in registers from one block_reduce to the next.
__device__ inline int fresh_warp_id() {
  uint32_t thread = threadIdx.x;
  ptx::forget(thread);
  return static_cast<int>(thread) / kWarpSize;
}

// Returns the sum over the warp; all lanes get the same bits.
__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(kFullMask, x, offset);
  }
  return x;
}

__device__ inline float warp_max(float x) {
  return from_ordered_bits(__reduce_max_sync(kFullMask, ordered_bits(x)));
}

}  // namespace specops
