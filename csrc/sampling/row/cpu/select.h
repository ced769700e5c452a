// SPDX-License-Identifier: Apache-2.0
// Selection, without sorting, of the token at which to cut a row's ranking. A bracket of two logits
// shrinks until the tokens in it fit a list, which is then searched.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "common/simd.h"
#include "sampling/row/cpu/bracket.h"
#include "sampling/row/cpu/logit_lanes.h"
#include "sampling/row/cpu/ranking.h"
#include "sampling/row/cpu/row.h"
#include "sampling/row/cpu/row_passes.h"
#include "sampling/row/cpu/token_list.h"

namespace specops::SPECOPS_ISA {
namespace {

// Copies every 32nd vector of a large row to the list, with weights, as a sample. Returns how many
// tokens of the row one sampled token represents; 0 if sampling does not pay off.
template <bool kCount, typename T>
inline double sample_row(const Row<T>& row) {
  if (row.num_leaves < 32 || row.num_leaves > 32 * (kListCapacity / kLeaf)) return 0.0;
  TokenList& list = row.scratch->list;
  float* x = list.x;
  int count = 0;
  for (int32_t leaf = 0; leaf + 1 < row.num_leaves; ++leaf) {
    for (int i = leaf % 32 * kLanes; i < kLeaf; i += 32 * kLanes) {
      store(x + count, load_clean(row.leaf_data(leaf), i, kLeaf));
      count += kLanes;
    }
  }
  list.count = count;
  list.number_from_zero();
  if (kCount) {
    list.weigh_equally();
  } else {
    list.weigh(row.max, row.scale);
  }
  return static_cast<double>(row.vocab_size) / list.count;
}

// Estimates thresholds around the target from the sample; returns false if it cannot. The estimate
// uses the mass below the cut: many tokens of little weight share it, so a sample estimates it well,
// even if a few tokens above the cut hold most of the mass.
template <bool kCount, typename T>
inline bool guess(
    const Row<T>& row, const Bracket& bracket, double target, double total, float* thresholds) {
  double ratio = sample_row<kCount>(row);
  const TokenList& list = row.scratch->list;
  if (ratio == 0.0) return false;
  if (list.number_from(from_ordered_bits(bracket.low)) * ratio < kListCapacity * 3 / 4)
    return false;
  double tolerance = 6.0 / std::sqrt(static_cast<double>(list.count));
  double sampled = list.mass(), low, high;
  if (kCount) {
    double expected = target / ratio, slack = 3.0 * std::sqrt(expected) + 1.0;
    low = expected + slack, high = expected - slack;
  } else {
    double below = (total - target) / ratio;
    low = sampled - below * (1.0 - tolerance), high = sampled - below * (1.0 + tolerance);
  }
  Bracket whole{ordered_bits(-FLT_MAX), ordered_bits(row.max) + 1, 0.0};
  float top = high > 0.0 ? list.select(whole, high).value : row.max;
  float bottom = low < sampled ? list.select(whole, low).value : from_ordered_bits(bracket.low);
  for (int j = 0; j < kThresholds; ++j) {
    double part = static_cast<double>(j) / (kThresholds - 1);
    thresholds[j] = static_cast<float>(top + (static_cast<double>(bottom) - top) * part);
  }
  return bottom <= top && bottom > -INFINITY;
}

template <typename T>
inline bool gather_bracket(const Row<T>& row, const Bracket& bracket, Cut base) {
  float low = from_ordered_bits(bracket.low), high = from_ordered_bits(bracket.high);
  Cut cut = low > base.value ? Cut{low, row.vocab_size - 1} : base;
  return gather(row, cut, high, row.scratch->list);
}

// Returns the cut inside a bracket that has more equal tokens than fit the list, by counting them
// in order of ids.
template <bool kCount, typename T>
inline Cut tied_prefix(const Row<T>& row, Cut base, const Bracket& bracket, double target) {
  Cut cut{from_ordered_bits(bracket.low), 0};
  float w[kLanes] = {1.0f};
  if (!kCount) store(w, weight(set1(cut.value), set1(row.max), set1(row.scale)));
  double mass = bracket.above;
  float x[kLeaf];
  for (int32_t leaf = 0; leaf < row.num_leaves; ++leaf) {
    if (row.leaves[leaf].max < cut.value) continue;
    int size = load_leaf(row, leaf, x);
    for (int i = 0; i < size; ++i) {
      int32_t id = leaf * kLeaf + i;
      if (x[i] != cut.value || !base.keeps(x[i], id)) continue;
      cut.last_id = id;
      mass += w[0];
      row.scratch->masses.data[leaf] += w[0];
      if (mass >= target) return cut;
    }
  }
  return cut;
}

// Returns the cut after which the ranking first reaches the target mass (or count); it keeps no
// token that `base` drops. On return, the bracket is the part of the ranking that is in the list.
// Unless counting, scratch->masses then has the mass of each leaf's kept tokens.
template <bool kCount, typename T>
inline Cut select(
    const Row<T>& row, Cut base, Bracket* bracket, double target, double total = 0.0) {
  TokenList& list = row.scratch->list;
  double* shares = row.scratch->masses.data;
  for (int32_t leaf = 0; leaf < row.num_leaves; ++leaf) shares[leaf] = 0.0;
  float thresholds[kThresholds];
  bool guessed = guess<kCount>(row, *bracket, target, total, thresholds);
  for (int round = 0; guessed || !gather_bracket(row, *bracket, base); ++round) {
    if (bracket->single()) return tied_prefix<kCount>(row, base, *bracket, target);
    if (!guessed) spread<kThresholds>(bracket->low, bracket->high, round, thresholds);
    guessed = false;
    double masses[kThresholds];
    masses_from<kCount>(row, thresholds, masses);
    int last = bracket->narrow(thresholds, masses, kThresholds, target);
    for (int32_t leaf = 0; last >= 0 && leaf < row.num_leaves; ++leaf) {
      shares[leaf] = row.scratch->sums.data[leaf * kThresholds + last];
    }
  }
  if (kCount) {
    list.weigh_equally();
  } else {
    list.weigh(row.max, row.scale);
  }
  list.pad();
  Cut cut = list.select(*bracket, target);
  if (kCount) return cut;
  list.forget_weights_beyond(cut);
  for (int32_t leaf = 0; leaf < row.num_leaves; ++leaf) {
    shares[leaf] +=
        list.segment_mass(row.scratch->segments.data[leaf], row.scratch->segments.data[leaf + 1]);
  }
  return cut;
}

// Returns the cut that keeps exactly `count` tokens, 1 <= count < vocab_size. Sets *listed if the
// list has these tokens.
template <typename T>
inline Cut select_count(const Row<T>& row, int64_t count, bool* listed) {
  TokenList& list = row.scratch->list;
  Bracket bracket{ordered_bits(-INFINITY), ordered_bits(row.max) + 1, 0.0};
  if (count <= row.num_leaves && row.num_leaves <= kListCapacity) {
    // At least `count` leaf maxima reach the count-th largest one, so at least `count` tokens do.
    list.count = row.num_leaves;
    for (int32_t leaf = 0; leaf < row.num_leaves; ++leaf) {
      list.x[leaf] = row.leaves[leaf].max;
      list.id[leaf] = leaf;
    }
    list.weigh_equally();
    list.pad();
    bracket.low = ordered_bits(list.select(bracket, static_cast<double>(count)).value);
  }
  Cut cut = select<true>(row, row.everything(), &bracket, static_cast<double>(count));
  *listed = bracket.above == 0.0 && !bracket.single();
  return cut;
}

// Returns the cut that keeps the smallest prefix of the ranking whose mass is at least top_p of the
// kept total.
template <typename T>
inline Cut select_mass(const Row<T>& row, Cut base, double total, float top_p) {
  double target = top_p * total;
  // Tokens whose weight is below half of (1 - top_p) * total / vocab_size together weigh too little
  // to matter.
  double lightest = 0.5 * (1.0 - top_p) * total / row.vocab_size;
  double value = row.max + std::log(lightest) / row.inverse;
  float floor = value > -FLT_MAX ? static_cast<float>(value) : -FLT_MAX;
  if (floor < base.value) floor = base.value;
  Bracket bracket{ordered_bits(floor), ordered_bits(row.max) + 1, 0.0};
  return select<false>(row, base, &bracket, target, total);
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
