// SPDX-License-Identifier: Apache-2.0
// Ranking of a row's tokens by logit (descending), then id (ascending): logits as integers, and the
// cuts that filters make in the ranking.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace specops::SPECOPS_ISA {
namespace {

// Returns an integer that has the same order as the float. Both zeros give the same integer, and
// neighboring floats give neighboring integers.
inline uint32_t ordered_bits(float x) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  return word & 0x80000000u ? ~word + 1 : word | 0x80000000u;
}

inline float from_ordered_bits(uint32_t word) {
  word = word & 0x80000000u ? word & 0x7fffffffu : ~(word - 1);
  float x;
  std::memcpy(&x, &word, 4);
  return x;
}

inline float next_above(float x) { return from_ordered_bits(ordered_bits(x) + 1); }

// Returns x with NaN as -inf and +inf as the largest finite float.
inline float clean(float x) {
  float floored = x > -INFINITY ? x : -INFINITY;
  return floored < FLT_MAX ? floored : FLT_MAX;
}

// A prefix of the ranking: the tokens with logits above `value`, and those with a logit equal to
// `value` and an id <= last_id.
struct Cut {
  float value;
  int32_t last_id;

  bool keeps(float x, int32_t id) const { return x > value || (x == value && id <= last_id); }
};

inline Cut tighter(Cut a, Cut b) {
  if (a.value != b.value) return a.value > b.value ? a : b;
  return a.last_id < b.last_id ? a : b;
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
