// SPDX-License-Identifier: Apache-2.0
// Gated activations on CUDA. The gated ops and linear all use this function, so that they give the
// same bits.
#pragma once

#include "common/device.cuh"
#include "gemm/gated.h"

namespace specops {

// Computes activation(gate) * up as defined in gated.h; `activation` must be gated.
__device__ inline float gated_of(Activation activation, float gate, float up) {
  float t = gate;
  if (activation == Activation::kGeluTanh) {
    float slope = __fmul_rn(kGeluCubic, __fmul_rn(gate, gate));
    t = __fmul_rn(gate, __fadd_rn(kGeluLinear, slope));
  }
  if (activation == Activation::kSwigluOai) {  // fminf would lose NaN
    gate = gate > kSwigluLimit ? kSwigluLimit : gate;
    up = up > kSwigluLimit ? kSwigluLimit : up;
    up = __fadd_rn(up < -kSwigluLimit ? -kSwigluLimit : up, 1.0f);
    t = __fmul_rn(kSwigluAlpha, gate);
  }
  float activated = __fdiv_rn(gate, __fadd_rn(1.0f, expf(-t)));
  return __fmul_rn(activated, up);
}

}  // namespace specops
