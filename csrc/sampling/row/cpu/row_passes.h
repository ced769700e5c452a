// SPDX-License-Identifier: Apache-2.0
// Passes over the leaves of a row: they copy tokens that a cut keeps to the list, or count or weigh
// the tokens that reach a logit.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/simd.h"
#include "sampling/row/cpu/leaf.h"
#include "sampling/row/cpu/logit_lanes.h"
#include "sampling/row/cpu/ranking.h"
#include "sampling/row/cpu/row.h"
#include "sampling/row/cpu/scratch.h"
#include "sampling/row/cpu/token_list.h"

namespace specops::SPECOPS_ISA {
namespace {

// Loads the clean logits of a leaf, padded with -inf to whole vectors. Returns the leaf's size.
template <typename T>
inline int load_leaf(const Row<T>& row, int32_t leaf, float* x) {
  int size = row.leaf_size(leaf);
  for (int i = 0; i < size; i += kLanes) store(x + i, load_clean(row.leaf_data(leaf), i, size));
  return size;
}

// Returns whether the last token with a logit equal to the cut's value is in the vector at
// first_id, so that each of its lanes must be tested.
inline bool is_last(Cut cut, int32_t first_id) {
  return first_id <= cut.last_id && cut.last_id < first_id + kLanes;
}

inline uint32_t kept_lanes(Cut cut, F32x16 values, int32_t first_id, uint32_t mask) {
  float x[kLanes];
  store(x, values);
  for (int i = 0; i < kLanes; ++i) {
    if (!cut.keeps(x[i], first_id + i)) mask &= ~(1u << i);
  }
  return mask;
}

// Appends the tokens that the cut keeps and that are below `high` to the list. Returns false if
// they are too many.
template <typename T>
inline bool gather(const Row<T>& row, Cut cut, float high, TokenList& list) {
  Appender end{list.x, list.id, 0};
  float past = next_above(cut.value);  // used for vectors past the cut's last_id
  for (int32_t leaf = 0; leaf < row.num_leaves; ++leaf) {
    row.scratch->segments.data[leaf] = end.count;
    if (row.leaves[leaf].max < cut.value) continue;
    if (end.count + kLeaf > list.capacity) return false;
    const T* x = row.leaf_data(leaf);
    int size = row.leaf_size(leaf);
    for (int i = 0; i < size; i += kLanes) {
      F32x16 values = load_clean(x, i, size);
      int32_t first = leaf * kLeaf + i;
      uint32_t mask = lanes_between(values, first <= cut.last_id ? cut.value : past, high);
      if (is_last(cut, first)) mask = kept_lanes(cut, values, first, mask);
      if (i + kLanes > size) mask &= (1u << (size - i)) - 1;
      end.append(values, first, mask);  // without a branch on the mask, which is hard to predict
    }
  }
  row.scratch->segments.data[row.num_leaves] = end.count;
  list.count = end.count;
  list.pad();
  return true;
}

// Sets masses[j] to the mass (or count) of the row's tokens with logits >= thresholds[j].
// `thresholds` must descend. Leaves the sums of each leaf in scratch->sums.
template <bool kCount, typename T>
inline void masses_from(const Row<T>& row, const float* thresholds, double* masses) {
  for (int j = 0; j < kThresholds; ++j) masses[j] = 0.0;
  F32x16 origin = set1(row.max), factor = set1(row.scale);
  for (int32_t leaf = 0; leaf < row.num_leaves; ++leaf) {
    float* sums = row.scratch->sums.data + leaf * kThresholds;
    for (int j = 0; j < kThresholds; ++j) sums[j] = 0.0f;
    if (row.leaves[leaf].max < thresholds[kThresholds - 1]) continue;
    const T* x = row.leaf_data(leaf);
    int size = row.leaf_size(leaf);
    F32x16 sum[kThresholds];
    for (int j = 0; j < kThresholds; ++j) sum[j] = zero();
    auto step = [&](F32x16 values) {  // a NaN reaches no threshold
      F32x16 w = kCount ? set1(1.0f) : weight(values, origin, factor);
      for (int j = 0; j < kThresholds; ++j) {
        sum[j] = add_where_ge(sum[j], w, values, set1(thresholds[j]));
      }
    };
    int i = 0;
    for (; i + kLanes <= size; i += kLanes) step(load(x + i));
    if (i < size) step(load_partial(x + i, size - i, -INFINITY));
    for (int j = 0; j < kThresholds; ++j) {
      sums[j] = reduce_add(sum[j]);
      masses[j] += sums[j];
    }
  }
}

// Calls visit(offset in the leaf, weights) for every vector of a leaf. Dropped tokens get weight 0.
template <typename T, typename Visit>
inline void for_each_weighed(
    const Row<T>& row, int32_t leaf, Cut cut, float origin, Visit&& visit) {
  const T* x = row.leaf_data(leaf);
  int size = row.leaf_size(leaf);
  float past = next_above(cut.value);  // used for vectors past the cut's last_id
  for (int i = 0; i < size; i += kLanes) {
    F32x16 values = load_clean(x, i, size);
    F32x16 w = weight(values, set1(origin), set1(row.scale));
    int32_t first = leaf * kLeaf + i;
    if (is_last(cut, first)) {
      uint32_t mask = kept_lanes(cut, values, first, 0xffffu);
      float lanes[kLanes];
      store(lanes, w);
      for (int j = 0; j < kLanes; ++j) lanes[j] = mask >> j & 1u ? lanes[j] : 0.0f;
      w = load(lanes);
    }
    float least = first <= cut.last_id ? cut.value : past;
    visit(i, add_where_ge(zero(), w, values, set1(least)));
  }
}

// Returns the mass of the kept tokens of one leaf, where the weight of the row's largest logit is
// 1.
template <typename T>
inline float kept_leaf_mass(const Row<T>& row, int32_t leaf, Cut cut) {
  F32x16 sum = zero();
  for_each_weighed(row, leaf, cut, row.max, [&](int, F32x16 w) { sum = add(sum, w); });
  return reduce_add(sum);
}

// Writes the mass of the kept tokens of every leaf, and returns the mass of the row.
template <typename T>
inline double mass_of_kept(const Row<T>& row, Cut cut) {
  for (int32_t leaf = 0; leaf < row.num_leaves; ++leaf) {
    row.scratch->masses.data[leaf] =
        row.leaves[leaf].max >= cut.value ? kept_leaf_mass(row, leaf, cut) : 0.0;
  }
  return row.total_mass();
}

// Calls visit(id, logit) for every token that a cut keeps, in order of ids.
template <typename T, typename Visit>
inline void for_each_of(const Row<T>& row, Cut cut, Visit&& visit) {
  float x[kLeaf];
  for (int32_t leaf = 0; leaf < row.num_leaves; ++leaf) {
    if (row.leaves[leaf].max < cut.value) continue;
    int count = load_leaf(row, leaf, x);
    for (int i = 0; i < count; ++i) {
      int32_t id = leaf * kLeaf + i;
      if (cut.keeps(x[i], id)) visit(id, x[i]);
    }
  }
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
