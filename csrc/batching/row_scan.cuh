// SPDX-License-Identifier: Apache-2.0
// How kernels lay ragged rows next to each other: a thread counts the rows of one request, the block
// sums them up, and a row finds its request again.
#pragma once

#include "common/device.cuh"

namespace specops {

// The sum of `value` over this thread and those before it, and in `total` over all. Every thread of
// the block takes part; warp_sums has a place per warp and may be used again after a barrier.
template <int kThreads>
__device__ inline int64_t scan_rows(int64_t value, int64_t* warp_sums, int64_t* total) {
  int thread = static_cast<int>(threadIdx.x);
  int lane = thread % kWarpSize;
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    int64_t other = __shfl_up_sync(kFullMask, value, distance);
    if (lane >= distance) value += other;
  }
  if (lane == kWarpSize - 1) warp_sums[thread / kWarpSize] = value;
  __syncthreads();
  int64_t before = 0;
  for (int warp = 0; warp < kThreads / kWarpSize; ++warp) {
    if (warp == thread / kWarpSize) value += before;
    before += warp_sums[warp];
  }
  *total = before;
  return value;
}

// The last of kThreads ascending values that is at most `value`; the first of them is.
template <int kThreads>
__device__ inline int last_at_most(const int32_t* values, int32_t value) {
  int found = 0;
  for (int step = kThreads / 2; step > 0; step /= 2) {
    if (values[found + step] <= value) found += step;
  }
  return found;
}

}  // namespace specops
