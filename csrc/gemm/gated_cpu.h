// SPDX-License-Identifier: Apache-2.0
// Gated activations on the CPU. The gated ops and linear all use this function, so that they give
// the same bits.
#pragma once

#include "common/simd.h"
#include "gemm/gated.h"

namespace specops::SPECOPS_ISA {
namespace {

// Computes activation(gate) * up as defined in gated.h; `activation` must be gated.
inline F32x16 gated_of(Activation activation, F32x16 gate, F32x16 up) {
  F32x16 t = gate;
  if (activation == Activation::kGeluTanh) {
    F32x16 slope = mul(set1(kGeluCubic), mul(gate, gate));
    t = mul(gate, add(set1(kGeluLinear), slope));
  }
  if (activation ==
      Activation::kSwigluOai) {  // min and max return their second argument if it is NaN
    gate = min(set1(kSwigluLimit), gate);
    up = add(max(set1(-kSwigluLimit), min(set1(kSwigluLimit), up)), set1(1.0f));
    t = mul(set1(kSwigluAlpha), gate);
  }
  F32x16 activated = div(gate, add(set1(1.0f), exp(sub(zero(), t))));
  return mul(activated, up);
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
