// SPDX-License-Identifier: Apache-2.0
// Division of a head's state among the threads of a block, in both kernels with such states.
#pragma once

#include "common/device.cuh"

namespace specops {

constexpr int kStateThreads = 128;
constexpr int kStateLanes = 4;                              // threads per column of a state
constexpr int kStateColumns = kStateThreads / kStateLanes;  // columns per block

// Returns the sum of x over the threads that share a column.
__device__ inline float column_sum(float x) {
  x = __fadd_rn(x, __shfl_xor_sync(kFullMask, x, 1));
  return __fadd_rn(x, __shfl_xor_sync(kFullMask, x, 2));
}

}  // namespace specops
