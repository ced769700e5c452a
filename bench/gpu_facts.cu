// SPDX-License-Identifier: Apache-2.0
// What a GPU takes for things that no kernel of ours can avoid: the gap between two kernels, an
// atomic behind a fence, a read of memory that nobody holds. Compiled at first use into bench/work/
// and called through ctypes; no part of the product.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

__global__ void empty_kernel() {}

// Lets the next kernel begin at once, and waits for the one before: nothing of either is left.
__global__ void dependent_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Cycles of one round trip of a fence and an atomic, each round waiting for the one before.
__global__ void fence_atomic_kernel(int* counter, int64_t* cycles, int rounds) {
  int seen = 0;
  int64_t begin = clock64();
  for (int i = 0; i < rounds; ++i) {
    __threadfence();
    seen = atomicAdd(counter, 1 + (seen >> 30));
  }
  *cycles = clock64() - begin + (seen == -1 ? 1 : 0);
}

// Cycles of one load that depends on the one before; the chain lies in memory far apart.
__global__ void chase_kernel(const int64_t* chain, int64_t* cycles, int rounds) {
  int64_t at = 0;
  int64_t begin = clock64();
  for (int i = 0; i < rounds; ++i) at = chain[at];
  *cycles = clock64() - begin + (at == -1 ? 1 : 0);
}

// Cycles and nanoseconds that pass on one SM meanwhile: its clock under whatever else runs.
__global__ void clock_kernel(int64_t* passed, int64_t nanoseconds) {
  uint64_t begin_ns, now_ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin_ns));
  int64_t begin = clock64();
  do {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now_ns));
  } while (static_cast<int64_t>(now_ns - begin_ns) < nanoseconds);
  passed[0] = clock64() - begin;
  passed[1] = static_cast<int64_t>(now_ns - begin_ns);
}

}  // namespace

// Each starts one kernel on the stream and returns CUDA's error code.
extern "C" int start_empty(void* stream) {
  empty_kernel<<<1, 32, 0, static_cast<cudaStream_t>(stream)>>>();
  return static_cast<int>(cudaGetLastError());
}

extern "C" int start_dependent(void* stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(32);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  return static_cast<int>(cudaLaunchKernelEx(&config, dependent_kernel));
}

extern "C" int start_fence_atomic(void* counter, void* cycles, int rounds, void* stream) {
  fence_atomic_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<int*>(counter), static_cast<int64_t*>(cycles), rounds);
  return static_cast<int>(cudaGetLastError());
}

extern "C" int start_chase(const void* chain, void* cycles, int rounds, void* stream) {
  chase_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const int64_t*>(chain), static_cast<int64_t*>(cycles), rounds);
  return static_cast<int>(cudaGetLastError());
}

extern "C" int start_clock(void* passed, int64_t nanoseconds, void* stream) {
  clock_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<int64_t*>(passed), nanoseconds);
  return static_cast<int>(cudaGetLastError());
}
