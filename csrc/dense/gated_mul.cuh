// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/chunk.cuh"
#include "dense/gated_mul.h"
#include "gemm/gated.cuh"

namespace specops {

constexpr int kGatedMulThreads = 256;

// Computes out = activation(gate) * up, elementwise in fp32, rounded once.
// Grid:    x = rows * pieces of a row (unbounded).
// Block:   up to 256 threads; each thread owns one chunk of 16 bytes of out.
// Smem:    none.
// Cost:    3 elements moved per element of out; memory-bound.
// Assumes: rows contiguous; rows not aligned to 16 bytes are processed element by element.
// Order:   elementwise; elements do not depend on each other.
// Source:  Shazeer 2020 (GLU variants).
template <typename T>
__global__ void __launch_bounds__(kGatedMulThreads)
    gated_mul_kernel(GatedMulParams params, int pieces, bool aligned) {
  wait_for_previous_kernel();
  int64_t row = blockIdx.x / static_cast<unsigned>(pieces);
  int64_t piece = blockIdx.x % static_cast<unsigned>(pieces);
  int64_t col = (piece * blockDim.x + threadIdx.x) * kChunk<T>;
  if (col >= params.width) return;
  int n = static_cast<int>(min(params.width - col, int64_t{kChunk<T>}));
  const T* gates = static_cast<const T*>(params.gate_up) + row * params.gate_up_stride + col;
  float gate[kChunk<T>], up[kChunk<T>];
  uint4 gate_chunk = load_chunk(gates, n, aligned);
  uint4 up_chunk = load_chunk(gates + params.width, n, aligned);
  unpack_chunk<T>(gate, gate_chunk);
  unpack_chunk<T>(up, up_chunk);
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i) up[i] = gated_of(params.activation, gate[i], up[i]);
  store_chunk(
      static_cast<T*>(params.out) + row * params.width + col, pack_chunk<T>(up), n, aligned);
}

}  // namespace specops
