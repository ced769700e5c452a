// SPDX-License-Identifier: Apache-2.0
// CUDA's built-in functions, under the same names: barriers, warp collectives, atomics and
// mathematics. Functions that synchronize with other threads take their call site as an argument,
// for error messages.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simt/machine.h"

// Barriers

inline void __syncthreads(specops::simt::Site site = specops::simt::Site::current()) {
  specops::simt::block_barrier(specops::simt::Vote::kNone, false, site);
}
inline int __syncthreads_or(int predicate,
                            specops::simt::Site site = specops::simt::Site::current()) {
  return specops::simt::block_barrier(specops::simt::Vote::kOr, predicate != 0, site);
}
inline int __syncthreads_and(int predicate,
                             specops::simt::Site site = specops::simt::Site::current()) {
  return specops::simt::block_barrier(specops::simt::Vote::kAnd, predicate != 0, site);
}
inline int __syncthreads_count(int predicate,
                               specops::simt::Site site = specops::simt::Site::current()) {
  return specops::simt::block_barrier(specops::simt::Vote::kCount, predicate != 0, site);
}

inline void __threadfence() { specops::simt::on_fence(); }
inline void __threadfence_block() {}

// Warp collectives

namespace specops::simt {

template <typename T>
concept Word = std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8);

enum class Shuffle { kIndex, kXor, kUp, kDown };

template <typename T>
struct ShuffleOperands {
  T value;
  int lane;  // index, mask or distance
  int width;
  T result;
  const Site* site;
};

template <Shuffle kKind, typename T>
void complete_shuffle(void* const* operands, uint32_t mask) {
  for (int lane = 0; lane < kLanes; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    auto& own = *static_cast<ShuffleOperands<T>*>(operands[lane]);
    int first = lane & ~(own.width - 1);
    int last = first + own.width - 1;
    int source = 0;
    if (kKind == Shuffle::kIndex) source = first + (own.lane & (own.width - 1));
    if (kKind == Shuffle::kXor) source = lane ^ own.lane;
    if (kKind == Shuffle::kUp) source = lane - own.lane;
    if (kKind == Shuffle::kDown) source = lane + own.lane;
    // A lane whose source is out of range reads itself. With xor, the source may be in an earlier
    // segment.
    if (source > last || (kKind != Shuffle::kXor && source < first) || source < 0) source = lane;
    if ((mask >> source & 1) == 0) {
      fail("lane " + std::to_string(lane) + " shuffles from lane " + std::to_string(source) +
               ", which is outside the mask",
           *own.site);
    }
    own.result = static_cast<ShuffleOperands<T>*>(operands[source])->value;
  }
}

template <Shuffle kKind, typename T>
inline constexpr Collective kShuffle{kKind == Shuffle::kIndex ? "__shfl_sync"
                                     : kKind == Shuffle::kXor ? "__shfl_xor_sync"
                                     : kKind == Shuffle::kUp  ? "__shfl_up_sync"
                                                              : "__shfl_down_sync",
                                     complete_shuffle<kKind, T>};

template <Shuffle kKind, typename T>
T shuffle(uint32_t mask, T value, int lane, int width, const Site& site) {
  if (width < 1 || width > kLanes || (width & (width - 1)) != 0) {
    fail("the width of a shuffle must be a power of two up to 32", site);
  }
  ShuffleOperands<T> operands{value, lane, width, value, &site};
  collective(kShuffle<kKind, T>, mask, &operands, site);
  return operands.result;
}

template <typename T, typename R>
struct ReduceOperands {
  T value;
  R result;
};

// Gives every lane the fold of the values of the lanes in the mask, from the lowest lane on.
template <typename T, T (*kFold)(T, T)>
void complete_fold(void* const* operands, uint32_t mask) {
  T result = static_cast<ReduceOperands<T, T>*>(operands[std::countr_zero(mask)])->value;
  for (uint32_t rest = mask & (mask - 1); rest != 0; rest &= rest - 1) {
    int lane = std::countr_zero(rest);
    result = kFold(result, static_cast<ReduceOperands<T, T>*>(operands[lane])->value);
  }
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    static_cast<ReduceOperands<T, T>*>(operands[std::countr_zero(rest)])->result = result;
  }
}

template <typename T>
T fold_add(T a, T b) {
  return static_cast<T>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}
template <typename T>
T fold_min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
T fold_max(T a, T b) {
  return a < b ? b : a;
}
template <typename T>
T fold_and(T a, T b) {
  return a & b;
}
template <typename T>
T fold_or(T a, T b) {
  return a | b;
}
template <typename T>
T fold_xor(T a, T b) {
  return a ^ b;
}

template <typename T, T (*kFold)(T, T)>
inline constexpr Collective kReduce{"__reduce_sync", complete_fold<T, kFold>};

template <typename T, T (*kFold)(T, T)>
T reduce(uint32_t mask, T value, const Site& site) {
  ReduceOperands<T, T> operands{value, value};
  collective(kReduce<T, kFold>, mask, &operands, site);
  return operands.result;
}

void complete_nothing(void* const* operands, uint32_t mask);
void complete_ballot(void* const* operands, uint32_t mask);
void complete_match(void* const* operands, uint32_t mask);
using BallotOperands = ReduceOperands<bool, uint32_t>;
using MatchOperands = ReduceOperands<uint64_t, uint32_t>;

inline constexpr Collective kSyncWarp{"__syncwarp", complete_nothing, true};
inline constexpr Collective kBallot{"__ballot_sync", complete_ballot};
inline constexpr Collective kAny{"__any_sync", complete_ballot};
inline constexpr Collective kAll{"__all_sync", complete_ballot};
inline constexpr Collective kMatchAny{"__match_any_sync", complete_match};

inline uint32_t ballot(const Collective& what, uint32_t mask, bool predicate, const Site& site) {
  BallotOperands operands{predicate, 0};
  collective(what, mask, &operands, site);
  return operands.result;
}

}  // namespace specops::simt

inline void __syncwarp(unsigned mask = 0xffffffffu,
                       specops::simt::Site site = specops::simt::Site::current()) {
  specops::simt::collective(specops::simt::kSyncWarp, mask, nullptr, site);
}

template <specops::simt::Word T>
T __shfl_sync(unsigned mask,
              T value,
              int lane,
              int width = 32,
              specops::simt::Site site = specops::simt::Site::current()) {
  return specops::simt::shuffle<specops::simt::Shuffle::kIndex>(mask, value, lane, width, site);
}
template <specops::simt::Word T>
T __shfl_xor_sync(unsigned mask,
                  T value,
                  int lane_mask,
                  int width = 32,
                  specops::simt::Site site = specops::simt::Site::current()) {
  return specops::simt::shuffle<specops::simt::Shuffle::kXor>(mask, value, lane_mask, width, site);
}
template <specops::simt::Word T>
T __shfl_up_sync(unsigned mask,
                 T value,
                 unsigned delta,
                 int width = 32,
                 specops::simt::Site site = specops::simt::Site::current()) {
  return specops::simt::shuffle<specops::simt::Shuffle::kUp>(
      mask, value, static_cast<int>(delta), width, site);
}
template <specops::simt::Word T>
T __shfl_down_sync(unsigned mask,
                   T value,
                   unsigned delta,
                   int width = 32,
                   specops::simt::Site site = specops::simt::Site::current()) {
  return specops::simt::shuffle<specops::simt::Shuffle::kDown>(
      mask, value, static_cast<int>(delta), width, site);
}

inline unsigned __ballot_sync(unsigned mask,
                              int predicate,
                              specops::simt::Site site = specops::simt::Site::current()) {
  return specops::simt::ballot(specops::simt::kBallot, mask, predicate != 0, site);
}
inline int __any_sync(unsigned mask,
                      int predicate,
                      specops::simt::Site site = specops::simt::Site::current()) {
  return specops::simt::ballot(specops::simt::kAny, mask, predicate != 0, site) != 0;
}
inline int __all_sync(unsigned mask,
                      int predicate,
                      specops::simt::Site site = specops::simt::Site::current()) {
  return specops::simt::ballot(specops::simt::kAll, mask, predicate != 0, site) == mask;
}

template <typename T>
  requires(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8))
unsigned __match_any_sync(unsigned mask,
                          T value,
                          specops::simt::Site site = specops::simt::Site::current()) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  specops::simt::MatchOperands operands{bits, 0};
  specops::simt::collective(specops::simt::kMatchAny, mask, &operands, site);
  return operands.result;
}

#define SPECOPS_SIMT_REDUCE(op, fold, type)                                                   \
  inline type __reduce_##op##_sync(                                                           \
      unsigned mask, type value, specops::simt::Site site = specops::simt::Site::current()) { \
    return specops::simt::reduce<type, specops::simt::fold<type>>(mask, value, site);         \
  }
SPECOPS_SIMT_REDUCE(add, fold_add, int)
SPECOPS_SIMT_REDUCE(add, fold_add, unsigned)
SPECOPS_SIMT_REDUCE(min, fold_min, int)
SPECOPS_SIMT_REDUCE(min, fold_min, unsigned)
SPECOPS_SIMT_REDUCE(max, fold_max, int)
SPECOPS_SIMT_REDUCE(max, fold_max, unsigned)
SPECOPS_SIMT_REDUCE(and, fold_and, unsigned)
SPECOPS_SIMT_REDUCE(or, fold_or, unsigned)
SPECOPS_SIMT_REDUCE(xor, fold_xor, unsigned)
#undef SPECOPS_SIMT_REDUCE

// Atomics. Threads run one at a time, so plain code is atomic. There are no atomics for floats,
// because their result would depend on the order.

namespace specops::simt {

template <typename T>
concept AtomicWord =
    std::is_same_v<T, int> || std::is_same_v<T, unsigned> || std::is_same_v<T, unsigned long long>;
template <typename T>
concept AtomicOrdered = AtomicWord<T> || std::is_same_v<T, long long>;

// Performs an atomic access hidden from sanitizers; the race detector is notified of an atomic
// access instead.
template <typename T, typename Change>
#if defined(SPECOPS_SIMT_RACE)
__attribute__((no_sanitize("thread"), noinline))
#endif
T exchange(T* address, const Site& site, Change change) {
  check_aligned(address, sizeof(T), "an atomic", site);
  on_atomic(address, sizeof(T), site);
  T before = *address;
  *address = change(before);
  return before;
}

}  // namespace specops::simt

// CUDA's atomics, which return the previous value. The type of `value` is converted to that of the
// address, as in CUDA's overloads.
template <specops::simt::AtomicWord T>
T atomicAdd(T* address,
            std::type_identity_t<T> value,
            specops::simt::Site site = specops::simt::Site::current()) {
  return specops::simt::exchange(address, site, [=](T old) {
    return static_cast<T>(static_cast<std::make_unsigned_t<T>>(old) +
                          static_cast<std::make_unsigned_t<T>>(value));
  });
}
template <specops::simt::AtomicWord T>
T atomicSub(T* address,
            std::type_identity_t<T> value,
            specops::simt::Site site = specops::simt::Site::current()) {
  return specops::simt::exchange(address, site, [=](T old) {
    return static_cast<T>(static_cast<std::make_unsigned_t<T>>(old) -
                          static_cast<std::make_unsigned_t<T>>(value));
  });
}
template <specops::simt::AtomicOrdered T>
T atomicMin(T* address,
            std::type_identity_t<T> value,
            specops::simt::Site site = specops::simt::Site::current()) {
  return specops::simt::exchange(address, site, [=](T old) { return value < old ? value : old; });
}
template <specops::simt::AtomicOrdered T>
T atomicMax(T* address,
            std::type_identity_t<T> value,
            specops::simt::Site site = specops::simt::Site::current()) {
  return specops::simt::exchange(address, site, [=](T old) { return old < value ? value : old; });
}
template <specops::simt::AtomicWord T>
T atomicAnd(T* address,
            std::type_identity_t<T> value,
            specops::simt::Site site = specops::simt::Site::current()) {
  return specops::simt::exchange(address, site, [=](T old) { return old & value; });
}
template <specops::simt::AtomicWord T>
T atomicOr(T* address,
           std::type_identity_t<T> value,
           specops::simt::Site site = specops::simt::Site::current()) {
  return specops::simt::exchange(address, site, [=](T old) { return old | value; });
}
template <specops::simt::AtomicWord T>
T atomicXor(T* address,
            std::type_identity_t<T> value,
            specops::simt::Site site = specops::simt::Site::current()) {
  return specops::simt::exchange(address, site, [=](T old) { return old ^ value; });
}
template <specops::simt::AtomicWord T>
T atomicExch(T* address,
             std::type_identity_t<T> value,
             specops::simt::Site site = specops::simt::Site::current()) {
  return specops::simt::exchange(address, site, [=](T) { return value; });
}
template <specops::simt::AtomicWord T>
T atomicCAS(T* address,
            std::type_identity_t<T> compare,
            std::type_identity_t<T> value,
            specops::simt::Site site = specops::simt::Site::current()) {
  return specops::simt::exchange(
      address, site, [=](T old) { return old == compare ? value : old; });
}
// Adds one, wrapping to zero after `limit`, and returns the previous value.
inline unsigned atomicInc(unsigned* address,
                          unsigned limit,
                          specops::simt::Site site = specops::simt::Site::current()) {
  return specops::simt::exchange(
      address, site, [=](unsigned old) { return old >= limit ? 0u : old + 1u; });
}

// Integer intrinsics

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
inline int __ffsll(long long x) {
  return x == 0 ? 0 : std::countr_zero(static_cast<unsigned long long>(x)) + 1;
}
inline unsigned __brev(unsigned x) {
  x = (x & 0x55555555u) << 1 | (x >> 1 & 0x55555555u);
  x = (x & 0x33333333u) << 2 | (x >> 2 & 0x33333333u);
  x = (x & 0x0f0f0f0fu) << 4 | (x >> 4 & 0x0f0f0f0fu);
  return __builtin_bswap32(x);
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(uint64_t{a} * b >> 32);
}
inline int __mulhi(int a, int b) { return static_cast<int>(int64_t{a} * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<unsigned long long>(static_cast<Wide>(a) * b >> 64);
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  uint64_t bytes = uint64_t{high} << 32 | low;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) {
    out |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  }
  return out;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (shift & 31));
}

#define SPECOPS_SIMT_MIN_MAX(type)                             \
  constexpr type min(type a, type b) { return b < a ? b : a; } \
  constexpr type max(type a, type b) { return a < b ? b : a; }
SPECOPS_SIMT_MIN_MAX(int)
SPECOPS_SIMT_MIN_MAX(unsigned)
SPECOPS_SIMT_MIN_MAX(long)
SPECOPS_SIMT_MIN_MAX(unsigned long)
SPECOPS_SIMT_MIN_MAX(long long)
SPECOPS_SIMT_MIN_MAX(unsigned long long)
#undef SPECOPS_SIMT_MIN_MAX
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
inline double min(double a, double b) { return std::fmin(a, b); }
inline double max(double a, double b) { return std::fmax(a, b); }

// Float intrinsics: one operation, rounded once to nearest.

inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double a) { return std::sqrt(a); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }

inline float rsqrtf(float x) { return static_cast<float>(1.0 / std::sqrt(double{x})); }

inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }

inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline int __float2int_rd(float x) { return static_cast<int>(std::floor(x)); }
inline int __float2int_ru(float x) { return static_cast<int>(std::ceil(x)); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

template <typename T>
T __ldg(const T* pointer) {
  return *pointer;
}
