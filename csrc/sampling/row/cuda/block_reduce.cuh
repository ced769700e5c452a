// SPDX-License-Identifier: Apache-2.0
// Reductions over the threads of a block: sums, maxima and prefix sums.
#pragma once

#include "sampling/row/cuda/row_shared.cuh"
#include "sampling/row/cuda/warp.cuh"

namespace specops {

struct Add {
  template <typename V>
  __device__ V operator()(V a, V b) const {
    return a + b;
  }
};
struct Max {
  template <typename V>
  __device__ V operator()(V a, V b) const {
    return a > b ? a : b;
  }
};
struct Min {
  template <typename V>
  __device__ V operator()(V a, V b) const {
    return a < b ? a : b;
  }
};

// Reduces a value over the block. Only for integers and for maxima, because the order is not fixed.
// Every thread gets the result and sees what the block wrote before the call.
template <typename Op, typename V>
__device__ inline V block_reduce(RowShared& shared, V value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value = Op()(value, __shfl_xor_sync(kFullMask, value, offset));
  }
  V* scratch = reinterpret_cast<V*>(shared.scratch);
  __syncthreads();
  if (lane_id() == 0) scratch[fresh_warp_id()] = value;
  __syncthreads();
  value = scratch[0];
#pragma unroll 1
  for (int warp = 1; warp < num_warps(); ++warp) value = Op()(value, scratch[warp]);
  return value;
}

__device__ inline Mass warp_inclusive(Mass value) {
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    Mass before = __shfl_up_sync(kFullMask, value, offset);
    if (lane_id() >= offset) value += before;
  }
  return value;
}

// Returns the inclusive prefix sum over the threads; sets *total to the sum over the block.
__device__ inline Mass block_inclusive(RowShared& shared, Mass value, Mass* total) {
  value = warp_inclusive(value);
  __syncthreads();
  if (lane_id() == kWarpSize - 1) shared.scratch[warp_id()] = value;
  __syncthreads();
  Mass sum = 0;
#pragma unroll 1
  for (int warp = 0; warp < num_warps(); ++warp) {
    if (warp == warp_id()) value += sum;
    sum += shared.scratch[warp];
  }
  *total = sum;
  return value;
}

}  // namespace specops
