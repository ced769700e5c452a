// SPDX-License-Identifier: Apache-2.0
// The read bandwidth of the GPU figures: how fast the GPU reads its memory at the moment. Compiled
// at first use into bench/work/ and called through ctypes; not part of the package.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kThreads = 512;
constexpr int kLoads = 8;  // independent 16-byte loads in flight per thread

__device__ uint4 load(const uint4* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

// Reads one piece of kThreads * kLoads vectors per block. The sink is practically never written; it
// keeps the compiler from removing the loads.
__global__ void __launch_bounds__(kThreads) read_kernel(const uint4* data, unsigned* sink) {
  const uint4* piece = data + int64_t{blockIdx.x} * kThreads * kLoads + threadIdx.x;
  uint4 values[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) values[i] = load(piece + i * kThreads);
  unsigned mix = 0;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) mix ^= values[i].x + values[i].y * values[i].z - values[i].w;
  if (mix == 0x5bd1e995u) *sink = mix;
}

}  // namespace

// Returns the number of bytes that one block reads; read_memory() requires a multiple of it.
extern "C" int64_t read_unit_bytes() { return int64_t{kThreads} * kLoads * sizeof(uint4); }

// Starts one read of `bytes` on the stream; returns CUDA's error code.
extern "C" int read_memory(const void* data, int64_t bytes, void* sink, void* stream) {
  auto blocks = static_cast<unsigned>(bytes / read_unit_bytes());
  read_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const uint4*>(data), static_cast<unsigned*>(sink));
  return static_cast<int>(cudaGetLastError());
}
