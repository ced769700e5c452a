// SPDX-License-Identifier: Apache-2.0
// The gated activation on CUDA: one function, so that silu_mul and linear give the same bits.
#pragma once

#include "common/device.cuh"

namespace specops {

// gate / (1 + e^-gate) * up.
__device__ inline float silu_mul_of(float gate, float up) {
  float silu = __fdiv_rn(gate, __fadd_rn(1.0f, expf(-gate)));
  return __fmul_rn(silu, up);
}

}  // namespace specops
