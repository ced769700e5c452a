// SPDX-License-Identifier: Apache-2.0
// Transformations of a head on the CPU before it is written to a cache: RMS norm and rotation.
#pragma once

#include "common/simd.h"

namespace specops::SPECOPS_ISA {
namespace {

// Normalizes a head in place: x / rms(x) is rounded to T, multiplied by the weight and rounded to T
// again, as in training.
template <typename T>
void normalize(float* head, const T* weight, int64_t head_dim, float eps) {
  F32x16 squares = zero();
  for (int64_t i = 0; i < head_dim; i += kLanes) {
    F32x16 x = load_partial(head + i, static_cast<int>(head_dim - i));
    squares = fma(x, x, squares);
  }
  float mean = reduce_add(squares) / static_cast<float>(head_dim);
  F32x16 scale = set1(1.0f / std::sqrt(mean + eps));
  for (int64_t i = 0; i < head_dim; i += kLanes) {
    int n = static_cast<int>(head_dim - i);
    F32x16 rounded = round_to<T>(mul(load_partial(head + i, n), scale));
    store_partial(head + i, round_to<T>(mul(load_partial(weight + i, n), rounded)), n);
  }
}

// Rotates pair i by the angle of pair i. Pair i has the elements i and i + rotary_dim / 2 or, if
// interleaved, 2i and 2i + 1.
inline void rotate(float* head, const float* cos_sin, int64_t rotary_dim, bool interleaved) {
  int64_t half = rotary_dim / 2;
  const float* cos = cos_sin;
  const float* sin = cos_sin + half;
  if (interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      float a = head[2 * i], b = head[2 * i + 1];
      head[2 * i] = a * cos[i] - b * sin[i];
      head[2 * i + 1] = b * cos[i] + a * sin[i];
    }
    return;
  }
  for (int64_t i = 0; i < half; i += kLanes) {
    int n = static_cast<int>(half - i);
    F32x16 a = load_partial(head + i, n), b = load_partial(head + half + i, n);
    F32x16 c = load_partial(cos + i, n), s = load_partial(sin + i, n);
    store_partial(head + i, sub(mul(a, c), mul(b, s)), n);
    store_partial(head + half + i, add(mul(b, c), mul(a, s)), n);
  }
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
