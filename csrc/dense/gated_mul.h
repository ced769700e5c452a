// SPDX-License-Identifier: Apache-2.0
// silu_mul, gelu_tanh_mul and swiglu_oai_mul: the gated MLP activations of Llama, Gemma and
// gpt-oss.
#pragma once

#include <cstdint>

#include "common/cuda_stream.h"
#include "common/dtype.h"
#include "common/isa.h"
#include "gemm/gated.h"

namespace specops {

struct GatedMulParams {
  const void* gate_up;  // [rows, 2 * width], gate then up; rows gate_up_stride apart
  void* out;            // [rows, width], contiguous
  int64_t rows;
  int64_t width;
  int64_t gate_up_stride;  // elements between rows
  DType dtype;             // dtype of gate_up and out: float32, bfloat16 or float16
  Activation activation;   // not kNone
};

SPECOPS_DECLARE_CPU(gated_mul_cpu, GatedMulParams);
SPECOPS_DECLARE_CUDA(gated_mul_cuda, GatedMulParams);

}  // namespace specops
