// SPDX-License-Identifier: Apache-2.0
// The filters of a row, and the weights of the tokens they keep. Order of the filters: temperature,
// top-k, top-p of the remaining tokens, min-p, typical-p.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/simd.h"
#include "sampling/row/cpu/row.h"
#include "sampling/row/cpu/row_passes.h"
#include "sampling/row/cpu/select.h"
#include "sampling/row/cpu/token_list.h"
#include "sampling/row/cpu/typical.h"
#include "sampling/row/filters.h"

namespace specops::SPECOPS_ISA {
namespace {

// Returns whether filter() needs the scan's second sum: the mass of all tokens.
inline bool needs_warm(const SamplingParams& params) {
  if (is_greedy(params) || params.top_k > 0) return false;
  return params.top_p < 1.0f || (params.min_p == 0.0f && params.typical_p >= 1.0f);
}

// Applies the filters, in the order temperature, top-k, top-p of the remaining tokens, min-p,
// typical-p. The scan must have been called with want_warm = needs_warm(params).
template <typename T>
inline void filter(Row<T>& row, const SamplingParams& params) {
  if (row.max == -INFINITY || is_greedy(params)) {
    row.kept = Kept::kOne;
    row.one = row.argmax();
    row.kept_mass = 1.0;
    return;
  }
  TokenList& list = row.scratch->list;
  row.list = &list;
  Cut cut = row.everything();
  row.kept = Kept::kScanned;
  bool weighed = true;  // whether the weights to which row.kept refers are computed
  if (params.top_k > 0) {
    weighed = false;
    if (params.top_k < row.vocab_size) {
      bool listed = false;
      cut = select_count(row, params.top_k, &listed);
      if (listed) {
        row.kept = Kept::kListed;
        weighed = true;
        list.keep(cut);
        list.weigh(row.max, row.scale);
      }
    }
  }
  if (params.top_p < 1.0f) {
    if (weighed && row.kept == Kept::kListed) {
      Bracket bracket{ordered_bits(cut.value), ordered_bits(row.max) + 1, 0.0};
      cut = list.select(bracket, params.top_p * list.mass());
      list.keep(cut);
    } else {
      cut = select_mass(row, cut, weighed ? row.warm_mass() : mass_of_kept(row, cut), params.top_p);
      row.kept = Kept::kByLeaf;
      weighed = true;
    }
  }
  if (params.min_p > 0.0f) {
    // min-p keeps tokens with weight >= min_p * the largest weight, which is 1. The threshold must
    // not be -inf, which would mean that min-p is off: for that case, the scan has not computed the
    // sum.
    constexpr float kLowest = -3.402823466e38f;
    double least = row.max + std::log(static_cast<double>(params.min_p)) / row.inverse;
    float value = least > kLowest ? static_cast<float>(least) : kLowest;
    Cut tighter_cut = tighter(cut, {value < row.max ? value : row.max, row.vocab_size - 1});
    if (tighter_cut.value != cut.value || tighter_cut.last_id != cut.last_id) {
      cut = tighter_cut;
      if (weighed && row.kept == Kept::kListed) {
        list.keep(cut);
      } else {
        weighed = false;
      }
    }
  }
  row.cut = cut;
  if (params.typical_p < 1.0f) return keep_typical(row, params.typical_p, weighed);
  if (!weighed) {
    if (gather(row, cut, INFINITY, list)) {
      row.kept = Kept::kListed;
      list.weigh(row.max, row.scale);
    } else {
      row.kept = Kept::kByLeaf;
      mass_of_kept(row, cut);
    }
  }
  if (row.kept == Kept::kScanned) row.scanned_masses();
  row.kept_mass = row.kept == Kept::kListed ? list.mass() : row.total_mass();
}

// The functions below concern the kept tokens, which are those that filter() does not drop. The
// weight of a token is relative to the largest weight of the row. The distribution to draw from,
// target_probs, is weight / row.kept_mass.

// Returns the weight of a token; 0 if the filters drop it or its id is past the vocabulary.
template <typename T>
inline double weight_of(const Row<T>& row, int32_t id) {
  if (id >= row.vocab_size) return 0.0;
  if (row.kept == Kept::kOne) return id == row.one ? 1.0 : 0.0;
  if (row.kept == Kept::kListed) return row.list->weight_of(id);
  float x = row.logit(id);
  int32_t leaf = id / kLeaf;
  if (row.leaves[leaf].max == -INFINITY || !row.cut.keeps(x, id)) return 0.0;
  float lanes[kLanes];
  store(lanes, weight(set1(x), set1(row.leaf_origin(leaf)), set1(row.scale)));
  return lanes[0] * row.weight_unit(leaf);
}

// Calls visit(id, weight) for every token whose weight is above 0, in order of ids.
template <typename T, typename Visit>
inline void for_each_kept(const Row<T>& row, Visit&& visit) {
  if (row.kept == Kept::kOne) return visit(row.one, 1.0);
  if (row.kept == Kept::kListed) {
    for (int i = 0; i < row.list->count; ++i) {
      if (row.list->w[i] > 0.0f) visit(row.list->id[i], static_cast<double>(row.list->w[i]));
    }
    return;
  }
  for (int32_t leaf = 0; leaf < row.num_leaves; ++leaf) {
    if (row.scratch->masses.data[leaf] <= 0.0) continue;
    double unit = row.weight_unit(leaf);
    for_each_weighed(row, leaf, row.cut, row.leaf_origin(leaf), [&](int i, F32x16 weights) {
      float w[kLanes];
      store(w, weights);
      for (int j = 0; j < kLanes; ++j) {
        if (w[j] > 0.0f) visit(leaf * kLeaf + i + j, w[j] * unit);
      }
    });
  }
}

// Returns the mass of the kept tokens of a leaf.
template <typename T>
inline double mass_of_leaf(const Row<T>& row, int32_t leaf) {
  if (row.kept == Kept::kOne) return row.one / kLeaf == leaf ? 1.0 : 0.0;
  if (row.kept != Kept::kListed) return row.scratch->masses.data[leaf];
  return row.list->segment_mass(row.list->first_from(leaf * kLeaf),
                                row.list->first_from((leaf + 1) * kLeaf));
}

// Writes the weights of a leaf's tokens to w[0, kLeaf), up to a common factor, and returns this
// factor. Dropped tokens get weight 0.
template <typename T>
inline double weigh_kept_leaf(const Row<T>& row, int32_t leaf, float* w) {
  int32_t first = leaf * kLeaf;
  if (row.kept == Kept::kOne || row.kept == Kept::kListed) {
    for (int i = 0; i < kLeaf; i += kLanes) store(w + i, zero());
    if (row.kept == Kept::kOne) {
      if (row.one / kLeaf == leaf) w[row.one - first] = 1.0f;
      return 1.0;
    }
    int end = row.list->first_from(first + kLeaf);
    for (int i = row.list->first_from(first); i < end; ++i)
      w[row.list->id[i] - first] = row.list->w[i];
    return 1.0;
  }
  for_each_weighed(
      row, leaf, row.cut, row.leaf_origin(leaf), [&](int i, F32x16 x) { store(w + i, x); });
  int end = (row.leaf_size(leaf) + kLanes - 1) / kLanes * kLanes;
  for (int i = end; i < kLeaf; i += kLanes) store(w + i, zero());
  return row.weight_unit(leaf);
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
