// SPDX-License-Identifier: Apache-2.0
// Where a thread stands in its block, and what a warp finds together.
#pragma once

#include "common/ptx.cuh"
#include "sampling/row/cuda/ranking.cuh"

namespace specops {

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x) % kWarpSize; }
__device__ inline int warp_id() { return static_cast<int>(threadIdx.x) / kWarpSize; }
__device__ inline int num_warps() { return static_cast<int>(blockDim.x) / kWarpSize; }

// warp_id(), computed where it is asked for. Left to itself the compiler keeps what follows from the
// number of a thread in registers of its own, from one block_reduce to all others.
__device__ inline int fresh_warp_id() {
  uint32_t thread = threadIdx.x;
  ptx::forget(thread);
  return static_cast<int>(thread) / kWarpSize;
}

// The same bits in every lane.
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
