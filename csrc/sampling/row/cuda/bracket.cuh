// SPDX-License-Identifier: Apache-2.0
// A bracket around the point at which to cut the ranking, and the thresholds that shrink it.
#pragma once

#include <cfloat>

#include "sampling/row/cuda/row.cuh"
#include "sampling/row/cuda/row_passes.cuh"

namespace specops {

// A bracket of the logit at which the ranking's prefix reaches a target: at `low` it does, at
// `high` it does not.
struct Bracket {
  uint32_t low, high;  // as ordered bits

  __device__ bool single() const { return high - low <= 1; }
};

// Shrinks the bracket by thresholds strictly inside it. They are evenly spaced in value for a few
// rounds, which suits logits, and then in representation, which ends in a bracket of one float.
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
