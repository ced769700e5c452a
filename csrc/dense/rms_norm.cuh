// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "dense/norm_row.cuh"
#include "dense/rms_norm.h"

namespace specops {

// Computes h = residual + x (rounded and stored) if there is a residual, else h = x; then out = T(h
// / sqrt(mean(h^2) + eps)) * weight, rounded again.
// Grid:    x = rows (unbounded).
// Block:   32 to 1,024 threads, by the width alone; thread i owns chunks i, i + threads, ...
// Smem:    one float per warp.
// Cost:    2 elements moved per element of x, 4 with a residual, weight from cache; memory-bound.
// Assumes: rows contiguous, out does not overlap residual; data not aligned to 16 bytes is
//          processed element by element. Rows above 16,384 elements of 2 bytes are read twice.
// Order:   that of norm_row. A row's bits depend only on the row.
// Source:  Zhang and Sennrich 2019; roundings as Llama and Qwen3 in transformers.
template <typename T>
__global__ void __launch_bounds__(kRmsNormMaxThreads)
    rms_norm_kernel(RmsNormParams params, bool aligned) {
  wait_for_previous_kernel();
  int64_t row = blockIdx.x;
  T* residual = nullptr;
  if (params.residual != nullptr) residual = static_cast<T*>(params.residual) + row * params.width;
  norm_row(static_cast<const T*>(params.x) + row * params.x_stride,
           residual,
           static_cast<const T*>(params.weight),
           static_cast<T*>(params.out) + row * params.width,
           params.width,
           params.eps,
           aligned);
}

}  // namespace specops
