// SPDX-License-Identifier: Apache-2.0
// Implementations of the functions of common/ptx.cuh, according to the PTX manual: fragment
// layouts, rules for waiting and roundings. The arithmetic is in mma.cpp.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "common/dtype.h"
#include "simt/builtins.h"
#include "simt/machine.h"

namespace specops::simt {

struct MmaOperands {
  float* d;
  const uint32_t* a;
  const uint32_t* b;
};

struct IntMmaOperands {
  int* d;
  const uint32_t* a;
  const uint32_t* b;
};

struct LdmatrixOperands {
  const void* row;
  uint32_t* out;
  const Site* site;
};

void complete_mma_bf16(void* const* operands, uint32_t mask);
void complete_mma_f16(void* const* operands, uint32_t mask);
void complete_mma_e4m3(void* const* operands, uint32_t mask);
template <bool kUnsigned>
void complete_mma_int8(void* const* operands, uint32_t mask);
template <int kTiles, bool kTrans>
void complete_ldmatrix(void* const* operands, uint32_t mask);

inline constexpr Collective kMmaBf16{"mma.m16n8k16.bf16", complete_mma_bf16};
inline constexpr Collective kMmaF16{"mma.m16n8k16.f16", complete_mma_f16};
inline constexpr Collective kMmaE4m3{"mma.m16n8k32.e4m3", complete_mma_e4m3};
template <bool kUnsigned>
inline constexpr Collective kMmaInt8{"mma.m16n8k32.s8", complete_mma_int8<kUnsigned>};
template <int kTiles, bool kTrans>
inline constexpr Collective kLdmatrix{"ldmatrix", complete_ldmatrix<kTiles, kTrans>};

constexpr uint32_t kAllLanes = 0xffffffffu;

template <int kTiles, bool kTrans>
void ldmatrix(uint32_t* out, const void* row, const Site& site) {
  LdmatrixOperands operands{row, out, &site};
  collective(kLdmatrix<kTiles, kTrans>, kAllLanes, &operands, site);
}

}  // namespace specops::simt

namespace specops::ptx {

using simt::Site;

// Asynchronous copies, global to shared

inline void cp_async_16(void* smem, const void* global, Site site = Site::current()) {
  simt::copy_async(smem, global, true, site);
}
inline void cp_async_16(void* smem, const void* global, bool valid, Site site = Site::current()) {
  simt::copy_async(smem, global, valid, site);
}

inline void cp_async_commit() { simt::commit_async(); }

template <int N>
void cp_async_wait() {
  simt::wait_async(N);
}

// Matrix fragments

inline void ldmatrix_x4(uint32_t (&r)[4], const void* smem_row, Site site = Site::current()) {
  simt::ldmatrix<4, false>(r, smem_row, site);
}
inline void ldmatrix_x2(uint32_t (&r)[2], const void* smem_row, Site site = Site::current()) {
  simt::ldmatrix<2, false>(r, smem_row, site);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* smem_row, Site site = Site::current()) {
  simt::ldmatrix<4, true>(r, smem_row, site);
}
inline void ldmatrix_x2_trans(uint32_t (&r)[2], const void* smem_row, Site site = Site::current()) {
  simt::ldmatrix<2, true>(r, smem_row, site);
}

template <typename T>
void mma_m16n8k16(float (&d)[4],
                  const uint32_t (&a)[4],
                  const uint32_t (&b)[2],
                  Site site = Site::current()) {
  static_assert(std::is_same_v<T, bfloat16> || std::is_same_v<T, float16>);
  simt::MmaOperands operands{d, a, b};
  if constexpr (std::is_same_v<T, bfloat16>) {
    simt::collective(simt::kMmaBf16, simt::kAllLanes, &operands, site);
  } else {
    simt::collective(simt::kMmaF16, simt::kAllLanes, &operands, site);
  }
}

inline void mma_m16n8k32_e4m3(float (&d)[4],
                              const uint32_t (&a)[4],
                              const uint32_t (&b)[2],
                              Site site = Site::current()) {
  simt::MmaOperands operands{d, a, b};
  simt::collective(simt::kMmaE4m3, simt::kAllLanes, &operands, site);
}

template <bool kUnsigned>
void mma_m16n8k32_int8(int (&d)[4],
                       const uint32_t (&a)[4],
                       const uint32_t (&b)[2],
                       Site site = Site::current()) {
  simt::IntMmaOperands operands{d, a, b};
  simt::collective(simt::kMmaInt8<kUnsigned>, simt::kAllLanes, &operands, site);
}

// Conversions and functions of values

inline float max_nan(float a, float b) {
  bool is_nan = std::isnan(a) || std::isnan(b);
  return is_nan ? std::numeric_limits<float>::quiet_NaN() : std::fmax(a, b);
}

template <typename T>
uint32_t pack2(float lo, float hi) {
  return uint32_t{from_float<T>(lo).bits} | uint32_t{from_float<T>(hi).bits} << 16;
}

template <typename T>
float2 unpack2(uint32_t word) {
  return {to_float(T{static_cast<uint16_t>(word)}), to_float(T{static_cast<uint16_t>(word >> 16)})};
}

inline uint32_t merge_bits(uint32_t a, uint32_t b, uint32_t mask) {
  return (a & mask) | (b & ~mask);
}

inline uint32_t max_bf16x2(uint32_t a, uint32_t b) {
  uint32_t out = 0;
  for (int half = 0; half < 2; ++half) {
    auto x = static_cast<uint16_t>(a >> 16 * half), y = static_cast<uint16_t>(b >> 16 * half);
    float left = to_float(bfloat16{x}), right = to_float(bfloat16{y});
    bool is_left = right != right || left > right || (left == right && (x >> 15) == 0);
    uint32_t larger = is_left ? x : y;
    if (left != left && right != right) larger = 0x7fff;  // the canonical NaN
    out |= larger << 16 * half;
  }
  return out;
}

inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  auto half_of = [](uint32_t word, int half) {
    return double{to_float(bfloat16{static_cast<uint16_t>(word >> 16 * half)})};
  };
  uint32_t out = 0;
  for (int half = 0; half < 2; ++half) {
    double exact = std::fma(half_of(a, half), half_of(b, half), half_of(c, half));
    float sum = static_cast<float>(exact);
    // Round to odd first, so that the second rounding knows on which side of a tie the exact value
    // was.
    if (double{sum} != exact) {
      if (std::fabs(double{sum}) > std::fabs(exact)) sum = std::nextafterf(sum, 0.0f);
      uint32_t bits;
      std::memcpy(&bits, &sum, 4);
      bits |= 1u;
      std::memcpy(&sum, &bits, 4);
    }
    out |= uint32_t{from_float<bfloat16>(sum).bits} << 16 * half;
  }
  return out;
}

// Applies .ftz: subnormal arguments and results become zeros with the same sign.
inline float flushed(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}

inline float exp2_approx(float x) { return flushed(simt::approximate(std::exp2(flushed(x)), x)); }
inline float log2_approx(float x) { return flushed(simt::approximate(std::log2(flushed(x)), x)); }
inline float rcp_approx(float x) { return flushed(simt::approximate(1.0f / flushed(x), x)); }

inline const unsigned char* advance(const unsigned char* pointer, uint32_t count, uint32_t bytes) {
  return pointer + uint64_t{count} * bytes;
}

inline void end_thread() { simt::exit_thread(); }

inline void forget(uint32_t& /*word*/) {}
template <typename V>
void forget(V*& /*pointer*/) {}

// Memory accesses

inline uint4 load_streaming(const uint4* global, Site site = Site::current()) {
  simt::check_aligned(global, sizeof(uint4), "load_streaming", site);
  return *global;
}

template <typename Vector>
void store_vector(void* global, Vector value, Site site = Site::current()) {
  simt::check_aligned(global, sizeof(Vector), "store_vector", site);
  *static_cast<Vector*>(global) = value;
}

inline void prefetch_l2(const void*) {}
inline void prefetch_l2(const void* global, uint32_t bytes, Site site = Site::current()) {
  simt::check_aligned(global, 16, "prefetch_l2", site);
  if (bytes == 0 || bytes % 16 != 0) {
    simt::fail("prefetch_l2 of " + std::to_string(bytes) + " bytes: a multiple of 16", site);
  }
}

// Does nothing, because kernels run one after another here. A check of the compiled code ensures
// that no kernel reads memory before it has waited (make gates).
inline void wait_for_dependencies() {}
inline void release_dependents() {}

// Clocks advance by one step whenever one of them is read, so every run of a launch has the same
// timing.

inline int64_t global_timer() { return simt::kTimerStepNs * simt::next_tick(); }
inline int64_t clock() { return simt::kClockStep * simt::next_tick(); }

// Named barriers

inline void barrier_sync(int id, int threads, Site site = Site::current()) {
  simt::named_barrier(id, threads, true, site);
}
inline void barrier_arrive(int id, int threads, Site site = Site::current()) {
  simt::named_barrier(id, threads, false, site);
}

// Adds `value` and returns the previous value, as an atomic between two fences.
inline int32_t add_acq_rel(int32_t* global, int32_t value, Site site = Site::current()) {
  simt::on_fence();
  return simt::exchange(global, site, [=](int32_t old) { return old + value; });
}

inline uint32_t increment_acq_rel(uint32_t* global, uint32_t limit, Site site = Site::current()) {
  simt::on_fence();
  return simt::exchange(global, site, [=](uint32_t old) { return old >= limit ? 0u : old + 1u; });
}

}  // namespace specops::ptx

namespace specops {

// Kernels find these in place of those of <cmath>. The functions of the CUDA math library are off by
// up to two units in the last place, and not in the same places as the host's.
inline float expf(float x) { return simt::approximate(::expf(x), x); }
inline float logf(float x) { return simt::approximate(::logf(x), x); }
inline float log1pf(float x) { return simt::approximate(::log1pf(x), x); }

}  // namespace specops
