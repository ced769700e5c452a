// SPDX-License-Identifier: Apache-2.0
// States of append_attention on the CPU and the operation that combines two of them. A state has
// the maximum of the scores, the sum of the weights and the weighted sum of V.
#pragma once

#include <cmath>
#include <cstring>

#include "attention/append_attention/cpu/element.h"

namespace specops::SPECOPS_ISA {
namespace {

// Folds (m2, l2, o2) into (m, l, o) for each row. A state with l = 0 is empty, and its o is
// undefined. o2[r] may be row r of o itself if (m, l, o) is empty.
SPECOPS_FLATTEN void fold(float* m,
                          float* l,
                          float* o,
                          const float* m2,
                          const float* l2,
                          float* const* o2,
                          int rows,
                          int width) {
  for (int first = 0; first < rows; first += kLanes) {
    int n = rows - first < kLanes ? rows - first : kLanes;
    F32x16 la = load_partial(l + first, n), lb = load_partial(l2 + first, n);
    F32x16 ma = load_partial(m + first, n), mb = load_partial(m2 + first, n);
    float empty_a[kLanes], empty_b[kLanes], a[kLanes], b[kLanes], top[kLanes], sum[kLanes];
    store(empty_a, la);
    store(empty_b, lb);
    store(a, ma);
    store(b, mb);
    for (int i = 0; i < n; ++i) {
      if (empty_a[i] == 0.0f) a[i] = -INFINITY;
      if (empty_b[i] == 0.0f) b[i] = -INFINITY;
      top[i] = a[i] > b[i] ? a[i] : b[i];
      if (top[i] == -INFINITY) top[i] = 0.0f;
    }
    for (int i = n; i < kLanes; ++i) a[i] = b[i] = top[i] = 0.0f;
    F32x16 fa = exp(sub(load(a), load(top))), fb = exp(sub(load(b), load(top)));
    store(sum, fma(lb, fb, mul(la, fa)));
    store(a, fa);
    store(b, fb);
    for (int i = 0; i < n; ++i) {
      int row = first + i;
      if (empty_b[i] == 0.0f) continue;
      m[row] = top[i];
      l[row] = sum[i];
      float* dst = o + static_cast<int64_t>(row) * width;
      const float* src = o2[row];
      if (src == dst) continue;
      if (empty_a[i] == 0.0f) {
        std::memcpy(dst, src, width * sizeof(float));
        continue;
      }
      F32x16 x = set1(a[i]), y = set1(b[i]);
      for (int j = 0; j < width; j += kLanes) {
        store(dst + j, fma(load(src + j), y, mul(load(dst + j), x)));
      }
    }
  }
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
