// SPDX-License-Identifier: Apache-2.0
// The list: tokens copied from the row to shared memory, and the search for the token at which
// their ranking reaches a target.
#pragma once

#include "sampling/row/cuda/block_reduce.cuh"
#include "sampling/row/cuda/row.cuh"

namespace specops {

constexpr int kBinsPerLane = kBins / kWarpSize;
constexpr int kLowMassBits = 20;  // splits masses over two 32-bit histograms without overflow

// Calls visit(logit, id) for every token of the list that the cut keeps.
template <typename T, bool kProcessed, typename Visit>
__device__ inline void for_each_listed(const Row<T, kProcessed>& row, Cut cut, Visit visit) {
#pragma unroll 1
  for (int i = row.thread(); i < row.shared.list_count; i += row.threads()) {
    if (cut.keeps(row.shared.list_x[i], row.shared.list_id[i])) {
      visit(row.shared.list_x[i], row.shared.list_id[i]);
    }
  }
}

template <typename T, bool kProcessed>
__device__ inline Mass amount(const Row<T, kProcessed>& row, bool by_mass, float x) {
  return by_mass ? row.mass(row.weight(x)) : 1;
}

// Returns the mass or the count of the tokens of the list that the cut keeps.
template <typename T, bool kProcessed>
__device__ inline Mass listed_total(const Row<T, kProcessed>& row, bool by_mass, Cut cut) {
  Mass total = 0;
  for_each_listed(row, cut, [&](float x, int32_t) { total += amount(row, by_mass, x); });
  return block_reduce<Add>(row.shared, total);
}

// Adds the mass of each listed token that the cut keeps to the mass of its leaf.
template <typename T, bool kProcessed>
__device__ inline void deposit(const Row<T, kProcessed>& row, Cut cut) {
  for_each_listed(row, cut, [&](float x, int32_t id) {
    atomicAdd(&row.masses()[id / Leaf<T>::kSize], row.mass(row.weight(x)));
  });
  __syncthreads();
}

__device__ inline Mass bin_amount(const RowShared& shared, bool by_mass, int bin) {
  if (!by_mass) return shared.number[bin];
  return (Mass{shared.high_mass[bin]} << kLowMassBits) + shared.low_mass[bin];
}

// Selects the bin of a histogram at which the target is reached. Called by the first warp, with
// eight bins per lane.
__device__ inline void find_bin(RowShared& shared,
                                bool by_mass,
                                RankKey low,
                                RankKey high,
                                int shift,
                                Mass above,
                                Mass target) {
  int first = lane_id() * kBinsPerLane;
  Mass own = 0;
  uint32_t number = 0;
#pragma unroll 1
  for (int bin = first; bin < first + kBinsPerLane; ++bin) {
    own += bin_amount(shared, by_mass, bin);
    number += shared.number[bin];
  }
  Mass before = above + warp_inclusive(own) - own;
  unsigned reached = __ballot_sync(kFullMask, number > 0 && before + own >= target);
  unsigned filled = __ballot_sync(kFullMask, number > 0);
  int chosen = reached != 0 ? __ffs(static_cast<int>(reached)) - 1
                            : kWarpSize - 1 - __clz(static_cast<int>(filled));
  if (filled == 0 && lane_id() == 0) shared.bin_number = 0;
  if (filled == 0 || lane_id() != chosen) return;
  int found = first;
  Mass found_before = before;
#pragma unroll 1
  for (int bin = first; bin < first + kBinsPerLane; ++bin) {
    if (shared.number[bin] == 0) continue;
    found = bin;
    found_before = before;
    before += bin_amount(shared, by_mass, bin);
    if (before >= target) break;
  }
  shared.bin_number = shared.number[found];
  shared.above = found_before;
  RankKey top = high - (static_cast<RankKey>(found) << shift);
  RankKey bottom = top - ((RankKey{1} << shift) - 1);
  shared.key_high = top;
  shared.key_low = bottom > low && bottom <= top ? bottom : low;
}

// Ranking by logit: the key of a token, and its mass.
struct ByLogit {
  template <typename AnyRow>
  __device__ RankKey key(const AnyRow& /*row*/, float x, int32_t id) const {
    return rank_key(x, id);
  }
  template <typename AnyRow>
  __device__ Mass mass(const AnyRow& row, float x) const {
    return row.mass(row.weight(x));
  }
};

// Returns the key, in [low, high], of the listed token at which the ranking first reaches the
// target. If it is never reached, returns the key of the last token; if no token is in the range,
// high + 1. `above` is the mass of the tokens before the range. Keys are divided into 256 bins, and
// then the bin at which the target is reached is divided again.
template <typename T, bool kProcessed, typename Ranking = ByLogit>
__device__ inline RankKey select_listed(const Row<T, kProcessed>& row,
                                        bool by_mass,
                                        RankKey low,
                                        RankKey high,
                                        Mass above,
                                        Mass target,
                                        Ranking ranking = {}) {
  RankKey none = high + 1;
  int count = row.shared.list_count;
  while (true) {
    RankKey range = high - low;
    int upper = static_cast<int>(range >> 32);
    int bits = upper != 0 ? 64 - __clz(upper) : 32 - __clz(static_cast<int>(range));
    int shift = bits > 8 ? bits - 8 : 0;
#pragma unroll 1
    for (int bin = row.thread(); bin < kBins; bin += row.threads()) {
      row.shared.number[bin] = row.shared.low_mass[bin] = row.shared.high_mass[bin] = 0;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = row.thread(); i < count; i += row.threads()) {
      RankKey key = ranking.key(row, row.shared.list_x[i], row.shared.list_id[i]);
      if (key < low || key > high) continue;
      int bin = static_cast<int>((high - key) >> shift);
      atomicAdd(&row.shared.number[bin], 1u);
      if (!by_mass) continue;
      Mass own = ranking.mass(row, row.shared.list_x[i]);
      atomicAdd(&row.shared.low_mass[bin], static_cast<uint32_t>(own & ((1u << kLowMassBits) - 1)));
      atomicAdd(&row.shared.high_mass[bin], static_cast<uint32_t>(own >> kLowMassBits));
    }
    __syncthreads();
    if (warp_id() == 0) find_bin(row.shared, by_mass, low, high, shift, above, target);
    __syncthreads();
    low = row.shared.key_low;
    high = row.shared.key_high;
    above = row.shared.above;
    if (row.shared.bin_number <= 1) break;
  }
  if (row.shared.bin_number == 0) return none;
#pragma unroll 1
  for (int i = row.thread(); i < count; i += row.threads()) {
    RankKey key = ranking.key(row, row.shared.list_x[i], row.shared.list_id[i]);
    if (key >= low && key <= high) row.shared.key = key;
  }
  __syncthreads();
  return row.shared.key;
}

}  // namespace specops
