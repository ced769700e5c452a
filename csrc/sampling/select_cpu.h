// SPDX-License-Identifier: Apache-2.0
// Where a ranking by (logit descending, id ascending) is to be cut, found without a sort: brackets of
// thresholds shrink until the tokens between them fit a list, then a small one is sorted. Included
// by *_cpu.cpp files only; everything has internal linkage.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "common/simd.h"

namespace specops::SPECOPS_ISA {
namespace {

constexpr int kLeaf = 1024;            // elements whose fp32 sum is one unit of every longer sum
constexpr int kMaxCandidates = 16384;  // tokens that leave the row for a list
constexpr int kSorted = 64;            // tokens worth sorting
constexpr int kThresholds = 4;         // masses taken in one pass over a row
constexpr int kListThresholds = 8;     // masses taken in one pass over a list

// The tokens that a filter keeps: logits above value, and those equal to it up to token last_id.
struct Cut {
  float value;
  int32_t last_id;

  bool keeps(float x, int32_t id) const { return x > value || (x == value && id <= last_id); }
};

inline Cut tighter(Cut a, Cut b) {
  if (a.value != b.value) return a.value > b.value ? a : b;
  return a.last_id < b.last_id ? a : b;
}

// Floats as integers of the same order; the two zeros are one, and no integer lies between neighbours.
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

// NaN as -inf, +inf as the largest finite float.
inline F32x16 clean(F32x16 x) { return min(max(x, set1(-INFINITY)), set1(FLT_MAX)); }

inline float clean(float x) {
  float floored = x > -INFINITY ? x : -INFINITY;
  return floored < FLT_MAX ? floored : FLT_MAX;
}

// sum, plus w in the lanes where x >= threshold.
inline F32x16 add_where_ge(F32x16 sum, F32x16 w, F32x16 x, F32x16 threshold) {
#if defined(SPECOPS_AVX512)
  __mmask16 mask = _mm512_cmp_ps_mask(x.v, threshold.v, _CMP_GE_OQ);
  return {_mm512_mask_add_ps(sum.v, mask, sum.v, w.v)};
#elif defined(SPECOPS_AVX2)
  __m256 lo = _mm256_and_ps(_mm256_cmp_ps(x.lo, threshold.lo, _CMP_GE_OQ), w.lo);
  __m256 hi = _mm256_and_ps(_mm256_cmp_ps(x.hi, threshold.hi, _CMP_GE_OQ), w.hi);
  return {_mm256_add_ps(sum.lo, lo), _mm256_add_ps(sum.hi, hi)};
#else
  F32x16 out;
  for (int i = 0; i < 16; ++i) {
    out.v[i] = sum.v[i] + (x.v[i] >= threshold.v[i] ? w.v[i] : 0.0f);
  }
  return out;
#endif
}

// Which lanes hold low <= x < high.
inline uint32_t lanes_between(F32x16 x, float low, float high) {
#if defined(SPECOPS_AVX512)
  __mmask16 mask = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(low), _CMP_GE_OQ);
  return _mm512_mask_cmp_ps_mask(mask, x.v, _mm512_set1_ps(high), _CMP_LT_OQ);
#elif defined(SPECOPS_AVX2)
  __m256 lows = _mm256_set1_ps(low), highs = _mm256_set1_ps(high);
  int lo = _mm256_movemask_ps(
      _mm256_and_ps(_mm256_cmp_ps(x.lo, lows, _CMP_GE_OQ), _mm256_cmp_ps(x.lo, highs, _CMP_LT_OQ)));
  int hi = _mm256_movemask_ps(
      _mm256_and_ps(_mm256_cmp_ps(x.hi, lows, _CMP_GE_OQ), _mm256_cmp_ps(x.hi, highs, _CMP_LT_OQ)));
  return static_cast<uint32_t>(lo | hi << 8);
#else
  uint32_t mask = 0;
  for (int i = 0; i < 16; ++i) mask |= uint32_t{x.v[i] >= low && x.v[i] < high} << i;
  return mask;
#endif
}

// e^((x - origin) * inverse) for x <= origin, given scale = inverse * log2(e); at most 1, and exactly
// 1 at the origin. Relative error about 2e-7 (1e-7 more per unit of the exponent); 0 for -inf, NaN and
// below 2^-125. (The leaner sibling of simd.h's exp: no argument is above 0.)
inline F32x16 weight(F32x16 x, F32x16 origin, F32x16 scale) {
  F32x16 t = mul(sub(x, origin), scale);
  t = min(max(t, set1(-200.0f)), zero());
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
  F32x16 magic = set1(12582912.0f);
  F32x16 shifted = add(t, magic);
  F32x16 r = sub(t, sub(shifted, magic));
  F32x16 p = set1(1.326472731e-3f);
  p = fma(p, r, set1(9.671512991e-3f));
  p = fma(p, r, set1(5.550733581e-2f));
  p = fma(p, r, set1(2.402224243e-1f));
  p = fma(p, r, set1(6.931470037e-1f));
  p = fma(p, r, set1(1.0f));
#if defined(SPECOPS_AVX512)
  __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23);
  __mmask16 normal = _mm512_cmp_ps_mask(t.v, _mm512_set1_ps(-125.5f), _CMP_GE_OQ);
  __m512i word = _mm512_maskz_add_epi32(normal, _mm512_castps_si512(p.v), exponent);
  return {_mm512_castsi512_ps(word)};
#elif defined(SPECOPS_AVX2)
  auto half = [](__m256 t, __m256 shifted, __m256 p) {
    __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
    __m256i word = _mm256_add_epi32(_mm256_castps_si256(p), exponent);
    __m256 normal = _mm256_cmp_ps(t, _mm256_set1_ps(-125.5f), _CMP_GE_OQ);
    return _mm256_and_ps(_mm256_castsi256_ps(word), normal);
  };
  return {half(t.lo, shifted.lo, p.lo), half(t.hi, shifted.hi, p.hi)};
#else
  F32x16 out;
  for (int i = 0; i < 16; ++i) {
    uint32_t word, exponent;
    std::memcpy(&word, &p.v[i], 4);
    std::memcpy(&exponent, &shifted.v[i], 4);
    word = t.v[i] >= -125.5f ? word + (exponent << 23) : 0u;
    std::memcpy(&out.v[i], &word, 4);
  }
  return out;
#endif
}

// Thresholds strictly inside a bracket, highest first. Even in value for a few rounds, which suits
// logits; then even in representation, which ends in a bracket of one float.
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

// The ranking's prefix that reaches a target: at `low` it does, at `high` it does not.
struct Bracket {
  uint32_t low, high;  // ordered bits
  double above;        // mass from high upwards

  bool single() const { return high - low <= 1; }

  // thresholds descend, masses (from each threshold upwards) ascend. Returns which threshold is the
  // new high, -1 for none.
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

// The end of a list that grows: a value of its own, which a loop keeps in registers.
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
    // Compressed in a register: the form that writes to memory is slow on some CPUs.
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

// Tokens in id order with a weight each: sixteen more than fit, so that whole vectors can be stored.
struct Candidates {
  int count = 0;
  int capacity = 0;
  float* x = nullptr;
  float* w = nullptr;
  int32_t* id = nullptr;

  ~Candidates() { std::free(x); }

  // Forgets what it holds where it has to grow.
  void reserve(int size) {
    if (size <= capacity) return;
    std::free(x);
    int64_t stride = (size + 2 * kLanes - 1) / kLanes * kLanes;
    x = static_cast<float*>(std::aligned_alloc(64, 3 * stride * sizeof(float)));
    w = x + stride;
    id = reinterpret_cast<int32_t*>(w + stride);
    capacity = size;
  }

  // Loops that store have their pointers in registers: a store might change the members.

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

  // Fills up the last vector with tokens that no bracket holds.
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

  // Drops what the cut does not keep, and its weights.
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

  // The same by weight alone, so that the tokens stay where they are.
  void forget_weights_beyond(Cut cut) {
    float past = next_above(cut.value);
    for (int i = 0; i < count; i += kLanes) {
      // ids ascend: ties count up to the vector that holds the cut's last token
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

  // Of a list in id order: where the tokens from token_id on begin.
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

  // 0 for a token that is not in the list.
  float weight_of(int32_t token_id) const {
    int at = first_from(token_id);
    return at < count && id[at] == token_id ? w[at] : 0.0f;
  }

  // Drops the tokens outside the typical set. Leaves something else than logits in x.
  void keep_typical(float origin, float inverse, float typical_p) {
    pad();
    double total = mass(), moment = 0.0;
    for (int begin = 0; begin < count; begin += kLeaf) {
      int end = begin + kLeaf < count ? begin + kLeaf : count;
      F32x16 sum = zero();
      for (int i = begin; i < end; i += kLanes) {
        F32x16 distance = mul(sub(load(x + i), set1(origin)), set1(inverse));
        distance = max(distance, set1(-200.0f));  // e^-200 weighs nothing
        store(x + i, distance);
        sum = fma(distance, load(w + i), sum);
      }
      moment += reduce_add(sum);
    }
    F32x16 mean = set1(static_cast<float>(moment / total));
    for (int i = 0; i < count; i += kLanes) {
      F32x16 above = sub(load(x + i), mean), below = sub(mean, load(x + i));
      store(x + i, min(above, below));  // -|distance - mean|
    }
    pad();
    Bracket bracket{ordered_bits(-256.0f), ordered_bits(0.0f) + 1, 0.0};
    keep(select(bracket, typical_p * total));
  }

  // The first token at which the running weight exceeds the target.
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
    // Rounding may leave the target just past the last token.
    int32_t found = id[begin];
    for (int i = begin; i < count && i < begin + kLeaf; ++i) {
      if (w[i] <= 0.0f) continue;
      found = id[i];
      before += w[i];
      if (before > target) break;
    }
    return found;
  }

  // masses[j] = mass of the tokens with x >= thresholds[j].
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

  // The cut after which the ranking's mass first reaches the target. The list holds the bracket's
  // tokens and none above them: their mass is bracket.above.
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

  // Copies the bracket's tokens; gives up with kSorted + 1 when there are more.
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
    for (int i = 1; i < num_found; ++i) {  // stable, so that equal logits stay in id order
      Candidate moved = found[i];
      int j = i;
      for (; j > 0 && found[j - 1].x < moved.x; --j) found[j] = found[j - 1];
      found[j] = moved;
    }
    double mass = bracket.above;
    for (int i = 0; i < num_found; ++i) {
      mass += found[i].w;
      // Past the last one only rounding can lead.
      if (mass >= target || i == num_found - 1) return {found[i].x, found[i].id};
    }
    return {from_ordered_bits(bracket.low), INT32_MAX};
  }

  // All of the bracket's tokens are equal: count them off in id order.
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
