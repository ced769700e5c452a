// SPDX-License-Identifier: Apache-2.0
#include "common/parallel.h"
#include "dense/norm_row_cpu.h"
#include "dense/rms_norm.h"

namespace specops::SPECOPS_ISA {
namespace {

// Computes h = residual + x (rounded and stored) if there is a residual, else h = x; then out = T(h
// / sqrt(mean(h^2) + eps)) * weight, rounded again.
// Cost:    3 to 5 * rows * width elements moved; a row stays in L1.
// Assumes: rows contiguous; out does not overlap residual.
// Order:   that of norm_row. A row's bits depend only on the row.
// Source:  Zhang and Sennrich 2019; roundings as Llama and Qwen3 in transformers.
// Threads: one item per range of rows.
template <typename T>
void run(const RmsNormParams& params) {
  // A chunk should be worth waking a thread for: about 8192 elements.
  int64_t grain = 8192 / params.width + 1;
  parallel_for(params.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      T* residual = nullptr;
      if (params.residual != nullptr) {
        residual = static_cast<T*>(params.residual) + row * params.width;
      }
      norm_row(static_cast<const T*>(params.x) + row * params.x_stride,
               residual,
               static_cast<const T*>(params.weight),
               static_cast<T*>(params.out) + row * params.width,
               params.width,
               params.eps);
    }
  });
}

}  // namespace

void rms_norm_cpu(const RmsNormParams& params) {
  switch (params.dtype) {
    case DType::kBFloat16:
      return run<bfloat16>(params);
    case DType::kFloat16:
      return run<float16>(params);
    default:
      return run<float>(params);
  }
}

}  // namespace specops::SPECOPS_ISA
