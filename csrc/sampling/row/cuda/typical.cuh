// SPDX-License-Identifier: Apache-2.0
// Typical-p: of the tokens that the other filters keep, those whose surprise is nearest to its
// mean.
#pragma once

#include "sampling/row/cuda/block_reduce.cuh"
#include "sampling/row/cuda/row.cuh"
#include "sampling/row/cuda/token_list.cuh"
#include "sampling/row/cuda/typical_passes.cuh"

namespace specops {

// Distances, as integers, between which the cut is: what is no further than `low` weighs too little,
// what is no further than `high` enough.
struct DistanceBracket {
  int32_t low, high;

  __device__ bool single() const { return high - low <= 1; }
};

// The ranking by distance, the nearest first.
struct ByDistance {
  template <typename AnyRow>
  __device__ RankKey key(const AnyRow& row, float x, int32_t id) const {
    return rank_key(-row.distance(x), id);
  }
  template <typename AnyRow>
  __device__ Mass mass(const AnyRow& row, float x) const {
    return counted_mass(row, x);
  }
};

// The whole of it: every distance there is.
__device__ inline DistanceBracket all_distances() {
  return {-1, static_cast<int32_t>(__float_as_uint(INFINITY))};
}

// Turns surprise_bins() into what the tokens before each bin's beginning weigh, in list_x.
template <typename T, bool kProcessed>
__device__ __forceinline__ void sum_surprise_bins(const Row<T, kProcessed>& row) {
  auto mass_of = [&](int bin) {
    float first = ptx::exp2_approx(static_cast<float>(-bin) * (kLog2e / kBinsPerNat));
    float number = static_cast<float>(surprise_bins(row.shared)[bin]) / kBinUnit;
    return static_cast<Mass>(number * first * row.unit());
  };
  int run = (kSurpriseBins - 1) / row.threads() + 1;
  int begin = min(row.thread() * run, kSurpriseBins), end = min(begin + run, kSurpriseBins);
  Mass own = 0, total;
#pragma unroll 1
  for (int bin = begin; bin < end; ++bin) own += mass_of(bin);
  Mass before = block_inclusive(row.shared, own, &total) - own;
#pragma unroll 1
  for (int bin = begin; bin < end; ++bin) {
    row.shared.list_x[bin] = static_cast<float>(before);
    before += mass_of(bin);
  }
  if (row.thread() == 0) row.shared.list_x[kSurpriseBins] = static_cast<float>(total);
  __syncthreads();
}

// A bracket that most probably is right, a few bins wide on both sides of the mean.
template <typename T, bool kProcessed>
__device__ __forceinline__ DistanceBracket guess_distances(const Row<T, kProcessed>& row,
                                                           Mass target) {
  sum_surprise_bins(row);
  auto place = [](float bin) {
    return static_cast<int>(fminf(fmaxf(bin, 0.0f), static_cast<float>(kSurpriseBins)));
  };
  auto between = [&](float from, float upto) {
    return row.shared.list_x[place(upto)] - row.shared.list_x[place(from)];
  };
  float mean = row.shared.typical.mean * kBinsPerNat;
  float slack = row.shared.list_x[kSurpriseBins] / 2048.0f;
  float wanted = static_cast<float>(target);
  int low = 0, high = kSurpriseBins;
#pragma unroll 1
  for (int bins = 1 + row.thread(); bins < kSurpriseBins; bins += row.threads()) {
    float from = mean - static_cast<float>(bins), upto = mean + static_cast<float>(bins);
    if (between(floorf(from), ceilf(upto)) + slack < wanted) low = bins;
    if (between(ceilf(from), floorf(upto)) - slack >= wanted) high = min(high, bins);
  }
  // As masses, for which a block has an address at hand: of another width it would be spilled.
  low = static_cast<int>(block_reduce<Max>(row.shared, static_cast<Mass>(low)));
  high = static_cast<int>(block_reduce<Min>(row.shared, static_cast<Mass>(high)));
  DistanceBracket found = all_distances();
  auto bits = [](float bins) { return static_cast<int32_t>(__float_as_uint(bins / kBinsPerNat)); };
  if (low > 0) found.low = bits(static_cast<float>(low) - 0.125f);
  if (high < kSurpriseBins) found.high = bits(static_cast<float>(high) + 0.125f);
  return found;
}

// Shrinks a bracket of more than one distance by thresholds inside another one; where it ends with
// that, no threshold is spent on the end.
template <typename T, bool kProcessed>
__device__ __forceinline__ void narrow(const Row<T, kProcessed>& row,
                                       Mass target,
                                       DistanceBracket inside,
                                       DistanceBracket* bracket) {
  __syncthreads();
  if (row.thread() < kThresholds) {
    int parts = kThresholds + (inside.high == bracket->high ? 1 : 0);
    int64_t width = int64_t{inside.high} - inside.low;
    int32_t bits = inside.low + static_cast<int32_t>(width * (row.thread() + 1) / parts);
    row.shared.thresholds[row.thread()] = distance_of(max(bits, inside.low + 1));
    row.shared.sums[row.thread()] = 0;
  }
  __syncthreads();
  masses_within(row);
#pragma unroll 1
  for (int j = 0; j < kThresholds; ++j) {
    int32_t bits = static_cast<int32_t>(__float_as_uint(row.shared.thresholds[j]));
    if (bits <= bracket->low || bits >= bracket->high) continue;
    if (row.shared.sums[j] >= target) {
      bracket->high = bits;
      break;
    }
    bracket->low = bits;
  }
  __syncthreads();
}

// The distance of the listed token at which those that lie within the bracket, `nearer` before them,
// reach the target, as far as a sum of their masses tells.
template <typename T, bool kProcessed>
__device__ __forceinline__ int32_t
listed_distance(const Row<T, kProcessed>& row, DistanceBracket bracket, Mass nearer, Mass target) {
  RankKey low = rank_key(-distance_of(bracket.high), INT32_MAX);
  RankKey high = rank_key(-distance_of(bracket.low + 1), 0);
  RankKey key = select_listed(row, true, low, high, nearer, target, ByDistance());
  return static_cast<int32_t>(__float_as_uint(fabsf(cut_at(key).value)));
}

// The token of that distance, all of which are listed, up to which they are kept.
template <typename T, bool kProcessed>
__device__ __forceinline__ int32_t listed_last(const Row<T, kProcessed>& row,
                                               int32_t distance,
                                               Mass wanted) {
  float own = distance_of(distance);
  RankKey low = rank_key(-own, INT32_MAX), high = rank_key(-own, 0);
  return cut_at(select_listed(row, true, low, high, 0, wanted, ByDistance())).last_id;
}

// Where distances are to be cut: the least one, within which tokens weigh `target`, and the last id
// of its own. Three passes, where the bins tell it: one took them, one lists what is about as far,
// one weighs what is nearer than the distance that the list tells. What the list tells is a sum of
// masses in another order, so it is looked at; where it is wrong, or too many tokens are about as
// far, brackets shrink. Leaves the sums of weigh_around.
template <typename T, bool kProcessed>
__device__ __forceinline__ TypicalCut cut_distances(const Row<T, kProcessed>& row, Mass target) {
  DistanceBracket known = all_distances();
  DistanceBracket tried = guess_distances(row, target);
#pragma unroll 1
  while (true) {
    Mass nearer = gather_distances(row, tried.low, tried.high);
    int count = row.shared.list_count;
    bool listed = count <= kListCapacity;
    if (nearer >= target) {
      known.high = tried.low;
    } else {
      known.low = max(known.low, tried.low);
      int32_t distance = known.high;
      if (listed && count > 0) distance = listed_distance(row, tried, nearer, target);
      if ((listed && count > 0) || known.single()) {
        Around around = weigh_around(row, distance);
        if (around.nearer < target && target <= around.upto) {
          Mass wanted = target - around.nearer;
          int32_t last = listed && count > 0 ? listed_last(row, distance, wanted)
                                             : id_reaching(row, distance, wanted);
          return {row.shared.typical.mean, distance_of(distance), last};
        }
        if (around.nearer >= target) {
          known.high = distance - 1;
        } else {
          known.low = distance;
        }
      } else if (listed) {
        known.low = tried.high;
      }
    }
    bool about_as_far = !listed && nearer < target;
    if (!known.single()) narrow(row, target, about_as_far ? tried : known, &known);
    tried = known;
  }
}

// Of the tokens in shared.kept, those whose surprise -log(probability) is nearest to its mean, the
// entropy, until they have typical_p of the mass; ties to the lower id. Leaves the cut in
// shared.typical, and its mass in row.masses().
template <typename T, bool kProcessed>
__device__ __forceinline__ void keep_typical(const Row<T, kProcessed>& row) {
  Moments moments = take_moments(row);
  double part =
      static_cast<double>(row.shared.filters.typical_p) * static_cast<double>(moments.total);
  Mass target = part < 1.0 ? 1 : static_cast<Mass>(part);
  if (row.thread() == 0) {
    double mean = static_cast<double>(moments.surprise) / static_cast<double>(moments.total);
    row.shared.typical.mean = static_cast<float>(mean);
  }
  __syncthreads();
  TypicalCut cut = cut_distances(row, target);
  __syncthreads();
  if (row.thread() == 0) row.shared.typical = cut;
  __syncthreads();
  // Ties lie before the last one's leaf, behind it, or on both sides of it.
  int32_t divided = cut.last_id / Leaf<T>::kSize;
#pragma unroll 1
  for (int32_t leaf = row.thread(); leaf < row.num_leaves; leaf += row.threads()) {
    if (leaf == divided) continue;
    LeafStats sums = row.stats(leaf);
    row.masses()[leaf] = row.mass(leaf < divided ? sums.raw : sums.warm);
  }
  if (warp_id() == 0) {
    Leaf<T> x;
    x.load(row.logits, divided);
    float sums[4] = {};
    x.for_each([&](int i, float value, int place) {
      bool kept = row.keeps(value, divided * Leaf<T>::kSize + place);
      sums[i % 4] += kept ? row.weight(value) : 0.0f;
    });
    Mass own = row.mass(warp_sum((sums[0] + sums[1]) + (sums[2] + sums[3])));
    if (lane_id() == 0) row.masses()[divided] = own;
  }
  __syncthreads();
}

}  // namespace specops
