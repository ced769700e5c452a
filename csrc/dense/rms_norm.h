// SPDX-License-Identifier: Apache-2.0
// rms_norm: root-mean-square normalization of rows, after an optional residual addition.
#pragma once

#include <cstdint>

#include "common/cuda_stream.h"
#include "common/dtype.h"
#include "common/isa.h"

namespace specops {

struct RmsNormParams {
  const void* x;       // [rows, width], rows are x_stride apart
  const void* weight;  // [width]
  void* residual;      // [rows, width], contiguous; becomes residual + x; may be nullptr
  void* out;           // [rows, width], contiguous; may be x
  int64_t rows;
  int64_t width;
  int64_t x_stride;  // elements between rows
  float eps;
  DType dtype;  // dtype of all tensors: float32, bfloat16 or float16
};

SPECOPS_DECLARE_CPU(rms_norm_cpu, RmsNormParams);
SPECOPS_DECLARE_CUDA(rms_norm_cuda, RmsNormParams);

}  // namespace specops
