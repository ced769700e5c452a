// SPDX-License-Identifier: Apache-2.0
// Loops with compile-time iteration counts that must be fully unrolled.
#pragma once

namespace specops::SPECOPS_ISA {
namespace {

// Calls fn(0) to fn(kCount - 1) without a loop, so that arrays indexed by the argument stay in
// registers.
#define SPECOPS_INLINE __attribute__((always_inline))
template <int kCount, typename Fn>
SPECOPS_INLINE inline void unrolled(const Fn& fn) {
  if constexpr (kCount > 0) {
    unrolled<kCount - 1>(fn);
    fn(kCount - 1);
  }
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
