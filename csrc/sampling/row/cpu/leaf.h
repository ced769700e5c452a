// SPDX-License-Identifier: Apache-2.0
// A leaf: the part of a row of logits whose sum is computed as sixteen fp32 lanes in id order,
// which are then added in one fixed tree.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/simd.h"
#include "sampling/row/cpu/logit_lanes.h"
#include "sampling/row/cpu/ranking.h"

namespace specops::SPECOPS_ISA {
namespace {

constexpr int kLeaf = 1024;  // elements per leaf; longer sums add the fp32 sums of leaves
constexpr float kLog2e = 1.44269504088896341f;

struct LeafStats {
  float max;   // maximum of the leaf's logits
  float raw;   // sum of e^(logit - max)
  float warm;  // sum of e^((logit - max) / temperature)
};

// Loads clean logits (see clean()) from x + i; -inf past the end.
template <typename T>
inline F32x16 load_clean(const T* x, int i, int size) {
  return clean(i + kLanes <= size ? load(x + i) : load_partial(x + i, size - i, -INFINITY));
}

template <typename T>
inline float leaf_mass(const T* x, int size, float origin, float scale) {
  F32x16 even = zero(), odd = zero(), from = set1(origin), factor = set1(scale);
  int i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    __builtin_prefetch(x + i + kLeaf);
    __builtin_prefetch(x + i + kLeaf + kLanes);
    even = add(even, weight(load(x + i), from, factor));
    odd = add(odd, weight(load(x + i + kLanes), from, factor));
  }
  for (; i < size; i += kLanes) {
    even = add(even, weight(load_partial(x + i, size - i, -INFINITY), from, factor));
  }
  return reduce_add(add(even, odd));
}

// Computes the maximum of a leaf and the requested sums. inverse = 1 / temperature, scale = inverse
// * log2(e).
template <typename T>
inline LeafStats scan_leaf(
    const T* x, int size, bool want_raw, bool want_warm, float inverse, float scale) {
  F32x16 even = set1(-INFINITY), odd = even;
  int i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    even = max(load(x + i), even);  // if the logit is NaN, the result is `even`
    odd = max(load(x + i + kLanes), odd);
  }
  for (; i < size; i += kLanes) even = max(load_partial(x + i, size - i, -INFINITY), even);
  LeafStats stats{clean(reduce_max(max(even, odd))), 0.0f, 0.0f};
  if (stats.max == -INFINITY) return stats;
  // This second pass finds the leaf in L1, while the next leaf is prefetched.
  if (want_raw) stats.raw = leaf_mass(x, size, stats.max, kLog2e);
  if (want_warm) {
    bool same = want_raw && inverse == 1.0f;
    stats.warm = same ? stats.raw : leaf_mass(x, size, stats.max, scale);
  }
  return stats;
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
