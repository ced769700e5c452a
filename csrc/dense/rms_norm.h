// SPDX-License-Identifier: Apache-2.0
// rms_norm: root-mean-square normalisation of rows, with the residual addition before it.
#pragma once

#include <cstdint>

#include "common/cuda_stream.h"
#include "common/dtype.h"
#include "common/isa.h"

namespace specops {

struct RmsNormParams {
  const void* x;       // [rows, width], rows x_stride apart
  const void* weight;  // [width]
  void* residual;      // [rows, width], contiguous; becomes residual + x; may be nullptr
  void* out;           // [rows, width], contiguous; may be x
  int64_t rows;
  int64_t width;
  int64_t x_stride;  // elements between rows
  float eps;
  DType dtype;  // float32, bfloat16 or float16; of all tensors
};

SPECOPS_DECLARE_CPU(rms_norm_cpu, RmsNormParams);
SPECOPS_DECLARE_CUDA(rms_norm_cuda, RmsNormParams);

}  // namespace specops
