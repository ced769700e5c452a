// SPDX-License-Identifier: Apache-2.0
// silu_mul: the gated activation of a Llama-style MLP.
#pragma once

#include <cstdint>

#include "common/cuda_stream.h"
#include "common/dtype.h"
#include "common/isa.h"

namespace specops {

struct SiluMulParams {
  const void* gate_up;  // [rows, 2 * width], each row: gate, then up; rows gate_up_stride apart
  void* out;            // [rows, width], contiguous
  int64_t rows;
  int64_t width;
  int64_t gate_up_stride;  // elements between rows
  DType dtype;             // float32, bfloat16 or float16; of both
};

SPECOPS_DECLARE_CPU(silu_mul_cpu, SiluMulParams);
SPECOPS_DECLARE_CUDA(silu_mul_cuda, SiluMulParams);

}  // namespace specops
