// SPDX-License-Identifier: Apache-2.0
// The gated activation on cpu: one function, so that silu_mul and linear give the same bits.
#pragma once

#include "common/simd.h"

namespace specops::SPECOPS_ISA {
namespace {

// gate / (1 + e^-gate) * up.
inline F32x16 silu_mul_of(F32x16 gate, F32x16 up) {
  F32x16 silu = div(gate, add(set1(1.0f), exp(sub(zero(), gate))));
  return mul(silu, up);
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
