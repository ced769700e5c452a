// SPDX-License-Identifier: Apache-2.0
// Where a CUDA launcher runs, and how one is declared. Plain C++.
#pragma once

#include <atomic>
#include <stdexcept>

namespace specops {

struct CudaStream {
  void* handle = nullptr;  // a cudaStream_t
  int device = 0;
};

// Whether a kernel may be started before the one ahead of it has ended (common/launch.cuh).
inline std::atomic<bool> kernels_overlap{true};

#if defined(SPECOPS_CUDA) || defined(SPECOPS_SIMT)
constexpr bool kHasCuda = true;
#else
constexpr bool kHasCuda = false;
#endif

}  // namespace specops

// Declares a CUDA launcher. In a build without CUDA kernels Checker refuses CUDA tensors, so that
// the call is never reached.
#if defined(SPECOPS_CUDA) || defined(SPECOPS_SIMT)
#define SPECOPS_DECLARE_CUDA(fn, Params) void fn(const Params& params, CudaStream stream)
#else
#define SPECOPS_DECLARE_CUDA(fn, Params)                            \
  inline void fn(const Params& /*params*/, CudaStream /*stream*/) { \
    throw std::logic_error(#fn ": this build has no CUDA kernels"); \
  }                                                                 \
  static_assert(true, "a semicolon follows")
#endif
