// SPDX-License-Identifier: Apache-2.0
// linear: x * weight^T (+ bias) over packed weights, one order of additions per output element.
// pack_weight: brings a weight into that layout.
//
// Layout: outputs in blocks of 16, inputs in steps of one 32-bit word: a float, or two bfloat16.
// packed[block][step] is 64 bytes, word i being inputs `step` of output 16 * block + i. Words past
// the last output or input are zero.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"

namespace specops {

constexpr int64_t kLinearBlock = 16;  // outputs that share a block

inline int64_t linear_blocks(int64_t num_outputs) {
  return (num_outputs + kLinearBlock - 1) / kLinearBlock;
}

inline int64_t linear_steps(int64_t num_inputs, DType dtype) {
  return dtype == DType::kBFloat16 ? (num_inputs + 1) / 2 : num_inputs;
}

struct PackWeightParams {
  const void* weight;  // [num_outputs, num_inputs], rows weight_stride apart
  void* packed;        // [linear_blocks, linear_steps, 16] words
  int64_t num_outputs;
  int64_t num_inputs;
  int64_t weight_stride;  // elements between rows
  DType dtype;            // bfloat16 or float32
};

struct LinearParams {
  const void* x;       // [rows, num_inputs], rows x_stride apart
  const void* packed;  // as pack_weight writes it
  const void* bias;    // [num_outputs], of dtype; may be nullptr
  void* out;           // [rows, num_outputs], contiguous
  int64_t rows;
  int64_t num_outputs;
  int64_t num_inputs;
  int64_t x_stride;  // elements between rows
  DType dtype;       // bfloat16 or float32; of x, weight and bias
  DType out_dtype;   // of out: dtype, or float32
};

SPECOPS_DECLARE_CPU(pack_weight_cpu, PackWeightParams);
SPECOPS_DECLARE_CPU(linear_cpu, LinearParams);

}  // namespace specops
