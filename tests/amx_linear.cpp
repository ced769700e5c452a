// SPDX-License-Identifier: Apache-2.0
// linear's tile kernel over the model of its instructions, as a library that test_linear_amx.py calls.
#include <cstdlib>

#include "common/parallel.h"
#include "dense/linear.h"

namespace specops::avx512_bf16 {
void linear_cpu(const LinearParams&) { std::abort(); }  // others have no tiles
}  // namespace specops::avx512_bf16

extern "C" void set_threads(int count) { specops::set_num_threads(count); }

extern "C" void linear(const void* x,
                       const void* packed,
                       const void* bias,
                       void* out,
                       int64_t rows,
                       int64_t num_outputs,
                       int64_t num_inputs,
                       int64_t x_stride,
                       bool is_float,
                       int activation) {
  specops::LinearParams params{};
  params.x = x;
  params.weight.data = packed;
  params.bias = bias;
  params.out = out;
  params.rows = rows;
  params.weight.num_outputs = num_outputs;
  params.weight.num_inputs = num_inputs;
  params.x_stride = x_stride;
  params.dtype = specops::DType::kBFloat16;
  params.out_dtype = is_float ? specops::DType::kFloat32 : specops::DType::kBFloat16;
  params.weight.activation = static_cast<specops::Activation>(activation);
  specops::amx_model::linear_cpu(params);
}
