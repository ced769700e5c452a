// SPDX-License-Identifier: Apache-2.0
// What every kernel file includes: CUDA under nvcc, the interpreter (csrc/simt) under g++, and the
// few things both lack.
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
// The dynamic shared memory of the block.
__device__ inline unsigned char* shared_memory() {
  extern __shared__ __align__(128) unsigned char specops_shared_memory[];
  return specops_shared_memory;
}
#endif

// What every kernel does before it touches global memory: the one before it may still be running
// (launch.cuh). Only then may the next one start, so that at most two kernels run at a time, and what
// this one waited for has ended for the next one, too. Before it a kernel may compute from its
// parameters, and ask for lines in the second-level cache.
__device__ __forceinline__ void wait_for_previous_kernel() {
  ptx::wait_for_dependencies();
  ptx::release_dependents();
}

// The first fault of a device wins; the caller then skips the row.
__device__ inline void report_error(ErrorFlag flag, ErrorCode code) {
  atomicCAS(flag.code, 0, static_cast<int32_t>(code));
}

// Counts an arrival, and says whether it is the last one; the counter is then zero again. One that
// has counted too many was not zero before, or serves two launches at once: that is a fault. What the
// block wrote before a barrier is published, and the last one sees what all have written.
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
