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
// Returns the dynamic shared memory of the block.
__device__ inline unsigned char* shared_memory() {
  extern __shared__ __align__(128) unsigned char specops_shared_memory[];
  return specops_shared_memory;
}
#endif

// Every kernel calls this before it accesses global memory: the previous kernel may still be
// running (launch.cuh). The next kernel may start only after this wait, so that at most two kernels
// run at a time, and kernels that this one waited for have also ended for the next one. Before the
// call, a kernel may compute from its parameters and prefetch lines to the L2 cache.
__device__ __forceinline__ void wait_for_previous_kernel() {
  ptx::wait_for_dependencies();
  ptx::release_dependents();
}

// Reports an error; the first one of a device wins. The caller then skips the row.
__device__ inline void report_error(ErrorFlag flag, ErrorCode code) {
  atomicCAS(flag.code, 0, static_cast<int32_t>(code));
}

// Counts an arrival and returns whether it is the last one; the counter is then zero again. A count
// that is too high is an error: the counter was not zero at first, or two launches use it at once.
// Publishes what the block wrote before a barrier; the last block sees what all have written.
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
