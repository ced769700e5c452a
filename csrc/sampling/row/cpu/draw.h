// SPDX-License-Identifier: Apache-2.0
// Drawing of a token from the tokens that the filters of a row keep: inverse CDF in token-id order.
#pragma once

#include <cstdint>

#include "common/simd.h"
#include "sampling/row/cpu/row.h"
#include "sampling/row/cpu/row_passes.h"

namespace specops::SPECOPS_ISA {
namespace {

// Returns the first kept token, in order of ids, at which the running sum of masses exceeds the
// target.
template <typename T>
inline int32_t invert_cdf(const Row<T>& row, double target) {
  const double* masses = row.scratch->masses.data;
  double before = 0.0, after = 0.0;
  int32_t chosen = 0;
  for (int32_t leaf = 0; leaf < row.num_leaves && after <= target; ++leaf) {
    if (masses[leaf] <= 0.0) continue;
    before = after;
    after = before + masses[leaf];
    chosen = leaf;
  }
  // Search inside the leaf. Rounding may place the target just past its last token; then the last
  // one is returned.
  float origin = row.leaf_origin(chosen);
  double rest = (target - before) / row.weight_unit(chosen);
  double sum = 0.0;
  int32_t found = chosen * kLeaf;
  float x[kLeaf];
  int size = load_leaf(row, chosen, x);
  for (int i = 0; i < size; i += kLanes) {
    float w[kLanes];
    store(w, weight(load(x + i), set1(origin), set1(row.scale)));
    for (int j = 0; j < kLanes; ++j) {
      int32_t id = chosen * kLeaf + i + j;
      if (w[j] <= 0.0f || !row.cut.keeps(x[i + j], id)) continue;
      found = id;
      sum += w[j];
      if (sum > rest) return found;
    }
  }
  return found;
}

// Draws a token from the filtered distribution of a row.
template <typename T>
inline int32_t draw(const Row<T>& row, float uniform) {
  if (row.kept == Kept::kOne) return row.one;
  if (row.kept == Kept::kListed) return row.list->invert_cdf(uniform * row.kept_mass);
  return invert_cdf(row, uniform * row.kept_mass);
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
