// SPDX-License-Identifier: Apache-2.0
// Ranking of a row's tokens by logit (descending), then id (ascending): logits as integers, rank
// keys, and the cuts that filters make in the ranking.
#pragma once

#include <cfloat>

#include "common/device.cuh"

namespace specops {

// Returns an integer that has the same order as the float; -0 counts as 0.
__device__ inline uint32_t ordered_bits(float x) {
  uint32_t word = __float_as_uint(x + 0.0f);
  return word & 0x80000000u ? ~word : word | 0x80000000u;
}

__device__ inline float from_ordered_bits(uint32_t word) {
  return __uint_as_float(word & 0x80000000u ? word & 0x7fffffffu : ~word);
}

__device__ inline float next_above(float x) { return from_ordered_bits(ordered_bits(x) + 1); }

// Returns x with NaN as -inf and +inf as the largest finite float.
__device__ inline float clean(float x) { return fminf(fmaxf(x, -INFINITY), FLT_MAX); }

// A prefix of the ranking: the tokens with logits above `value`, and those with a logit equal to
// `value` and an id <= last_id.
struct Cut {
  float value;
  int32_t last_id;

  __device__ bool keeps(float x, int32_t id) const {
    return x > value || (x == value && id <= last_id);
  }
};

__device__ inline Cut tighter(Cut a, Cut b) {
  if (a.value != b.value) return a.value > b.value ? a : b;
  return a.last_id < b.last_id ? a : b;
}

// Returns the cut that keeps every token.
__device__ inline Cut everything() { return {-INFINITY, INT32_MAX}; }

// Position of a token in the ranking as an integer: a larger key ranks earlier, and no two keys are
// equal.
using RankKey = unsigned long long;

__device__ inline RankKey rank_key(float x, int32_t id) {
  return RankKey{ordered_bits(x)} << 31 | static_cast<uint32_t>(INT32_MAX - id);
}

__device__ inline Cut cut_at(RankKey key) {
  return {from_ordered_bits(static_cast<uint32_t>(key >> 31)),
          INT32_MAX - static_cast<int32_t>(key & INT32_MAX)};
}

}  // namespace specops
