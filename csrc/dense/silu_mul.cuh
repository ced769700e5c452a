// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/device.cuh"
#include "dense/silu_mul.h"

namespace specops {

constexpr int kSiluMulThreads = 256;

// out = gate / (1 + e^-gate) * up, elementwise in fp32, rounded once.
// Grid:  one thread an element, blocks of 256 over rows * width.
// Bytes: 3 elements moved an element of out; memory-bound.
// Order: elementwise; an element never depends on another.
// Source: Shazeer 2020 (GLU variants), Llama.
template <typename T>
__global__ void __launch_bounds__(kSiluMulThreads) silu_mul_kernel(SiluMulParams params) {
  int64_t item = int64_t{blockIdx.x} * kSiluMulThreads + threadIdx.x;
  if (item >= params.rows * params.width) return;
  int64_t row = item / params.width;
  int64_t col = item % params.width;
  const T* gate = static_cast<const T*>(params.gate_up) + row * params.gate_up_stride + col;
  float x = to_float(gate[0]);
  float silu = __fdiv_rn(x, __fadd_rn(1.0f, expf(-x)));
  static_cast<T*>(params.out)[item] = from_float<T>(__fmul_rn(silu, to_float(gate[params.width])));
}

}  // namespace specops
