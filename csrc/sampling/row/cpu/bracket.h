// SPDX-License-Identifier: Apache-2.0
// Bracket of the logit at which to cut the ranking of a row's tokens, and the thresholds that
// shrink the bracket.
#pragma once

#include <cfloat>
#include <cstdint>

#include "sampling/row/cpu/ranking.h"

namespace specops::SPECOPS_ISA {
namespace {

// Writes thresholds strictly inside a bracket, highest first. For a few rounds they are evenly
// spaced in value, which suits logits; after that, evenly in representation, so that the bracket
// ends as one float.
template <int count>
inline void spread(uint32_t low, uint32_t high, int round, float* thresholds) {
  float low_value = from_ordered_bits(low), high_value = from_ordered_bits(high);
  bool by_value = round < 4 && low_value > -FLT_MAX && high_value < FLT_MAX;
  for (int j = 0; j < count; ++j) {
    int part = count - j;
    if (by_value) {
      double width = static_cast<double>(high_value) - low_value;
      thresholds[j] = static_cast<float>(low_value + width * part / (count + 1));
    } else {
      uint64_t width = uint64_t{high} - low;
      thresholds[j] = from_ordered_bits(low + static_cast<uint32_t>(width * part / (count + 1)));
    }
  }
}

// A range that contains the logit at which the tokens, from the top of the ranking, reach a target
// mass or count: down to `low` they reach it, down to `high` they do not.
struct Bracket {
  uint32_t low, high;  // integers from ordered_bits()
  double above;        // mass (or count) of the tokens with logits >= `high`

  bool single() const { return high - low <= 1; }

  // Shrinks the bracket. `thresholds` descend; `masses` has, for each threshold, the mass of the
  // tokens that reach it. Returns the index of the threshold that is the new `high`, or -1 if
  // `high` is unchanged.
  int narrow(const float* thresholds, const double* masses, int count, double target) {
    int moved = -1;
    for (int j = 0; j < count; ++j) {
      uint32_t bits = ordered_bits(thresholds[j]);
      if (bits <= low || bits >= high) continue;
      if (masses[j] >= target) {
        low = bits;
        break;
      }
      high = bits;
      above = masses[j];
      moved = j;
    }
    return moved;
  }
};

}  // namespace
}  // namespace specops::SPECOPS_ISA
