// SPDX-License-Identifier: Apache-2.0
#include "common/parallel.h"
#include "common/simd.h"
#include "moe/moe_combine.h"

namespace specops::SPECOPS_ISA {
namespace {

// Computes out = sum of weight * expert_out over the experts of a row, plus the output of the
// shared expert.
// Cost:    (top_k + 1) * 4 bytes read and an element written per column; memory-bound.
// Assumes: places checked by ops.cpp.
// Order:   one chain in the order of the row's experts, each product and each sum rounded to
//          float32, shared last; rounded once to the dtype.
// Source:  -
// Threads: one item per 256 columns of a row.
template <typename T>
void run(const MoeCombineParams& params) {
  constexpr int64_t kPiece = 256;
  int64_t width = params.width, pieces = (width + kPiece - 1) / kPiece;
  parallel_for(params.rows * pieces, 8, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      int64_t row = item / pieces, first = item % pieces * kPiece;
      int64_t last = first + kPiece < width ? first + kPiece : width;
      const int32_t* places = params.places + row * params.top_k;
      const float* weights = params.expert_weights + row * params.top_k;
      for (int64_t col = first; col < last; col += kLanes) {
        int n = static_cast<int>(last - col < kLanes ? last - col : kLanes);
        F32x16 total = zero();
        for (int64_t k = 0; k < params.top_k; ++k) {
          if (places[k] < 0) continue;
          const float* from = params.expert_out + places[k] * width + col;
          total = add(total, mul(set1(weights[k]), load_partial(from, n)));
        }
        if (params.shared != nullptr) {
          total = add(total, load_partial(params.shared + row * width + col, n));
        }
        store_partial(static_cast<T*>(params.out) + row * width + col, total, n);
      }
    }
  });
}

}  // namespace

void moe_combine_cpu(const MoeCombineParams& params) {
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
