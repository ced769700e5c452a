// SPDX-License-Identifier: Apache-2.0
// The AMX kernels of linear with software tile instructions, as a library for test_linear_amx.py.
#include <cstdlib>

#include "common/parallel.h"
#include "dense/linear.h"
#include "gemm/gemm_range.h"

namespace specops::avx512_bf16 {
void linear_cpu(const LinearParams&) { std::abort(); }  // other instruction sets have no tiles
uint64_t next_product() {
  static uint64_t products = 0;
  return ++products;
}
void gemm_range(const GemmParams&, const GemmRange&) { std::abort(); }  // few rows use no tiles
}  // namespace specops::avx512_bf16

extern "C" void set_threads(int count) { specops::set_num_threads(count); }

extern "C" void linear(const void* x,
                       const specops::WeightParams* weight,
                       const void* bias,
                       void* out,
                       int64_t rows,
                       int64_t x_stride,
                       bool is_float,
                       bool is_out_float) {
  auto dtype = [](bool yes) { return yes ? specops::DType::kFloat32 : specops::DType::kBFloat16; };
  specops::LinearParams params{};
  params.x = x;
  params.weight = *weight;
  params.bias = bias;
  params.out = out;
  params.rows = rows;
  params.x_stride = x_stride;
  params.dtype = dtype(is_float);
  params.out_dtype = dtype(is_out_float);
  specops::amx_model::linear_cpu(params);
}
