// SPDX-License-Identifier: Apache-2.0
// CUDA stream argument, and declaration of CUDA launchers. Plain C++.
#pragma once

#include <atomic>
#include <stdexcept>

namespace specops {

struct CudaStream {
  void* handle = nullptr;  // a cudaStream_t
  int device = 0;
};

// True if a kernel may start before the previous one has ended (common/launch.cuh).
inline std::atomic<bool> kernels_overlap{true};

// Kind of CUDA kernels in a module: none, kernels for a GPU, or kernels that the interpreter
// (csrc/simt) runs on CPU tensors. The linker makes the choice, so that host code is compiled only
// once for all modules.
enum class CudaKernels { kNone, kOnGpu, kInterpreted };
CudaKernels cuda_kernels();

inline bool has_cuda() { return cuda_kernels() != CudaKernels::kNone; }
inline bool interprets_cuda() { return cuda_kernels() == CudaKernels::kInterpreted; }

}  // namespace specops

// Declares a CUDA launcher. In a module without CUDA kernels, host code defines a weak substitute.
// It is never called, because Checker rejects CUDA tensors there.
#if defined(SPECOPS_CUDA) || defined(SPECOPS_SIMT) || defined(SPECOPS_ISA)
#define SPECOPS_DECLARE_CUDA(fn, Params) void fn(const Params& params, CudaStream stream)
#else
#define SPECOPS_DECLARE_CUDA(fn, Params)                                           \
  __attribute__((weak)) void fn(const Params& /*params*/, CudaStream /*stream*/) { \
    throw std::logic_error(#fn ": this build has no CUDA kernels");                \
  }                                                                                \
  static_assert(true, "a semicolon follows")
#endif
