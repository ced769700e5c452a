// SPDX-License-Identifier: Apache-2.0
// Bracket of the logit at which to cut the ranking of a row's tokens, and the thresholds that
// shrink the bracket.
#pragma once

#include <cfloat>

#include "sampling/row/cuda/row.cuh"
#include "sampling/row/cuda/row_passes.cuh"

namespace specops {

// A range that contains the logit at which the tokens, from the top of the ranking, reach a target
// mass or count: down to `low` they reach it, down to `high` they do not.
struct Bracket {
  uint32_t low, high;  // integers from ordered_bits()

  __device__ bool single() const { return high - low <= 1; }
};

// Shrinks the bracket with thresholds strictly inside it. For a few rounds they are evenly spaced
// in value, which suits logits; after that, evenly in representation, so that the bracket ends as
// one float.
template <typename T, bool kProcessed>
__device__ inline void narrow(const Row<T, kProcessed>& row,
                              bool by_mass,
                              int round,
                              Bracket* bracket) {
  float low = from_ordered_bits(bracket->low), high = from_ordered_bits(bracket->high);
  bool by_value = round < 4 && low > -FLT_MAX && high < FLT_MAX;
  __syncthreads();
  if (row.thread() < kThresholds) {
    uint32_t part = static_cast<uint32_t>(kThresholds - row.thread());
    float threshold;
    if (by_value) {
      double width = static_cast<double>(high) - low;
      threshold = static_cast<float>(low + width * part / (kThresholds + 1));
    } else {
      uint64_t width = bracket->high - bracket->low;
      threshold =
          from_ordered_bits(bracket->low + static_cast<uint32_t>(width * part / (kThresholds + 1)));
    }
    row.shared.thresholds[row.thread()] = threshold;
  }
  masses_from(row, by_mass);
  uint32_t lowest = bracket->low;
#pragma unroll 1
  for (int j = 0; j < kThresholds; ++j) {
    uint32_t bits = ordered_bits(row.shared.thresholds[j]);
    if (bits <= lowest || bits >= bracket->high) continue;
    if (row.shared.sums[j] >= row.shared.target) {
      bracket->low = bits;
      break;
    }
    bracket->high = bits;
  }
}

}  // namespace specops
