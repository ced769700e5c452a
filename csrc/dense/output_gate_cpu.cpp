// SPDX-License-Identifier: Apache-2.0
#include "common/parallel.h"
#include "dense/norm_row_cpu.h"
#include "dense/output_gate.h"

namespace specops::SPECOPS_ISA {
namespace {

template <typename T>
void run_head(const OutputGateParams& params, const T* x, const T* gate, T* out) {
  if (params.weight != nullptr) {
    norm_row<T>(x, nullptr, static_cast<const T*>(params.weight), out, params.dim, params.eps);
    x = out;
  }
  for (int64_t col = 0; col < params.dim; col += kLanes) {
    int n = static_cast<int>(params.dim - col < kLanes ? params.dim - col : kLanes);
    F32x16 g = params.gate_dim == 1 ? set1(to_float(gate[0])) : load_partial(gate + col, n);
    F32x16 numerator = params.is_silu ? g : set1(1.0f);
    F32x16 share = div(numerator, add(set1(1.0f), exp(sub(zero(), g))));
    store_partial(out + col, mul(load_partial(x + col, n), share), n);
  }
}

// Computes out = y * sigmoid(gate) or y * silu(gate), with y = x or rms_norm(x).
// Cost:    3 elements moved per element of out; memory-bound.
// Assumes: rows contiguous.
// Order:   the norm is that of norm_row, its result rounded; the rest elementwise in fp32, rounded
//          once. The bits of a head depend only on that head of the row.
// Source:  Yang, Kautz and Hatamizadeh 2024 (Gated DeltaNet); Qiu et al. 2025 (gated attention).
// Threads: one item per range of heads of rows.
template <typename T>
void run(const OutputGateParams& params) {
  // A chunk should be worth waking a thread for: about 4096 elements.
  int64_t grain = 4096 / params.dim + 1;
  parallel_for(params.rows * params.heads, grain, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      int64_t row = item / params.heads, head = item % params.heads;
      run_head<T>(
          params,
          static_cast<const T*>(params.x) + row * params.x_stride + head * params.dim,
          static_cast<const T*>(params.gate) + row * params.gate_stride + head * params.gate_dim,
          static_cast<T*>(params.out) + item * params.dim);
    }
  });
}

}  // namespace

void output_gate_cpu(const OutputGateParams& params) {
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
