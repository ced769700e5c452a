// SPDX-License-Identifier: Apache-2.0
#include "common/parallel.h"
#include "common/simd.h"
#include "dense/rms_norm.h"

namespace specops::SPECOPS_ISA {
namespace {

// The value a T would hold: one rounding, as a store and a load do it.
template <typename T>
inline F32x16 round_to(F32x16 x) {
  T lanes[kLanes];
  store(lanes, x);
  return load(lanes);
}

template <>
inline F32x16 round_to<float>(F32x16 x) {
  return x;
}

// h = residual + x (rounded and kept, where there is a residual) or x;
// out = T(h / sqrt(mean(h^2) + eps)) * weight, rounded again.
// Cost:    3 to 5 * rows * width elements moved; a row stays in the first-level cache.
// Assumes: rows contiguous; out does not overlap residual.
// Order:   column c adds to lane c % 16, in order of c; then the fixed tree of reduce_add. The row
//          alone decides its bits.
// Source:  Zhang and Sennrich 2019; roundings as Llama and Qwen3 in transformers.
// Threads: ranges of rows.
template <typename T>
void run(const RmsNormParams& params) {
  const auto* weight = static_cast<const T*>(params.weight);
  int64_t whole = params.width / kLanes * kLanes;
  int rest = static_cast<int>(params.width - whole);
  // A chunk should be worth waking a thread: about 8192 elements.
  int64_t grain = 8192 / params.width + 1;
  parallel_for(params.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* x = static_cast<const T*>(params.x) + row * params.x_stride;
      T* out = static_cast<T*>(params.out) + row * params.width;
      T* residual = nullptr;
      if (params.residual != nullptr) {
        residual = static_cast<T*>(params.residual) + row * params.width;
      }
      F32x16 squares = zero();
      auto add_squares = [&](int64_t col, int n) {
        F32x16 h = load_partial(x + col, n);
        if (residual != nullptr) {
          h = round_to<T>(add(load_partial(residual + col, n), h));
          store_partial(residual + col, h, n);
        }
        squares = fma(h, h, squares);
      };
      for (int64_t col = 0; col < whole; col += kLanes) add_squares(col, kLanes);
      if (rest > 0) add_squares(whole, rest);
      float mean = reduce_add(squares) / static_cast<float>(params.width);
      F32x16 scale = set1(1.0f / __builtin_sqrtf(mean + params.eps));
      const T* hidden = residual != nullptr ? residual : x;
      auto normalise = [&](int64_t col, int n) {
        F32x16 normed = round_to<T>(mul(load_partial(hidden + col, n), scale));
        store_partial(out + col, mul(normed, load_partial(weight + col, n)), n);
      };
      for (int64_t col = 0; col < whole; col += kLanes) normalise(col, kLanes);
      if (rest > 0) normalise(whole, rest);
    }
  });
}

}  // namespace

void rms_norm_cpu(const RmsNormParams& params) {
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
