// SPDX-License-Identifier: Apache-2.0
// Probes of a GPU: the costs that no kernel can avoid (the gap between two kernels, an atomic after
// a fence, a read that misses all caches), the rates of caches and tensor cores, and whether wgmma
// and mma.sync round alike. Compiled at first use into bench/work/ and called through ctypes; not
// part of the package. Each probe writes a value that only the timed work produces; without the
// right value, bench_gpu_facts.py reports no figure.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

__global__ void empty_kernel() {}

// Lets the next kernel start at once, then waits for the previous kernel, and does nothing else.
__global__ void dependent_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Ways in which a block can announce its arrival. Kernels use kAcqRelAtomic.
enum Arrival { kFenceAtomic, kAcqRelFence, kAcqRelAtomic, kAtomicAlone };

// Measures the cycles of `rounds` arrivals, each of which waits for the previous one.
template <Arrival kArrival>
__global__ void arrival_kernel(int* counter, int64_t* cycles, int rounds) {
  int seen = 0;
  int64_t begin = clock64();
  for (int i = 0; i < rounds; ++i) {
    int one = 1 + (seen >> 30);
    if constexpr (kArrival == kAcqRelAtomic) {
      asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
                   : "=r"(seen)
                   : "l"(counter), "r"(one)
                   : "memory");
    } else {
      if constexpr (kArrival == kFenceAtomic) __threadfence();  // MEMBAR.SC
      if constexpr (kArrival == kAcqRelFence) asm volatile("fence.acq_rel.gpu;" ::: "memory");
      seen = atomicAdd(counter, one);
    }
  }
  *cycles = clock64() - begin + (seen == -1 ? 1 : 0);
}

// Times loads, each of which depends on the previous one. passed: the cycles, and the last loaded
// index. The elements of the chain are far apart in memory.
__global__ void chase_kernel(const int64_t* chain, int64_t* passed, int rounds) {
  int64_t at = 0;
  int64_t begin = clock64();
  for (int i = 0; i < rounds; ++i) at = chain[at];
  passed[0] = clock64() - begin + (at == -1 ? 1 : 0);
  passed[1] = at;
}

// Counts the cycles of one SM during `nanoseconds`, while other kernels run; this gives the clock
// frequency under their load.
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

// Reads `vectors` vectors of 16 bytes in every round. In each round, a block reads the part that
// another block read before, so that no SM finds it in its L1 cache. The number of vectors per
// thread is a multiple of 8. sums: per thread, the sum of all words that it has read.
__global__ void __launch_bounds__(256)
    read_cached_kernel(const uint4* data, int64_t vectors, int rounds, uint32_t* sums) {
  constexpr int kAhead = 8;  // loads in flight per thread
  uint32_t sum = 0;
  int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int round = 0; round < rounds; ++round) {
    int64_t first = int64_t{(blockIdx.x + round) % gridDim.x} * blockDim.x + threadIdx.x;
    for (int64_t at = first; at + (kAhead - 1) * stride < vectors; at += kAhead * stride) {
      uint4 got[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) got[i] = __ldcg(data + at + i * stride);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) sum += got[i].x + got[i].y + got[i].z + got[i].w;
    }
  }
  sums[int64_t{blockIdx.x} * blockDim.x + threadIdx.x] = sum;
}

__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint2 b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
}

__device__ __forceinline__ uint32_t hashed(uint64_t x) {
  x = (x + 0x9e3779b97f4a7c15ull) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return static_cast<uint32_t>(x >> 32);
}

// Returns a random bf16, the upper half of a float. A quarter of the numbers are zero. Exponents
// are near each other or, in half of the tiles, up to 2^40 apart. Sums of products stay finite.
// exact: the number is -1, 0 or 1.
__device__ __forceinline__ uint32_t random_bf16(uint64_t tile, uint32_t number, bool exact) {
  uint32_t bits = hashed(tile * 8192 + number);
  if (exact) return bits & 1u ? (bits & 4u) << 13 | 127u << 7 : 0u;
  if ((bits & 3u) == 0) return (bits & 4u) << 13;  // of either sign
  uint32_t spread = hashed(tile) & 1u ? 41u : 6u;
  uint32_t exponent = 127u - spread / 2 + (bits >> 16) % spread;
  return (bits & 0x4u) << 13 | exponent << 7 | ((bits >> 3) & 0x7fu);
}

// Issues mma.sync of bf16 at the peak rate: eight independent chains per warp, 4,096 flops per
// instruction. The operands are small integers, so that the sums of all chains, which each thread
// writes, are exact.
__global__ void __launch_bounds__(256) mma_peak_kernel(float* sums, int rounds) {
  constexpr int kChains = 8;
  float d[kChains][4] = {};
  auto pair = [](uint32_t number) {
    return random_bf16(threadIdx.x, number, true) | random_bf16(threadIdx.x, number + 1, true)
                                                        << 16;
  };
  uint32_t a[4] = {pair(0), pair(2), pair(4), pair(6)};
  uint2 b = {pair(8), pair(10)};
  for (int i = 0; i < rounds; ++i) {
#pragma unroll
    for (int chain = 0; chain < kChains; ++chain) mma_bf16(d[chain], a, b);
  }
  float sum = 0.0f;
#pragma unroll
  for (int chain = 0; chain < kChains; ++chain) sum += d[chain][0] + d[chain][3];
  sums[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// Operands of wgmma_kernel. Sums of small integers (kExact) are exact, so a difference is a mistake
// of the probe. kUnlike adds 1 to the initial sums of wgmma; if no tile differs then, the
// comparison does not work.
enum Numbers { kRandom, kExact, kUnlike };

// Runs wgmma.m64nNk16 (N is 8 or 64) and mma.sync.m16n8k16 on the same numbers. Counts the tiles of
// 16 x 8 that were computed, those in which a bit differs, and those that a product has changed. A
// block is one warpgroup. A is in registers, in the same layout for both; B is in shared memory, in
// cores of 8 x 16 bytes without swizzling.
template <int kN>
__global__ void __launch_bounds__(128)
    wgmma_kernel(unsigned long long* counts, int tiles, Numbers numbers) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kBlocks = kN / 8;
  __shared__ alignas(128) uint32_t shared_b[kN * 8];  // [2 of 8 inputs][kN][8 inputs]
  int lane = threadIdx.x % 32;
  bool exact = numbers != kRandom;
  unsigned differing = 0, changed = 0;
  for (int i = 0; i < tiles; ++i) {
    uint64_t tile = uint64_t{blockIdx.x} * tiles + i;
    auto pair = [&](uint32_t number) {
      return random_bf16(tile, number, exact) | random_bf16(tile, number + 1, exact) << 16;
    };
    __syncthreads();
    for (int word = threadIdx.x; word < kN * 8; word += blockDim.x) shared_b[word] = pair(2 * word);
    uint32_t a[4];
    for (int j = 0; j < 4; ++j) a[j] = pair(2048 + 2 * (threadIdx.x * 4 + j));
    float before[kBlocks][4], by_warp[kBlocks][4], by_group[kBlocks][4];
    for (int n = 0; n < kBlocks; ++n) {
      for (int j = 0; j < 4; ++j) {
        uint32_t bits = random_bf16(tile, 4096 + threadIdx.x * 32 + n * 4 + j, exact) << 16;
        if (bits != 0 && !exact) bits |= hashed(bits + j) & 0xffffu;
        before[n][j] = by_warp[n][j] = __uint_as_float(bits);
        by_group[n][j] = before[n][j] + (numbers == kUnlike ? 1.0f : 0.0f);
      }
    }
    __syncthreads();
    for (int n = 0; n < kBlocks; ++n) {
      const uint32_t* core = shared_b + (n * 8 + lane / 4) * 4 + lane % 4;
      mma_bf16(by_warp[n], a, {core[0], core[kN * 4]});
    }
    // The descriptor counts in units of 16 bytes: the distance between cores along the inputs, and
    // along the outputs.
    uint64_t address = static_cast<uint64_t>(__cvta_generic_to_shared(shared_b)) >> 4;
    uint64_t descriptor = (address & 0x3fff) | uint64_t{kN} << 16 | uint64_t{8} << 32;
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncthreads();
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    if constexpr (kN == 8) {
      float (&d)[4] = by_group[0];
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, "
          "{%4, %5, %6, %7}, %8, 1, 1, 1, 0;"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor));
    } else {
      static_assert(kN == 64);
#define SPECOPS_FOUR(n) \
  "+f"(by_group[n][0]), "+f"(by_group[n][1]), "+f"(by_group[n][2]), "+f"(by_group[n][3])
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, "
          "%8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
          "%26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
          : SPECOPS_FOUR(0),
            SPECOPS_FOUR(1),
            SPECOPS_FOUR(2),
            SPECOPS_FOUR(3),
            SPECOPS_FOUR(4),
            SPECOPS_FOUR(5),
            SPECOPS_FOUR(6),
            SPECOPS_FOUR(7)
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor));
#undef SPECOPS_FOUR
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int n = 0; n < kBlocks; ++n) {
      bool differs = false, changes = false;
      for (int j = 0; j < 4; ++j) {
        differs |= __float_as_uint(by_warp[n][j]) != __float_as_uint(by_group[n][j]);
        changes |= by_warp[n][j] != before[n][j];
      }
      differing += __any_sync(0xffffffffu, differs) ? 1 : 0;
      changed += __any_sync(0xffffffffu, changes) ? 1 : 0;
    }
  }
  if (lane == 0) {
    atomicAdd(counts, static_cast<unsigned long long>(tiles) * kBlocks);
    atomicAdd(counts + 1, static_cast<unsigned long long>(differing));
    atomicAdd(counts + 2, static_cast<unsigned long long>(changed));
  }
#endif
}

}  // namespace

// Each of the following functions starts one kernel on the stream and returns CUDA's error code.
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

// which: a value of Arrival.
extern "C" int start_arrival(void* counter, void* cycles, int rounds, int which, void* stream) {
  auto* kernel = which == kFenceAtomic    ? arrival_kernel<kFenceAtomic>
                 : which == kAcqRelFence  ? arrival_kernel<kAcqRelFence>
                 : which == kAcqRelAtomic ? arrival_kernel<kAcqRelAtomic>
                                          : arrival_kernel<kAtomicAlone>;
  kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<int*>(counter), static_cast<int64_t*>(cycles), rounds);
  return static_cast<int>(cudaGetLastError());
}

extern "C" int start_read_cached(
    const void* data, int64_t num_bytes, int rounds, int blocks, void* sums, void* stream) {
  read_cached_kernel<<<blocks, 256, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const uint4*>(data), num_bytes / 16, rounds, static_cast<uint32_t*>(sums));
  return static_cast<int>(cudaGetLastError());
}

extern "C" int start_mma_peak(int rounds, int blocks, void* sums, void* stream) {
  mma_peak_kernel<<<blocks, 256, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<float*>(sums),
                                                                         rounds);
  return static_cast<int>(cudaGetLastError());
}

// counts: three int64: the tiles, those that differ, and those that a product changed; unchanged if
// the GPU has no wgmma. outputs: 8 or 64. numbers: a value of Numbers.
extern "C" int start_wgmma(
    void* counts, int outputs, int tiles, int numbers, int blocks, void* stream) {
  auto* kernel = outputs == 8 ? wgmma_kernel<8> : wgmma_kernel<64>;
  kernel<<<blocks, 128, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<unsigned long long*>(counts), tiles, static_cast<Numbers>(numbers));
  return static_cast<int>(cudaGetLastError());
}

extern "C" int start_chase(const void* chain, void* passed, int rounds, void* stream) {
  chase_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const int64_t*>(chain), static_cast<int64_t*>(passed), rounds);
  return static_cast<int>(cudaGetLastError());
}

extern "C" int start_clock(void* passed, int64_t nanoseconds, void* stream) {
  clock_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<int64_t*>(passed),
                                                               nanoseconds);
  return static_cast<int>(cudaGetLastError());
}
