// SPDX-License-Identifier: Apache-2.0
#include "common/parallel.h"
#include "dense/gated_mul.h"
#include "gemm/gated_cpu.h"

namespace specops::SPECOPS_ISA {
namespace {

// Computes out = activation(gate) * up, elementwise in fp32, rounded once.
// Cost:    3 * rows * width elements moved; memory-bound.
// Assumes: out contiguous, rows of gate_up contiguous.
// Order:   elementwise; elements do not depend on each other.
// Source:  Shazeer 2020 (GLU variants).
// Threads: one item per 64 columns of a row.
template <typename T>
void run(const GatedMulParams& params) {
  const auto* gate_up = static_cast<const T*>(params.gate_up);
  auto* out = static_cast<T*>(params.out);
  constexpr int64_t kPiece = 64;
  int64_t pieces = (params.width + kPiece - 1) / kPiece;
  // A chunk should be worth waking a thread for: about 4096 elements.
  parallel_for(params.rows * pieces, 64, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      int64_t row = item / pieces;
      int64_t first = (item % pieces) * kPiece;
      int64_t last = first + kPiece < params.width ? first + kPiece : params.width;
      const T* gate = gate_up + row * params.gate_up_stride;
      const T* up = gate + params.width;
      T* dst = out + row * params.width;
      for (int64_t col = first; col < last; col += kLanes) {
        int n = static_cast<int>(last - col < kLanes ? last - col : kLanes);
        F32x16 value =
            gated_of(params.activation, load_partial(gate + col, n), load_partial(up + col, n));
        store_partial(dst + col, value, n);
      }
    }
  });
}

}  // namespace

void gated_mul_cpu(const GatedMulParams& params) {
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
