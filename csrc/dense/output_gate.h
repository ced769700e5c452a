// SPDX-License-Identifier: Apache-2.0
// output_gate: multiplies attention output by a gate, after an optional norm.
#pragma once

#include <cstdint>

#include "common/cuda_stream.h"
#include "common/dtype.h"
#include "common/isa.h"

namespace specops {

struct OutputGateParams {
  const void* x;       // [rows, heads, dim], rows are x_stride apart
  const void* gate;    // [rows, heads, gate_dim], rows are gate_stride apart
  const void* weight;  // [dim], weight of the norm; may be nullptr
  void* out;           // [rows, heads, dim], contiguous; may be x
  int64_t rows;
  int64_t heads;
  int64_t dim;
  int64_t gate_dim;  // dim, or 1: one gate per head
  int64_t x_stride;
  int64_t gate_stride;
  float eps;
  bool is_silu;  // whether the gate is applied with silu instead of sigmoid
  DType dtype;   // dtype of all tensors: float32, bfloat16 or float16
};

SPECOPS_DECLARE_CPU(output_gate_cpu, OutputGateParams);
SPECOPS_DECLARE_CUDA(output_gate_cuda, OutputGateParams);

}  // namespace specops
