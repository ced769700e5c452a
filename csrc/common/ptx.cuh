// SPDX-License-Identifier: Apache-2.0
// Wrappers of the PTX instructions that the kernels use. They are the only inline assembly in
// device code, and the interpreter implements each as the PTX manual defines it (csrc/simt/ptx.h).
// Requires sm_80.
#pragma once

#if defined(SPECOPS_SIMT)

#include "simt/ptx.h"

#else

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/dtype.h"

namespace specops::ptx {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Asynchronous copies, global to shared

// Copies 16 bytes; both addresses must be aligned.
__device__ inline void cp_async_16(void* smem, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(smem)), "l"(global)
               : "memory");
}

// Copies 16 bytes if `valid`; otherwise writes zeros and reads nothing.
__device__ inline void cp_async_16(void* smem, const void* global, bool valid) {
  int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(smem)),
               "l"(global),
               "r"(bytes)
               : "memory");
}

// Ends a group of copies that the thread has started since the last call.
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the N newest groups of the thread's copies are in flight. Copies of other
// threads become visible only after a barrier.
template <int N>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Matrix fragments

// Loads 8x8 tiles of 16-bit elements. Lane i passes the address of row i % 8 of tile i / 8.
__device__ inline void ldmatrix_x4(uint32_t (&r)[4], const void* smem_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(smem_row))
               : "memory");
}

__device__ inline void ldmatrix_x2(uint32_t (&r)[2], const void* smem_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(smem_row))
               : "memory");
}

// Loads 8x8 tiles like ldmatrix_x4, but transposes each.
__device__ inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* smem_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(smem_row))
               : "memory");
}

__device__ inline void ldmatrix_x2_trans(uint32_t (&r)[2], const void* smem_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(smem_row))
               : "memory");
}

// Computes d += a * b: a is 16 x 16 row-major, b is 16 x 8 column-major, d is 16 x 8 in fp32.
template <typename T>
__device__ inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    static_assert(std::is_same_v<T, float16>);
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

// Computes d += a * b exactly for 8-bit integers: a is 16 x 32, b is 32 x 8, d is 16 x 8 in int32.
// a is signed; b is unsigned if kUnsigned, else signed.
template <bool kUnsigned>
__device__ inline void mma_m16n8k32_int8(int (&d)[4],
                                         const uint32_t (&a)[4],
                                         const uint32_t (&b)[2]) {
  if constexpr (kUnsigned) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

// Conversions and functions of values

// Returns the larger value; NaN if either is NaN.
__device__ inline float max_nan(float a, float b) {
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}

// Rounds two floats to T (to nearest even) and packs them, `lo` in the low half.
template <typename T>
__device__ inline uint32_t pack2(float lo, float hi) {
  uint32_t out;
  if constexpr (std::is_same_v<T, bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(hi), "f"(lo));
  } else {
    static_assert(std::is_same_v<T, float16>);
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(hi), "f"(lo));
  }
  return out;
}

template <typename T>
__device__ inline float2 unpack2(uint32_t word) {
  float2 out;
  if constexpr (std::is_same_v<T, bfloat16>) {
    out.x = __uint_as_float(word << 16);
    out.y = __uint_as_float(word & 0xffff0000u);
  } else {
    static_assert(std::is_same_v<T, float16>);
    asm("{.reg .f16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi;}"
        : "=f"(out.x), "=f"(out.y)
        : "r"(word));
  }
  return out;
}

// Returns the larger value of each pair of bf16 halves. If one is NaN, the result is the other. 0
// counts as larger than -0.
__device__ inline uint32_t max_bf16x2(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// Returns a * b + c for each pair of bf16 halves, rounded once. Subnormal numbers are not flushed.
__device__ inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t out;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

// Returns (a & mask) | (b & ~mask) in one instruction; nvcc would emit two if mask or b is a
// constant.
__device__ inline uint32_t merge_bits(uint32_t a, uint32_t b, uint32_t mask) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(out) : "r"(a), "r"(b), "r"(mask));
  return out;
}

// Approximate functions. On one device, equal arguments give equal bits; nothing else is
// guaranteed.
__device__ inline float exp2_approx(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

__device__ inline float log2_approx(float x) {
  float out;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

__device__ inline float rcp_approx(float x) {
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

// Memory accesses

// Reads 16 bytes that are used only once and that no thread of this grid writes.
__device__ inline uint4 load_streaming(const uint4* global) {
  uint4 out;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
               : "l"(global));
  return out;
}

// Writes 8 or 16 aligned bytes in one access; nvcc could split an ordinary store.
__device__ inline void store_vector(void* global, uint2 value) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(global), "r"(value.x), "r"(value.y)
               : "memory");
}

__device__ inline void store_vector(void* global, uint4 value) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(global),
               "r"(value.x),
               "r"(value.y),
               "r"(value.z),
               "r"(value.w)
               : "memory");
}

__device__ inline void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// Prefetches a range of bytes into L2; its address and length must be multiples of 16. Does nothing
// before sm_90.
__device__ inline void prefetch_l2(const void* global, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes));
#endif
}

// Atomics for counting arrivals of blocks. They publish everything that the thread sees in memory,
// including writes of other threads before a barrier, and acquire what earlier arrivals published.
// That is cheaper than a plain atomic with fences.

// Adds `value` and returns the previous value.
__device__ inline int32_t add_acq_rel(int32_t* global, int32_t value) {
  int32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(global), "r"(value)
               : "memory");
  return before;
}

// Adds one, wrapping to zero after `limit`, and returns the previous value.
__device__ inline uint32_t increment_acq_rel(uint32_t* global, uint32_t limit) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(global), "r"(limit)
               : "memory");
  return before;
}

// Overlap of consecutive kernels (common/launch.cuh). These functions do nothing before sm_90,
// where kernels never overlap.

// Waits until the previous kernels in the stream have ended and their writes are visible.
__device__ inline void wait_for_dependencies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets blocks of the next kernel use free resources once all blocks of this kernel have called
// this.
__device__ inline void release_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns `pointer` + count * bytes in one instruction; nvcc would emit four if it moved the sign
// extension of a factor out of a loop.
__device__ inline const unsigned char* advance(const unsigned char* pointer,
                                               uint32_t count,
                                               uint32_t bytes) {
  uint64_t out;
  asm("mad.wide.u32 %0, %1, %2, %3;"
      : "=l"(out)
      : "r"(count), "r"(bytes), "l"(reinterpret_cast<uint64_t>(pointer)));
  return reinterpret_cast<const unsigned char*>(out);
}

// Ends a thread. After a `return` that depends on a value in memory, nvcc uses fewer uniform
// registers, and more of others, than after this.
__device__ inline void end_thread() { asm volatile("exit;" ::: "memory"); }

// Hides the value of a register from the compiler, so that the compiler recomputes derived values
// instead of keeping them in registers.
__device__ inline void forget(uint32_t& word) { asm volatile("" : "+r"(word)); }

// Hides a pointer from the compiler, so that the compiler does not recompute it from its parts.
template <typename V>
__device__ inline void forget(V*& pointer) {
  asm volatile("" : "+l"(pointer));
}

// Clocks: nanoseconds since a time common to the device, in steps of up to a microsecond; and
// cycles of the SM.

__device__ inline int64_t global_timer() {
  int64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
  return ns;
}

__device__ inline int64_t clock() {
  int64_t cycles;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles)::"memory");
  return cycles;
}

// Named barriers 1 to 15. `threads` must be a multiple of the warp size.

__device__ inline void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ inline void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace specops::ptx

#endif
