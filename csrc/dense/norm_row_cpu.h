// SPDX-License-Identifier: Apache-2.0
// RMSNorm of one row on the CPU. All ops that normalize rows use it, so that they give the same
// bits.
#pragma once

#include "common/simd.h"

namespace specops::SPECOPS_ISA {
namespace {

// Computes h = residual + x (rounded and stored) if there is a residual, else h = x; then out = T(h
// / sqrt(mean(h^2) + eps)) * weight, rounded again. Sum of squares: column c is added to lane c %
// 16, in order of c; then the lanes are added in the fixed tree of reduce_add.
template <typename T>
inline void norm_row(const T* x, T* residual, const T* weight, T* out, int64_t width, float eps) {
  int64_t whole = width / kLanes * kLanes;
  int rest = static_cast<int>(width - whole);
  F32x16 squares = zero();
  auto add_squares = [&](int64_t col, int n) {
    F32x16 h = load_partial(x + col, n);
    if (residual != nullptr) {
      h = round_to<T>(add(load_partial(residual + col, n), h));
      n < kLanes ? store_partial(residual + col, h, n) : store_exact(residual + col, h);
    }
    squares = fma(h, h, squares);
  };
  for (int64_t col = 0; col < whole; col += kLanes) add_squares(col, kLanes);
  if (rest > 0) add_squares(whole, rest);
  float mean = reduce_add(squares) / static_cast<float>(width);
  F32x16 scale = set1(1.0f / __builtin_sqrtf(mean + eps));
  const T* hidden = residual != nullptr ? residual : x;
  auto normalize = [&](int64_t col, int n) {
    F32x16 normed = round_to<T>(mul(load_partial(hidden + col, n), scale));
    store_partial(out + col, mul(normed, load_partial(weight + col, n)), n);
  };
  for (int64_t col = 0; col < whole; col += kLanes) normalize(col, kLanes);
  if (rest > 0) normalize(whole, rest);
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
