// SPDX-License-Identifier: Apache-2.0
// List of tokens copied from a row, each with a weight, and the search for the token at which their
// ranking reaches a target.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>

#include "common/simd.h"
#include "sampling/row/cpu/bracket.h"
#include "sampling/row/cpu/leaf.h"
#include "sampling/row/cpu/logit_lanes.h"
#include "sampling/row/cpu/ranking.h"

namespace specops::SPECOPS_ISA {
namespace {

constexpr int kListCapacity = 16384;  // tokens that can be copied from the row to the list
constexpr int kSorted = 64;           // at most this many tokens are sorted
constexpr int kListThresholds = 8;    // number of masses computed in one pass over a list

// The end of a growing list. It is a separate object, so that loops keep it in registers.
struct Appender {
  float* x;
  int32_t* id;
  int count;

  void append(F32x16 values, int32_t first_id, uint32_t mask) {
#if defined(SPECOPS_AVX512)
    __mmask16 m = static_cast<__mmask16>(mask);
    __m512i ids =
        _mm512_add_epi32(_mm512_set1_epi32(first_id),
                         _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
    // Compress in a register, because the form of the instruction that writes to memory is slow on
    // some CPUs.
    _mm512_storeu_ps(x + count, _mm512_maskz_compress_ps(m, values.v));
    _mm512_storeu_si512(id + count, _mm512_maskz_compress_epi32(m, ids));
    count += __builtin_popcount(mask);
#else
    float lanes[kLanes];
    store(lanes, values);
    for (; mask != 0; mask &= mask - 1) {
      int lane = __builtin_ctz(mask);
      x[count] = lanes[lane];
      id[count] = first_id + lane;
      ++count;
    }
#endif
  }
};

// Tokens in order of ids, each with a weight. Sixteen entries more than `capacity` are allocated,
// so that whole vectors can be stored.
struct TokenList {
  int count = 0;
  int capacity = 0;
  float* x = nullptr;
  float* w = nullptr;
  int32_t* id = nullptr;

  ~TokenList() { std::free(x); }

  // Grows the list if needed. Growing discards its contents.
  void reserve(int size) {
    if (size <= capacity) return;
    std::free(x);
    int64_t stride = (size + 2 * kLanes - 1) / kLanes * kLanes;
    x = static_cast<float*>(std::aligned_alloc(64, 3 * stride * sizeof(float)));
    w = x + stride;
    id = reinterpret_cast<int32_t*>(w + stride);
    capacity = size;
  }

  // Loops with stores copy the pointers to local variables: the compiler must assume that a store
  // changes the members.

  void weigh(float origin, float scale) {
    const float* from = x;
    float* to = w;
    for (int i = 0, end = count; i < end; i += kLanes) {
      store(to + i, weight(load(from + i), set1(origin), set1(scale)));
    }
  }

  void weigh_equally() {
    float* to = w;
    for (int i = 0, end = count; i < end; i += kLanes) store(to + i, set1(1.0f));
  }

  void number_from_zero() {
    int32_t* to = id;
    for (int i = 0, end = count; i < end; ++i) to[i] = i;
  }

  // Fills the rest of the last vector with tokens that are outside every bracket.
  void pad() {
    for (int i = count; i % kLanes != 0; ++i) {
      x[i] = -INFINITY;
      w[i] = 0.0f;
      id[i] = -1;
    }
  }

  double mass() const {
    double total = 0.0;
    for (int begin = 0; begin < count; begin += kLeaf) {
      total += segment_mass(begin, begin + kLeaf < count ? begin + kLeaf : count);
    }
    return total;
  }

  // Removes the tokens that the cut does not keep from the list, with their weights.
  void keep(Cut cut) {
    float *xs = x, *ws = w;
    int32_t* ids = id;
    int kept = 0;
    for (int i = 0, end = count; i < end; ++i) {
      xs[kept] = xs[i];
      ws[kept] = ws[i];
      ids[kept] = ids[i];
      kept += cut.keeps(xs[i], ids[i]);
    }
    count = kept;
    pad();
  }

  // Sets the weights of tokens that the cut does not keep to zero. All tokens stay in the list.
  void forget_weights_beyond(Cut cut) {
    float past = next_above(cut.value);
    for (int i = 0; i < count; i += kLanes) {
      // Ids ascend, so only the vector with the cut's last_id needs a test of each token.
      bool last = id[i] <= cut.last_id && (i + kLanes >= count || id[i + kLanes - 1] > cut.last_id);
      for (int j = i; last && j < i + kLanes; ++j) {
        if (!cut.keeps(x[j], id[j])) w[j] = 0.0f;
      }
      float least = id[i] <= cut.last_id ? cut.value : past;
      store(w + i, add_where_ge(zero(), load(w + i), load(x + i), set1(least)));
    }
  }

  float segment_mass(int begin, int end) const {
    F32x16 sum = zero();
    for (int i = begin; i < end; i += kLanes) sum = add(sum, load_partial(w + i, end - i));
    return reduce_add(sum);
  }

  int number_from(float least) const {
    int number = 0;
    for (int i = 0; i < count; i += kLanes) {
      number += __builtin_popcount(lanes_between(load(x + i), least, INFINITY));
    }
    return number;
  }

  // Returns the index of the first token with id >= token_id. The list must be in order of ids.
  int first_from(int32_t token_id) const {
    int low = 0, high = count;
    while (low < high) {
      int middle = low + (high - low) / 2;
      if (id[middle] < token_id) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  // Returns the weight of a token; 0 if the token is not in the list.
  float weight_of(int32_t token_id) const {
    int at = first_from(token_id);
    return at < count && id[at] == token_id ? w[at] : 0.0f;
  }

  // Returns the first token at which the running sum of weights exceeds the target.
  int32_t invert_cdf(double target) const {
    double before = 0.0, after = 0.0;
    int begin = 0;
    for (int next = 0; next < count && after <= target; next += kLeaf) {
      float own = segment_mass(next, next + kLeaf < count ? next + kLeaf : count);
      if (own <= 0.0f) continue;
      before = after;
      after = before + own;
      begin = next;
    }
    // Rounding may place the target just past the last token; then the last one is returned.
    int32_t found = id[begin];
    for (int i = begin; i < count && i < begin + kLeaf; ++i) {
      if (w[i] <= 0.0f) continue;
      found = id[i];
      before += w[i];
      if (before > target) break;
    }
    return found;
  }

  // Sets masses[j] to the mass of the listed tokens with x >= thresholds[j].
  void masses_from(const float* thresholds, double* masses) const {
    for (int j = 0; j < kListThresholds; ++j) masses[j] = 0.0;
    for (int begin = 0; begin < count; begin += kLeaf) {
      int end = begin + kLeaf < count ? begin + kLeaf : count;
      F32x16 sum[kListThresholds];
      for (int j = 0; j < kListThresholds; ++j) sum[j] = zero();
      for (int i = begin; i < end; i += kLanes) {
        F32x16 values = load(x + i), weights = load(w + i);
        for (int j = 0; j < kListThresholds; ++j) {
          sum[j] = add_where_ge(sum[j], weights, values, set1(thresholds[j]));
        }
      }
      for (int j = 0; j < kListThresholds; ++j) masses[j] += reduce_add(sum[j]);
    }
  }

  // Returns the cut after which the ranking first reaches the target mass. The list must have the
  // tokens of the bracket and none above them; bracket.above is the mass of those above.
  Cut select(Bracket bracket, double target) const {
    double outside = bracket.above;
    for (int round = 0;; ++round) {
      Candidate found[kSorted];
      int num_found = collect(bracket, found);
      if (num_found <= kSorted) return sorted_prefix(found, num_found, bracket, target);
      if (bracket.single()) return tied_prefix(bracket, target);
      float thresholds[kListThresholds];
      double masses[kListThresholds];
      spread<kListThresholds>(bracket.low, bracket.high, round, thresholds);
      masses_from(thresholds, masses);
      for (double& mass : masses) mass += outside;
      bracket.narrow(thresholds, masses, kListThresholds, target);
    }
  }

 private:
  struct Candidate {
    float x, w;
    int32_t id;
  };

  // Copies the bracket's tokens to `found` and returns their number; kSorted + 1 if there are more
  // than kSorted.
  int collect(const Bracket& bracket, Candidate* found) const {
    float low = from_ordered_bits(bracket.low), high = from_ordered_bits(bracket.high);
    int num_found = 0;
    for (int i = 0; i < count; i += kLanes) {
      uint32_t mask = lanes_between(load(x + i), low, high);
      if (i + kLanes > count) mask &= (1u << (count - i)) - 1;
      for (; mask != 0; mask &= mask - 1) {
        int at = i + __builtin_ctz(mask);
        if (num_found == kSorted) return kSorted + 1;
        found[num_found++] = {x[at], w[at], id[at]};
      }
    }
    return num_found;
  }

  static Cut sorted_prefix(Candidate* found, int num_found, const Bracket& bracket, double target) {
    for (int i = 1; i < num_found; ++i) {  // a stable sort, so that equal logits stay in id order
      Candidate moved = found[i];
      int j = i;
      for (; j > 0 && found[j - 1].x < moved.x; --j) found[j] = found[j - 1];
      found[j] = moved;
    }
    double mass = bracket.above;
    for (int i = 0; i < num_found; ++i) {
      mass += found[i].w;
      // Only rounding can lead past the last token.
      if (mass >= target || i == num_found - 1) return {found[i].x, found[i].id};
    }
    return {from_ordered_bits(bracket.low), INT32_MAX};
  }

  // Returns the cut inside a bracket whose tokens are all equal, by counting them in order of ids.
  Cut tied_prefix(const Bracket& bracket, double target) const {
    float value = from_ordered_bits(bracket.low);
    double mass = bracket.above;
    Cut cut{value, INT32_MAX};
    for (int i = 0; i < count; ++i) {
      if (x[i] != value) continue;
      cut.last_id = id[i];
      mass += w[i];
      if (mass >= target) break;
    }
    return cut;
  }
};

}  // namespace
}  // namespace specops::SPECOPS_ISA
