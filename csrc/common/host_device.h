// SPDX-License-Identifier: Apache-2.0
// Specifiers for functions that CPU kernels and CUDA kernels share.
#pragma once

// Internal linkage, so that every instruction set and device compiles a separate copy.
#if defined(__CUDACC__)
#define SPECOPS_HOST_DEVICE __host__ __device__ static inline
#define SPECOPS_HOST_DEVICE_MEMBER __host__ __device__ inline
#else
#define SPECOPS_HOST_DEVICE static inline
#define SPECOPS_HOST_DEVICE_MEMBER inline
#endif
