// SPDX-License-Identifier: Apache-2.0
// Selection, without sorting, of the token at which to cut a row's ranking. A bracket of two logits
// shrinks until the tokens in it fit the list, which is then searched.
#pragma once

#include <cfloat>

#include "sampling/row/cuda/block_reduce.cuh"
#include "sampling/row/cuda/bracket.cuh"
#include "sampling/row/cuda/row.cuh"
#include "sampling/row/cuda/row_passes.cuh"
#include "sampling/row/cuda/token_list.cuh"

namespace specops {

// Starts a selection. Its inputs are stored in shared memory, to save registers in every thread.
template <typename T, bool kProcessed>
__device__ inline void begin_selection(const Row<T, kProcessed>& row,
                                       Cut base,
                                       Mass target,
                                       Mass total) {
  __syncthreads();
  if (row.thread() == 0) {
    row.shared.cut = base;
    row.shared.target = target;
    row.shared.total = total;
  }
  __syncthreads();
}

// Copies one pseudo-random vector from each of many equal stretches of a large row to the list, as
// a sample. Returns how many tokens of the row one sampled token represents.
template <typename T, bool kProcessed>
__device__ inline double sample_row(const Row<T, kProcessed>& row) {
  constexpr int kWidth = Leaf<T>::kWidth;
  int vectors = row.logits.size / kWidth;
  int stride = (vectors + kListCapacity / kWidth - 1) / (kListCapacity / kWidth);
  int number = vectors / stride;
  __syncthreads();
#pragma unroll 1
  for (int stretch = row.thread(); stretch < number; stretch += row.threads()) {
    uint32_t hash = static_cast<uint32_t>(stretch) * 2654435761u >> 8;
    int vector = stretch * stride + static_cast<int>(hash % static_cast<uint32_t>(stride));
    uint4 loaded = Vector<T>::load(row.logits, vector * kWidth);
    uint32_t words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      row.shared.list_x[stretch * kWidth + i] = clean(Vector<T>::element(words, i));
      row.shared.list_id[stretch * kWidth + i] = stretch * kWidth + i;
    }
  }
  if (row.thread() == 0) row.shared.list_count = number * kWidth;
  __syncthreads();
  return static_cast<double>(row.logits.size) / (number * kWidth);
}

// Estimates bounds around the cut from a sample. There are many tokens of little weight below the
// cut, so the estimate of their mass is good even if few tokens have the rest of the mass.
template <typename T, bool kProcessed>
__device__ inline void guess(
    const Row<T, kProcessed>& row, bool by_mass, float floor, float* from, float* upto) {
  double ratio = sample_row(row);
  double count = static_cast<double>(row.shared.list_count);
  Cut reachable{floor, INT32_MAX};
  if (static_cast<double>(listed_total(row, false, reachable)) * ratio < 0.75 * kListCapacity)
    return;
  double low, high, sampled = count;
  if (by_mass) {
    sampled = static_cast<double>(listed_total(row, true, everything()));
    double below = static_cast<double>(row.shared.total - row.shared.target) / ratio;
    double tolerance = 6.0f / sqrtf(static_cast<float>(count));
    low = sampled - below * (1.0 - tolerance);
    high = sampled - below * (1.0 + tolerance);
  } else {
    double expected = static_cast<double>(row.shared.target) / ratio;
    double slack = 3.0f * sqrtf(static_cast<float>(expected)) + 1.0f;
    low = expected + slack;
    high = expected - slack;
  }
#pragma unroll 1
  for (int side = 0; side < 2; ++side) {
    double wanted = side == 0 ? high : low;
    if (wanted < 1.0 || wanted >= sampled) continue;
    RankKey key = select_listed(row,
                                by_mass,
                                rank_key(-INFINITY, INT32_MAX),
                                rank_key(row.max, 0),
                                0,
                                static_cast<Mass>(wanted));
    float value = cut_at(key).value;
    if (side == 0) {
      *upto = next_above(value);
    } else {
      *from = fmaxf(value, floor);
    }
  }
}

template <typename T, bool kProcessed>
__device__ inline int number_tied(const Row<T, kProcessed>& row, int32_t leaf, float value) {
  Limits limits = limits_of(row, leaf);
  if (row.stats(leaf).max < value || value < limits.least) return 0;
  Leaf<T> x;
  load_leaf(row, x, leaf, limits);
  int number = 0;
#pragma unroll
  for (int i = 0; i < Leaf<T>::kOwn; ++i) number += clean(x[i]) == value;
  return __reduce_add_sync(kFullMask, number);
}

// Returns the cut inside a bracket that has more equal tokens than fit the list, by counting them
// in order of ids. Each warp counts a run of leaves.
template <typename T, bool kProcessed>
__device__ inline Cut tied_prefix(const Row<T, kProcessed>& row,
                                  float value,
                                  bool by_mass,
                                  Mass above) {
  Mass target = row.shared.target;
  Mass each = by_mass ? row.mass(row.weight(value)) : 1;
  if (each == 0) each = 1;
  Mass wanted = target > above ? (target - above + each - 1) / each : 0;
  int32_t run = (row.num_leaves - 1) / num_warps() + 1;
  int32_t begin = warp_id() * run, end = min(begin + run, row.num_leaves);
  Mass number = 0, total;
#pragma unroll 1
  for (int32_t leaf = begin; leaf < end; ++leaf) number += number_tied(row, leaf, value);
  Mass own = lane_id() == 0 ? number : 0;
  Mass upto = __shfl_sync(kFullMask, block_inclusive(row.shared, own, &total), 0) - number;
  wanted = wanted < 1 ? 1 : wanted > total ? total : wanted;
#pragma unroll 1
  for (int32_t leaf = begin; leaf < end && upto < wanted; ++leaf) {
    Mass found = static_cast<Mass>(number_tied(row, leaf, value));
    Mass kept = found < wanted - upto ? found : wanted - upto;
    if (by_mass && lane_id() == 0) row.masses()[leaf] += kept * each;
    upto += kept;
    if (kept > 0 && upto == wanted) {
      // Find the last kept token among the equal ones of this leaf.
      int own_number = 0;
      for_each_in_order(row.logits, leaf, [&](float x, int32_t) { own_number += x == value; });
      int before = static_cast<int>(warp_inclusive(static_cast<Mass>(own_number))) - own_number;
      for_each_in_order(row.logits, leaf, [&](float x, int32_t id) {
        before += x == value;
        if (x == value && before == static_cast<int>(kept)) row.shared.rest_id = id;
      });
    }
  }
  __syncthreads();
  return {value, row.shared.rest_id};
}

// Returns the cut at which the ranking first reaches shared.target (a mass or a count); it keeps no
// token that shared.cut drops. Tokens below `low` are ignored. Sets *listed if the list has every
// kept token. By mass, row.masses() is set to the kept mass of every leaf; by count, to zero if
// *listed.
template <typename T, bool kProcessed>
__device__ __forceinline__ Cut
select(const Row<T, kProcessed>& row, bool by_mass, float low, bool* listed) {
  Bracket bracket{ordered_bits(low), ordered_bits(row.max) + 1};
  float from = low, upto = next_above(row.max);
  if (row.logits.size > kListCapacity) guess(row, by_mass, low, &from, &upto);
#pragma unroll 1
  for (int round = 0;; ++round) {
    Mass above = gather(row, from, upto, by_mass);
    Mass target = row.shared.target;
    bool fits = row.shared.list_count <= kListCapacity;
    bool guessed = round == 0;
    if (fits && (!guessed || above < target)) {
      bool reaches = !guessed || ordered_bits(from) <= bracket.low ||
                     above + listed_total(row, by_mass, everything()) >= target;
      if (reaches) {
        RankKey key = select_listed(
            row, by_mass, rank_key(from, INT32_MAX), rank_key(upto, INT32_MAX) - 1, above, target);
        Cut cut = cut_at(key);
        *listed = above == 0;
        if (by_mass) deposit(row, cut);
        return cut;
      }
      bracket.high = ordered_bits(from);
    } else if (guessed) {
      if (above < target) {
        bracket.high = ordered_bits(upto);
      } else {
        bracket.low = ordered_bits(upto);
      }
    } else if (bracket.single()) {
      *listed = false;
      return tied_prefix(row, from_ordered_bits(bracket.low), by_mass, above);
    }
    if (!bracket.single()) narrow(row, by_mass, round, &bracket);
    from = from_ordered_bits(bracket.low);
    upto = from_ordered_bits(bracket.high);
  }
}

// Returns a logit that at least `count` tokens reach: the count-th largest of the leaf maxima.
template <typename T, bool kProcessed>
__device__ inline float count_floor(const Row<T, kProcessed>& row, int32_t count) {
  if (count > row.num_leaves || row.num_leaves > kListCapacity) return -INFINITY;
  __syncthreads();
#pragma unroll 1
  for (int32_t leaf = row.thread(); leaf < row.num_leaves; leaf += row.threads()) {
    row.shared.list_x[leaf] = row.stats(leaf).max;
    row.shared.list_id[leaf] = leaf;
  }
  if (row.thread() == 0) row.shared.list_count = row.num_leaves;
  __syncthreads();
  RankKey key = select_listed(row,
                              false,
                              rank_key(-INFINITY, INT32_MAX),
                              rank_key(row.max, 0),
                              0,
                              static_cast<Mass>(count));
  return cut_at(key).value;
}

// Returns the cut that keeps exactly `count` tokens, 1 <= count < vocab_size. Sets *listed if the
// list has these tokens (and perhaps more).
template <typename T, bool kProcessed>
__device__ inline Cut select_count(const Row<T, kProcessed>& row, int32_t count, bool* listed) {
  begin_selection(row, everything(), static_cast<Mass>(count), 0);
  return select(row, false, count_floor(row, count), listed);
}

// Returns the smallest logit that can matter for top-p. Tokens whose weight is below half of (1 -
// top_p) * total / vocab_size together weigh too little to matter. Tokens that min-p drops do not
// matter either.
template <typename T, bool kProcessed>
__device__ inline float mass_floor(const Row<T, kProcessed>& row) {
  float total = static_cast<float>(row.shared.total) / row.unit();
  float rest = 0.5f * (1.0f - row.shared.filters.top_p) * total;
  double lightest =
      row.max + static_cast<double>(logf(rest / row.logits.size)) / row.shared.inverse;
  float low = lightest > -FLT_MAX ? static_cast<float>(lightest) : -FLT_MAX;
  return fmaxf(fmaxf(low, row.shared.likely), row.shared.cut.value);
}

}  // namespace specops
