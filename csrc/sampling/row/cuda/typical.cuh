// SPDX-License-Identifier: Apache-2.0
// Typical-p: of the tokens that the other filters keep, keeps those whose surprise (-log of the
// probability) is nearest to the mean surprise.
#pragma once

#include "sampling/row/cuda/block_reduce.cuh"
#include "sampling/row/cuda/row.cuh"
#include "sampling/row/cuda/token_list.cuh"
#include "sampling/row/cuda/typical_passes.cuh"

namespace specops {

// Bracket of the cut, with distances as ordered integers: the tokens within `low` weigh less than
// the target, the tokens within `high` reach it.
struct DistanceBracket {
  int32_t low, high;

  __device__ bool single() const { return high - low <= 1; }
};

// Ranking by distance from the mean surprise, nearest first.
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

// Returns the bracket of all distances.
__device__ inline DistanceBracket all_distances() {
  return {-1, static_cast<int32_t>(__float_as_uint(INFINITY))};
}

// Sets list_x[i] to the mass of the tokens in the bins of surprise_bins() before bin i.
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

// Returns a bracket, a few bins wide on both sides of the mean, that most probably contains the
// cut.
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
  // Reduced as a Mass, because block_reduce of another type would use another address, which the
  // compiler would spill.
  low = static_cast<int>(block_reduce<Max>(row.shared, static_cast<Mass>(low)));
  high = static_cast<int>(block_reduce<Min>(row.shared, static_cast<Mass>(high)));
  DistanceBracket found = all_distances();
  auto bits = [](float bins) { return static_cast<int32_t>(__float_as_uint(bins / kBinsPerNat)); };
  if (low > 0) found.low = bits(static_cast<float>(low) - 0.125f);
  if (high < kSurpriseBins) found.high = bits(static_cast<float>(high) + 0.125f);
  return found;
}

// Shrinks a bracket that has more than one distance, with thresholds within `inside`. If both have
// the same upper end, there is no threshold at that end.
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

// Returns the distance of the listed token at which the tokens of the bracket reach the target.
// `nearer` is the mass of the tokens before the bracket. Rounding of the sum may make the answer
// wrong.
template <typename T, bool kProcessed>
__device__ __forceinline__ int32_t
listed_distance(const Row<T, kProcessed>& row, DistanceBracket bracket, Mass nearer, Mass target) {
  RankKey low = rank_key(-distance_of(bracket.high), INT32_MAX);
  RankKey high = rank_key(-distance_of(bracket.low + 1), 0);
  RankKey key = select_listed(row, true, low, high, nearer, target, ByDistance());
  return static_cast<int32_t>(__float_as_uint(fabsf(cut_at(key).value)));
}

// Returns the id of the last token to keep at this distance. All tokens at the distance must be in
// the list.
template <typename T, bool kProcessed>
__device__ __forceinline__ int32_t listed_last(const Row<T, kProcessed>& row,
                                               int32_t distance,
                                               Mass wanted) {
  float own = distance_of(distance);
  RankKey low = rank_key(-own, INT32_MAX), high = rank_key(-own, 0);
  return cut_at(select_listed(row, true, low, high, 0, wanted, ByDistance())).last_id;
}

// Returns the cut: the smallest distance within which tokens weigh `target`, and the last id to
// keep at that distance. If the bins give a good guess, this takes three passes: one fills the
// bins, one lists the tokens near the guessed distance, and one weighs the tokens that are nearer
// than the distance found in the list. The list is summed in another order, so the found distance
// must be verified. If it is wrong, or too many tokens are near the guess, the bracket shrinks.
// Leaves the sums of weigh_around in the statistics of the leaves.
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

// Keeps those tokens of shared.kept whose surprise -log(probability) is nearest to the mean
// surprise (the entropy), until they have typical_p of the mass; on equal distances, lower ids
// first. Leaves the cut in shared.typical and the masses of the leaves in row.masses().
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
  // Leaves before that of last_id keep all tokens at the cut's distance, later leaves none of them.
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
