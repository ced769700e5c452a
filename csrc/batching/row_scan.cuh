// SPDX-License-Identifier: Apache-2.0
// Placement of ragged rows: each thread has the row count of one request, the block computes prefix
// sums of these counts, and each row finds its request by binary search.
#pragma once

#include "common/device.cuh"

namespace specops {

// Returns the inclusive prefix sum of `value` over threads, and in `total` the sum over the block.
// Every thread of the block must call it. warp_sums has one entry per warp and may be reused after
// a barrier.
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

// Returns the index of the last of kThreads ascending values that is at most `value`. The first
// value must be at most `value`.
template <int kThreads>
__device__ inline int last_at_most(const int32_t* values, int32_t value) {
  int found = 0;
  for (int step = kThreads / 2; step > 0; step /= 2) {
    if (values[found + step] <= value) found += step;
  }
  return found;
}

}  // namespace specops
