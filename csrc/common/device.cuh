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

// The first fault of a device wins; the caller then skips the row.
__device__ inline void report_error(ErrorFlag flag, ErrorCode code) {
  atomicCAS(flag.code, 0, static_cast<int32_t>(code));
}

}  // namespace specops
