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
  uint32_t bits = hashed(tile * 32768 + number);
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

// Type of the products' inputs.
enum Inputs { kBf16, kF16 };

// The 16 bits of a random input. Products of f16 stay far below its largest value.
template <Inputs kInputs>
__device__ __forceinline__ uint32_t random_input(uint64_t tile, uint32_t number, bool exact) {
  if constexpr (kInputs == kBf16) return random_bf16(tile, number, exact);
  uint32_t bits = hashed(tile * 32768 + number);
  if (exact) return bits & 1u ? (bits & 4u) << 13 | 15u << 10 : 0u;
  if ((bits & 3u) == 0) return (bits & 4u) << 13;
  uint32_t spread = hashed(tile) & 1u ? 21u : 6u;
  return (bits & 4u) << 13 | (15u - spread / 2 + (bits >> 16) % spread) << 10 |
         ((bits >> 3) & 0x3ffu);
}

// A sum to begin with, of a thread. No inline function, since the 128 sums of a thread are unrolled.
[[maybe_unused]] __device__ __noinline__ float random_sum(uint64_t tile,
                                                          uint32_t number,
                                                          bool exact) {
  uint32_t bits = random_bf16(tile, 8192 + threadIdx.x * 128 + number, exact) << 16;
  if (bits != 0 && !exact) bits |= hashed(bits + number) & 0xffffu;
  return __uint_as_float(bits);
}

template <Inputs kInputs>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint2 b) {
  if constexpr (kInputs == kBf16) {
    mma_bf16(d, a, b);
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
  }
}

// The sums of wgmma as operands of an asm statement, and their places in its text.
#define SPECOPS_SUMS1(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define SPECOPS_SUMS4(n) \
  SPECOPS_SUMS1(n), SPECOPS_SUMS1(n + 1), SPECOPS_SUMS1(n + 2), SPECOPS_SUMS1(n + 3)
#define SPECOPS_SUMS8(n) SPECOPS_SUMS4(n), SPECOPS_SUMS4(n + 4)
#define SPECOPS_SUMS16(n) SPECOPS_SUMS8(n), SPECOPS_SUMS8(n + 8)
#define SPECOPS_SUMS32(n) SPECOPS_SUMS16(n), SPECOPS_SUMS16(n + 16)
#define SPECOPS_PLACES8 "%0, %1, %2, %3"
#define SPECOPS_PLACES64                                                                  \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, " \
  "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SPECOPS_PLACES128                                                              \
  SPECOPS_PLACES64                                                                     \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SPECOPS_PLACES256                                                                 \
  SPECOPS_PLACES128                                                                       \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "    \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, " \
  "%97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "     \
  "%111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, "  \
  "%125, %126, %127"

// Adds the product to the sums `d`. A is in registers, or `a_place` describes it in shared memory.
#define SPECOPS_WGMMA(outputs, type, sums, a0, a1, a2, a3, b)                           \
  if constexpr (kSharedA) {                                                             \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #outputs "k16.f32." type "." type  \
                 " {" SPECOPS_PLACES##outputs "}, " a0 ", " a1 ", 1, 1, 1, 0, 0;"       \
                 : sums                                                                 \
                 : "l"(a_place), "l"(b_place));                                         \
  } else {                                                                              \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #outputs "k16.f32." type "." type  \
                 " {" SPECOPS_PLACES##outputs "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b \
                                              ", 1, 1, 1, 0;"                           \
                 : sums                                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_place));           \
  }

template <int kN, Inputs kInputs, bool kSharedA>
__device__ __forceinline__ void wgmma(float (&d)[kN / 8][4],
                                      const uint32_t (&a)[4],
                                      uint64_t a_place,
                                      uint64_t b_place) {
  if constexpr (kN == 8 && kInputs == kBf16) {
    SPECOPS_WGMMA(8, "bf16", SPECOPS_SUMS1(0), "%4", "%5", "%6", "%7", "%8")
  } else if constexpr (kN == 8) {
    SPECOPS_WGMMA(8, "f16", SPECOPS_SUMS1(0), "%4", "%5", "%6", "%7", "%8")
  } else if constexpr (kN == 64 && kInputs == kBf16) {
    SPECOPS_WGMMA(64, "bf16", SPECOPS_SUMS8(0), "%32", "%33", "%34", "%35", "%36")
  } else if constexpr (kN == 64) {
    SPECOPS_WGMMA(64, "f16", SPECOPS_SUMS8(0), "%32", "%33", "%34", "%35", "%36")
  } else if constexpr (kN == 128 && kInputs == kBf16) {
    SPECOPS_WGMMA(128, "bf16", SPECOPS_SUMS16(0), "%64", "%65", "%66", "%67", "%68")
  } else if constexpr (kN == 128) {
    SPECOPS_WGMMA(128, "f16", SPECOPS_SUMS16(0), "%64", "%65", "%66", "%67", "%68")
  } else if constexpr (kInputs == kBf16) {
    SPECOPS_WGMMA(256, "bf16", SPECOPS_SUMS32(0), "%128", "%129", "%130", "%131", "%132")
  } else {
    SPECOPS_WGMMA(256, "f16", SPECOPS_SUMS32(0), "%128", "%129", "%130", "%131", "%132")
  }
}

// Compares wgmma.m64nNk16 with mma.sync.m16n8k16 on the same numbers. Counts the tiles of 16 x 8 that
// were computed, those in which a bit differs, and those that a product has changed. A block is one
// warpgroup. A is in registers, as in mma.sync, or in shared memory. B, and A if kSharedA, lie in
// shared memory by cores of 8 x 16 bytes, unswizzled.
template <int kN, Inputs kInputs, bool kSharedA>
__global__ void __launch_bounds__(128)
    wgmma_kernel(unsigned long long* counts, int tiles, Numbers numbers) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kBlocks = kN / 8, kRows = 64;
  __shared__ alignas(128) uint32_t shared_b[kN * 8];  // [2 of 8 inputs][kN][8 inputs]
  __shared__ alignas(128) uint32_t shared_a[kRows * 8];
  int lane = threadIdx.x % 32;
  bool exact = numbers != kRandom;
  unsigned differing = 0, changed = 0;
  for (int i = 0; i < tiles; ++i) {
    uint64_t tile = uint64_t{blockIdx.x} * tiles + i;
    auto pair = [&](uint32_t number) {
      return random_input<kInputs>(tile, number, exact) |
             random_input<kInputs>(tile, number + 1, exact) << 16;
    };
    auto begin_of = [&](int n, int j) { return random_sum(tile, n * 4 + j, exact); };
    __syncthreads();
    for (int word = threadIdx.x; word < kN * 8; word += blockDim.x) shared_b[word] = pair(2 * word);
    uint32_t a[4];
    for (int j = 0; j < 4; ++j) {
      a[j] = pair(4096 + 2 * (threadIdx.x * 4 + j));
      int row = threadIdx.x / 32 * 16 + j % 2 * 8 + lane / 4;
      shared_a[(j / 2 * kRows + row) * 4 + lane % 4] = a[j];
    }
    float by_group[kBlocks][4];
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        by_group[n][j] = begin_of(n, j) + (numbers == kUnlike ? 1.0f : 0.0f);
      }
    }
    // 16 bytes are a unit of a descriptor: from core to core along inputs, and along rows.
    auto place_of = [](const uint32_t* shared, int rows) {
      uint64_t address = static_cast<uint64_t>(__cvta_generic_to_shared(shared)) >> 4;
      return (address & 0x3fff) | static_cast<uint64_t>(rows) << 16 | uint64_t{8} << 32;
    };
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncthreads();
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    wgmma<kN, kInputs, kSharedA>(by_group, a, place_of(shared_a, kRows), place_of(shared_b, kN));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      float by_warp[4];
      for (int j = 0; j < 4; ++j) by_warp[j] = begin_of(n, j);
      const uint32_t* core = shared_b + (n * 8 + lane / 4) * 4 + lane % 4;
      mma<kInputs>(by_warp, a, {core[0], core[kN * 4]});
      bool differs = false, changes = false;
      for (int j = 0; j < 4; ++j) {
        differs |= __float_as_uint(by_warp[j]) != __float_as_uint(by_group[n][j]);
        changes |= by_warp[j] != begin_of(n, j);
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

// A stands in shared memory for 64 outputs alone: the other widths would multiply alike.
template <Inputs kInputs>
auto* wgmma_kernel_of(int outputs, bool shared_a) {
  if (shared_a) return wgmma_kernel<64, kInputs, true>;
  return outputs == 8     ? wgmma_kernel<8, kInputs, false>
         : outputs == 64  ? wgmma_kernel<64, kInputs, false>
         : outputs == 128 ? wgmma_kernel<128, kInputs, false>
                          : wgmma_kernel<256, kInputs, false>;
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

// counts: three int64, of tiles, of those that differ, of those that a product changed; they stay as
// they are where there is no wgmma. outputs: 8, 64, 128 or 256; 64 with shared_a. inputs: of Inputs.
// numbers: of Numbers.
extern "C" int start_wgmma(void* counts,
                           int outputs,
                           int inputs,
                           int shared_a,
                           int tiles,
                           int numbers,
                           int blocks,
                           void* stream) {
  auto* kernel = inputs == kBf16 ? wgmma_kernel_of<kBf16>(outputs, shared_a != 0)
                                 : wgmma_kernel_of<kF16>(outputs, shared_a != 0);
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
