// SPDX-License-Identifier: Apache-2.0
// Common include of all kernel files: CUDA under nvcc, the interpreter (csrc/simt) under g++, and a
// few helpers that both lack.
#pragma once

#if defined(SPECOPS_SIMT)
#include "simt/simt.h"
#else
#include <cuda_runtime.h>
#endif

#include <cstdint>

#include "common/cuda_stream.h"
#include "common/dtype.h"
#include "common/error_flag.h"
#include "common/ptx.cuh"

namespace specops {

constexpr unsigned kFullMask = 0xffffffffu;
constexpr int kWarpSize = 32;

#if defined(SPECOPS_SIMT)
using simt::shared_memory;
#else
// Returns the address of the block's dynamic shared memory.
__device__ inline unsigned char* shared_memory() {
  extern __shared__ __align__(128) unsigned char specops_shared_memory[];
  return specops_shared_memory;
}
#endif

// Waits until the previous kernel in the stream has ended. Every kernel calls this before it
// accesses global memory, because the previous kernel may still be running (launch.cuh). Before the
// call, a kernel may compute from its parameters and prefetch lines to the L2 cache. The next
// kernel may start only after this wait. Therefore at most two kernels run at a time, and every
// kernel that this one waited for has also ended for the next one.
__device__ __forceinline__ void wait_for_previous_kernel() {
  ptx::wait_for_dependencies();
  ptx::release_dependents();
}

// Reports an error; the first error on a device wins. The calling kernel then skips the invalid
// row.
__device__ inline void report_error(ErrorFlag flag, ErrorCode code) {
  atomicCAS(flag.code, 0, static_cast<int32_t>(code));
}

// Counts the arrival of a block and returns whether it is the last of `arrivals`; the last one
// resets the counter to zero. A count that is too high is reported as an error: the counter did not
// start at zero, or two launches use it at once. The arrival publishes everything that the block
// wrote before its last barrier, and the last block sees the writes of all blocks.
__device__ inline bool count_arrival(int32_t* counter,
                                     int arrivals,
                                     ErrorFlag flag,
                                     ErrorCode code) {
  int before = ptx::add_acq_rel(counter, 1);
  if (before < 0 || before >= arrivals) report_error(flag, code);
  bool is_last = before == arrivals - 1;
  if (is_last) *counter = 0;
  return is_last;
}

}  // namespace specops
