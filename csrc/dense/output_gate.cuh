// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "dense/norm_row.cuh"
#include "dense/output_gate.h"

namespace specops {

// Computes out = y * sigmoid(gate) or y * silu(gate), with y = x or rms_norm(x).
// Grid:    x = rows * heads (unbounded).
// Block:   32 to 1,024 threads, by dim alone; thread i owns chunks i, i + threads, ...
// Smem:    one float per warp.
// Cost:    3 elements moved per element of out; 5 with a norm, two of them from cache;
//          memory-bound.
// Assumes: rows contiguous; data not aligned to 16 bytes is processed element by element.
// Order:   the norm is that of norm_row, its result rounded; the rest elementwise in fp32, rounded
//          once. The bits of a head depend only on that head of the row.
// Source:  Yang, Kautz and Hatamizadeh 2024 (Gated DeltaNet); Qiu et al. 2025 (gated attention).
template <typename T>
__global__ void __launch_bounds__(kRmsNormMaxThreads)
    output_gate_kernel(OutputGateParams params, bool aligned) {
  wait_for_previous_kernel();
  int64_t row = blockIdx.x / params.heads, head = blockIdx.x % params.heads;
  const T* x = static_cast<const T*>(params.x) + row * params.x_stride + head * params.dim;
  const T* gates =
      static_cast<const T*>(params.gate) + row * params.gate_stride + head * params.gate_dim;
  T* out = static_cast<T*>(params.out) + int64_t{blockIdx.x} * params.dim;
  if (params.weight != nullptr) {
    const T* weight = static_cast<const T*>(params.weight);
    norm_row<T>(x, nullptr, weight, out, params.dim, params.eps, aligned);
    x = out;  // each thread reads back only what it has written
  }
  int64_t step = int64_t{blockDim.x} * kChunk<T>;
  for (int64_t col = int64_t{threadIdx.x} * kChunk<T>; col < params.dim; col += step) {
    int n = static_cast<int>(min(params.dim - col, int64_t{kChunk<T>}));
    float y[kChunk<T>], gate[kChunk<T>];
    unpack_chunk<T>(y, load_chunk(x + col, n, aligned));
    if (params.gate_dim == 1) {
#pragma unroll
      for (float& one : gate) one = to_float(gates[0]);
    } else {
      unpack_chunk<T>(gate, load_chunk(gates + col, n, aligned));
    }
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) {
      float numerator = params.is_silu ? gate[i] : 1.0f;
      y[i] = __fmul_rn(y[i], __fdiv_rn(numerator, __fadd_rn(1.0f, expf(-gate[i]))));
    }
    store_chunk(out + col, pack_chunk<T>(y), n, aligned);
  }
}

}  // namespace specops
