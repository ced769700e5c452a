// SPDX-License-Identifier: Apache-2.0
// Small kernels for tests/test_simt.py: instructions that the interpreter must compute, and bugs
// that it must find.
#include <stdexcept>

#include "common/launch.cuh"
#include "simt_kernels/kernels.h"

namespace specops {
namespace {

struct e4m3 {
  uint8_t bits;
};

// Effects of one instruction on the registers of 32 lanes

template <typename T>
__global__ void mma_kernel(const uint4* a, const uint2* b, float4* d) {
  uint4 a4 = a[threadIdx.x];
  uint2 b2 = b[threadIdx.x];
  float4 d4 = d[threadIdx.x];
  uint32_t a_words[4] = {a4.x, a4.y, a4.z, a4.w};
  uint32_t b_words[2] = {b2.x, b2.y};
  float sums[4] = {d4.x, d4.y, d4.z, d4.w};
  if constexpr (sizeof(T) == 2) {
    ptx::mma_m16n8k16<T>(sums, a_words, b_words);
  } else {
    ptx::mma_m16n8k32_e4m3(sums, a_words, b_words);
  }
  d[threadIdx.x] = {sums[0], sums[1], sums[2], sums[3]};
}

template <bool kUnsigned>
__global__ void int_mma_kernel(const uint4* a, const uint2* b, float4* d) {
  uint4 a4 = a[threadIdx.x];
  uint2 b2 = b[threadIdx.x];
  auto* sums_at = reinterpret_cast<int4*>(d) + threadIdx.x;
  int4 d4 = *sums_at;
  int sums[4] = {d4.x, d4.y, d4.z, d4.w};
  ptx::mma_m16n8k32_int8<kUnsigned>(sums, {a4.x, a4.y, a4.z, a4.w}, {b2.x, b2.y});
  *sums_at = {sums[0], sums[1], sums[2], sums[3]};
}

// rows: 32 rows of 16 bytes; lane i passes the address of row i. out: 4 words per lane.
template <int kTiles, bool kTrans>
__global__ void ldmatrix_kernel(const uint4* rows, uint32_t* out) {
  auto* smem = reinterpret_cast<uint4*>(shared_memory());
  smem[threadIdx.x] = rows[threadIdx.x];
  __syncwarp(kFullMask);
  uint32_t words[kTiles];
  if constexpr (kTiles == 4 && kTrans) ptx::ldmatrix_x4_trans(words, smem + threadIdx.x);
  if constexpr (kTiles == 4 && !kTrans) ptx::ldmatrix_x4(words, smem + threadIdx.x);
  if constexpr (kTiles == 2 && kTrans) ptx::ldmatrix_x2_trans(words, smem + threadIdx.x % 16);
  if constexpr (kTiles == 2 && !kTrans) ptx::ldmatrix_x2(words, smem + threadIdx.x % 16);
  for (int i = 0; i < kTiles; ++i) out[threadIdx.x * kTiles + i] = words[i];
}

// Reads rows that are `stride` bytes apart.
__global__ void strided_ldmatrix_kernel(int stride, int* out) {
  unsigned char* smem = shared_memory();
  for (int i = 0; i < 16; ++i) smem[threadIdx.x * stride + i] = 0;
  __syncwarp(kFullMask);
  uint32_t words[4];
  ptx::ldmatrix_x4(words, smem + threadIdx.x * stride);
  out[threadIdx.x] = static_cast<int>(words[0]);
}

// in: [2][32]: values and lane arguments. One warp.
__global__ void shuffle_kernel(int kind, int width, const int* in, int* out) {
  int value = in[threadIdx.x];
  int lane = in[32 + threadIdx.x];
  int result = 0;
  if (kind == 0) result = __shfl_sync(kFullMask, value, lane, width);
  if (kind == 1) result = __shfl_xor_sync(kFullMask, value, lane, width);
  if (kind == 2) result = __shfl_up_sync(kFullMask, value, static_cast<unsigned>(lane), width);
  if (kind == 3) result = __shfl_down_sync(kFullMask, value, static_cast<unsigned>(lane), width);
  out[threadIdx.x] = result;
}

// in: [64], two warps; even and odd lanes use separate collectives. out: [8][64].
__global__ void votes_kernel(const int* in, unsigned* out) {
  int value = in[threadIdx.x];
  unsigned mask = threadIdx.x % 2 == 0 ? 0x55555555u : 0xaaaaaaaau;
  unsigned* column = out + threadIdx.x;
  column[0 * 64] = __ballot_sync(mask, value > 0);
  column[1 * 64] = static_cast<unsigned>(__any_sync(mask, value > 4));
  column[2 * 64] = static_cast<unsigned>(__all_sync(mask, value > -4));
  column[3 * 64] = static_cast<unsigned>(__reduce_add_sync(mask, value));
  column[4 * 64] = static_cast<unsigned>(__reduce_min_sync(mask, value));
  column[5 * 64] = __match_any_sync(mask, value);
  column[6 * 64] = static_cast<unsigned>(__syncthreads_count(value > 0));
  column[7 * 64] =
      static_cast<unsigned>(__syncthreads_or(value > 4) + 2 * __syncthreads_and(value > -4));
}

// out: [6]; out[5] starts at 0, the others as the test sets them.
__global__ void atomics_kernel(int* out) {
  int number = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  atomicAdd(out, number);
  atomicMax(out + 1, number);
  atomicMin(out + 2, -number);
  atomicOr(out + 3, 1 << number % 31);
  atomicCAS(out + 4, -1, 7);
  atomicInc(reinterpret_cast<unsigned*>(out) + 5, 9);
}

// Records the order in which blocks and threads reach a counter. The schedule decides it.
__global__ void order_kernel(int* out) {
  int number = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  out[1 + atomicAdd(out, 1)] = number;
  __syncthreads();
  out[1 + atomicAdd(out, 1)] = number;
}

__global__ void approximate_kernel(int kind, const float* in, float* out, int count) {
  int i = static_cast<int>(threadIdx.x);
  if (i >= count) return;
  if (kind == 0) out[i] = ptx::exp2_approx(in[i]);
  if (kind == 1) out[i] = ptx::log2_approx(in[i]);
  if (kind == 2) out[i] = ptx::rcp_approx(in[i]);
}

// Planted bugs with 64 threads each. kFixed selects the variant without the bug. out: [64].

template <bool kFixed>
__global__ void missing_barrier_kernel(int* out) {
  auto* smem = reinterpret_cast<int*>(shared_memory());
  smem[threadIdx.x] = static_cast<int>(threadIdx.x);
  if (kFixed) __syncthreads();
  out[threadIdx.x] = smem[63 - threadIdx.x];
}

// Uses one buffer in two rounds: the second round overwrites data that slow threads still read.
template <bool kFixed>
__global__ void missing_second_barrier_kernel(int* out) {
  auto* smem = reinterpret_cast<int*>(shared_memory());
  int sum = 0;
  for (int round = 0; round < 2; ++round) {
    smem[threadIdx.x] = static_cast<int>(threadIdx.x) + 100 * round;
    __syncthreads();
    sum += smem[63 - threadIdx.x];
    if (kFixed) __syncthreads();
  }
  out[threadIdx.x] = sum;
}

template <bool kFixed>
__global__ void missing_syncwarp_kernel(int* out) {
  auto* smem = reinterpret_cast<int*>(shared_memory());
  smem[threadIdx.x] = static_cast<int>(threadIdx.x);
  if (kFixed) __syncwarp(kFullMask);
  out[threadIdx.x] = smem[threadIdx.x ^ 1];
}

template <bool kFixed>
__global__ void missing_wait_kernel(int* out) {
  auto* smem = reinterpret_cast<int4*>(shared_memory());
  int* global = out + 64;
  ptx::cp_async_16(smem + threadIdx.x, global + 4 * threadIdx.x);
  ptx::cp_async_commit();
  if (kFixed) ptx::cp_async_wait<0>();
  out[threadIdx.x] = smem[threadIdx.x].x;
}

template <bool kFixed>
__global__ void missing_commit_kernel(int* out) {
  auto* smem = reinterpret_cast<int4*>(shared_memory());
  int* global = out + 64;
  ptx::cp_async_16(smem + threadIdx.x, global + 4 * threadIdx.x);
  if (kFixed) ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  out[threadIdx.x] = smem[threadIdx.x].x;
}

// Has two stages in flight, and reads the first after a wait that allows both to be in flight.
template <bool kFixed>
__global__ void wrong_wait_count_kernel(int* out) {
  auto* smem = reinterpret_cast<int4*>(shared_memory());
  int* global = out + 64;
  ptx::cp_async_16(smem + threadIdx.x, global + 4 * threadIdx.x);
  ptx::cp_async_commit();
  ptx::cp_async_16(smem + 64 + threadIdx.x, global + 4 * threadIdx.x);
  ptx::cp_async_commit();
  ptx::cp_async_wait<kFixed ? 1 : 2>();
  out[threadIdx.x] = smem[threadIdx.x].x;
  ptx::cp_async_wait<0>();
}

// Waits for its own copies, but reads a copy of another thread, which is visible only after a
// barrier.
template <bool kFixed>
__global__ void wait_without_barrier_kernel(int* out) {
  auto* smem = reinterpret_cast<int4*>(shared_memory());
  int* global = out + 64;
  ptx::cp_async_16(smem + threadIdx.x, global + 4 * threadIdx.x);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  if (kFixed) __syncthreads();
  out[threadIdx.x] = smem[63 - threadIdx.x].x;
}

template <bool kFixed>
__global__ void uninitialised_kernel(int* out) {
  auto* smem = reinterpret_cast<int*>(shared_memory());
  if (kFixed || threadIdx.x != 40) smem[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = smem[threadIdx.x];
}

template <bool kFixed>
__global__ void out_of_bounds_kernel(int* out) {
  auto* smem = reinterpret_cast<int*>(shared_memory());  // 64 + 256 ints
  smem[threadIdx.x + (kFixed ? 256 : 257)] = 1;
  __syncthreads();
  out[threadIdx.x] = 1;
}

// Accesses one byte past the shared memory, whose size is not a multiple of the arena's alignment.
template <bool kFixed>
__global__ void small_overrun_kernel(int* out) {
  if (threadIdx.x == 0) shared_memory()[kFixed ? 1299 : 1300] = 1;
  out[threadIdx.x] = 1;
}

// Reads past the end of the tensor; the value is not used.
template <bool kFixed>
__global__ void global_out_of_bounds_kernel(int* out) {
  out[threadIdx.x] = out[64 + 8 * threadIdx.x + (kFixed ? 7 : 8)] == 12345;
}

template <bool kFixed>
__global__ void missing_lane_kernel(int* out) {
  int value = static_cast<int>(threadIdx.x);
  unsigned mask = kFixed ? 0x0000ffffu : kFullMask;
  if (threadIdx.x % 32 < 16) value = __shfl_xor_sync(mask, value, 1);
  out[threadIdx.x] = value;
}

template <bool kFixed>
__global__ void outside_lane_kernel(int* out) {
  int value = static_cast<int>(threadIdx.x);
  out[threadIdx.x] = __shfl_xor_sync(kFixed ? kFullMask : 0x7fffffffu, value, 1);
}

template <bool kFixed>
__global__ void shuffle_from_outside_kernel(int* out) {
  int value = static_cast<int>(threadIdx.x);
  if (threadIdx.x % 32 < 16) value = __shfl_xor_sync(0x0000ffffu, value, kFixed ? 8 : 16);
  out[threadIdx.x] = value;
}

template <bool kFixed>
__global__ void exited_lane_kernel(int* out) {
  if (!kFixed && threadIdx.x == 63) return;
  out[threadIdx.x] = __shfl_xor_sync(kFullMask, static_cast<int>(threadIdx.x), 1);
}

template <bool kFixed>
__global__ void different_collectives_kernel(int* out) {
  int value = static_cast<int>(threadIdx.x);
  if (kFixed || threadIdx.x % 2 == 0) {
    value = __shfl_xor_sync(kFullMask, value, 2);
  } else {
    value = __shfl_up_sync(kFullMask, value, 2);
  }
  out[threadIdx.x] = value;
}

template <bool kFixed>
__global__ void divergent_barrier_kernel(int* out) {
  if (kFixed || threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1;
}

template <bool kFixed>
__global__ void early_return_kernel(int* out) {
  if (!kFixed && threadIdx.x == 5) return;
  __syncthreads();
  out[threadIdx.x] = 1;
}

template <bool kFixed>
__global__ void misaligned_copy_kernel(int* out) {
  auto* smem = shared_memory() + 16 * threadIdx.x + (kFixed ? 0 : 8);
  ptx::cp_async_16(smem, out + 64 + 4 * threadIdx.x);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  out[threadIdx.x] = 1;
}

template <bool kFixed>
__global__ void misaligned_ldmatrix_kernel(int* out) {
  auto* smem = shared_memory();
  for (int i = 0; i < 10; ++i) smem[threadIdx.x * 10 + i] = 0;
  __syncthreads();
  uint32_t words[2];
  ptx::ldmatrix_x2(words, smem + threadIdx.x % 16 * (kFixed ? 16 : 20));
  out[threadIdx.x] = static_cast<int>(words[0]);
}

template <bool kFixed>
__global__ void misaligned_vector_kernel(int* out) {
  const auto* from = reinterpret_cast<const int4*>(out + 64 + (kFixed ? 4 : 1) * threadIdx.x);
  out[threadIdx.x] = from->x;
}

// The producer arrives at barrier 1, but the consumer waits at barrier 2.
template <bool kFixed>
__global__ void named_deadlock_kernel(int* out) {
  auto* smem = reinterpret_cast<int*>(shared_memory());
  if (threadIdx.x < 32) {
    smem[threadIdx.x] = static_cast<int>(threadIdx.x);
    ptx::barrier_arrive(1, 64);
  } else {
    ptx::barrier_sync(kFixed ? 1 : 2, 64);
    out[threadIdx.x - 32] = smem[threadIdx.x - 32];
  }
}

template <bool kFixed>
__global__ void named_count_kernel(int* out) {
  ptx::barrier_sync(3, kFixed || threadIdx.x < 32 ? 64 : 32);
  out[threadIdx.x] = 1;
}

template <bool kFixed>
__global__ void null_pointer_kernel(int* out) {
  const int* from = kFixed ? out + 64 : nullptr;
  out[threadIdx.x] = *from;
}

template <bool kFixed>
__global__ void register_array_kernel(int* out) {
  int values[4] = {0, 1, 2, 3};
  int last = out[64] + (kFixed ? 3 : 4);  // out[64] is 0
  for (int i = 0; i <= last; ++i) values[i] += static_cast<int>(threadIdx.x);
  out[threadIdx.x] = values[threadIdx.x % 4];
}

// Lets two blocks write one element in no defined order.
template <bool kFixed>
__global__ void blocks_write_kernel(int* out) {
  out[kFixed ? threadIdx.x + 64 * blockIdx.x : threadIdx.x] = static_cast<int>(blockIdx.x);
}

// The last block to arrive folds what the others wrote.
template <bool kFixed>
__global__ void last_block_kernel(int* out) {
  int* parts = out + 64;
  int* counter = out + 64 + 64 * 2;
  parts[64 * blockIdx.x + threadIdx.x] = static_cast<int>(threadIdx.x);
  if (kFixed) __threadfence();
  __syncthreads();
  auto* smem = reinterpret_cast<int*>(shared_memory());
  if (threadIdx.x == 0) *smem = atomicAdd(counter, 1);
  __syncthreads();
  if (*smem != 1) return;
  __threadfence();
  out[threadIdx.x] = parts[threadIdx.x] + parts[64 + threadIdx.x];
}

// Costs of operations

__global__ void cost_kernel(int what, int repeats, int* out) {
  int value = static_cast<int>(threadIdx.x);
  float d[4] = {};
  uint32_t a[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
  uint32_t b[2] = {0x3f803f80, 0x3f803f80};
  for (int i = 0; i < repeats; ++i) {
    if (what == 0) __syncthreads();
    if (what == 1) value = __shfl_xor_sync(kFullMask, value, 1);
    if (what == 2) ptx::mma_m16n8k16<bfloat16>(d, a, b);
  }
  out[threadIdx.x] = value + static_cast<int>(d[0]);
}

struct Planted {
  const char* name;
  void (*buggy)(int*);
  void (*fixed)(int*);
};

#define PLANTED(name) {#name, name##_kernel<false>, name##_kernel<true>}
constexpr Planted kPlanted[] = {
    PLANTED(missing_barrier),      PLANTED(missing_second_barrier),
    PLANTED(missing_syncwarp),     PLANTED(missing_wait),
    PLANTED(missing_commit),       PLANTED(wrong_wait_count),
    PLANTED(wait_without_barrier), PLANTED(uninitialised),
    PLANTED(out_of_bounds),        PLANTED(small_overrun),
    PLANTED(global_out_of_bounds), PLANTED(missing_lane),
    PLANTED(outside_lane),         PLANTED(shuffle_from_outside),
    PLANTED(exited_lane),          PLANTED(different_collectives),
    PLANTED(divergent_barrier),    PLANTED(early_return),
    PLANTED(misaligned_copy),      PLANTED(misaligned_ldmatrix),
    PLANTED(misaligned_vector),    PLANTED(named_deadlock),
    PLANTED(named_count),          PLANTED(null_pointer),
    PLANTED(register_array),       PLANTED(blocks_write),
    PLANTED(last_block),
};
#undef PLANTED

int index_of(const std::string& name, std::initializer_list<const char*> names) {
  int index = 0;
  for (const char* one : names) {
    if (name == one) return index;
    ++index;
  }
  throw std::invalid_argument("no such kernel: " + name);
}

}  // namespace

void run_mma(const std::string& type, const void* a, const void* b, float* d) {
  auto run = [&](auto kernel) {
    launch(kernel,
           1,
           32,
           0,
           {},
           static_cast<const uint4*>(a),
           static_cast<const uint2*>(b),
           reinterpret_cast<float4*>(d));
  };
  int index = index_of(type, {"bfloat16", "float16", "e4m3", "int8", "uint8"});
  if (index == 0) return run(mma_kernel<bfloat16>);
  if (index == 1) return run(mma_kernel<float16>);
  if (index == 3) return run(int_mma_kernel<false>);
  if (index == 4) return run(int_mma_kernel<true>);
  run(mma_kernel<e4m3>);
}

void run_ldmatrix(int tiles, bool trans, const void* rows, void* out) {
  auto run = [&](auto kernel) {
    launch(kernel, 1, 32, 512, {}, static_cast<const uint4*>(rows), static_cast<uint32_t*>(out));
  };
  if (tiles == 4) return trans ? run(ldmatrix_kernel<4, true>) : run(ldmatrix_kernel<4, false>);
  trans ? run(ldmatrix_kernel<2, true>) : run(ldmatrix_kernel<2, false>);
}

void run_strided_ldmatrix(int stride, int* out) {
  launch(strided_ldmatrix_kernel, 1, 32, static_cast<size_t>(32 * stride), {}, stride, out);
}

void run_shuffle(const std::string& kind, int width, const int* in, int* out) {
  launch(
      shuffle_kernel, 1, 32, 0, {}, index_of(kind, {"index", "xor", "up", "down"}), width, in, out);
}

void run_votes(const int* in, unsigned* out) { launch(votes_kernel, 1, 64, 0, {}, in, out); }

void run_atomics(int* out, int blocks) { launch(atomics_kernel, blocks, 32, 0, {}, out); }

void run_order(int* out, int blocks) { launch(order_kernel, blocks, 64, 0, {}, out); }

void run_approximate(const std::string& kind, const float* in, float* out, int count) {
  launch(
      approximate_kernel, 1, 1024, 0, {}, index_of(kind, {"exp2", "log2", "rcp"}), in, out, count);
}

void run_planted(const std::string& name, bool fixed, int* out) {
  for (const Planted& planted : kPlanted) {
    if (name != planted.name) continue;
    bool two_blocks = name == "blocks_write" || name == "last_block";
    size_t smem = name == "out_of_bounds" ? 1280 : name == "small_overrun" ? 1300 : 2048;
    return launch(fixed ? planted.fixed : planted.buggy, two_blocks ? 2 : 1, 64, smem, {}, out);
  }
  throw std::invalid_argument("no such kernel: " + name);
}

void run_cost(const std::string& what, int threads, int repeats, int* out) {
  launch(cost_kernel,
         1,
         threads,
         0,
         {},
         index_of(what, {"barrier", "shuffle", "mma", "nothing"}),
         repeats,
         out);
}

}  // namespace specops
