// SPDX-License-Identifier: Apache-2.0
// One row of logits -> its token and logprob. sample and verify are loops around this one function.
// Included by *_cpu.cpp files only; everything has internal linkage.
//
// Order: the vocabulary is cut into leaves of kLeaf ids. A sum over a leaf is sixteen fp32 lanes in
// id order and one fixed tree; leaves are folded left in fp64. NaN counts as -inf and +inf as the
// largest finite float. Tokens are ordered by (logit descending, id ascending).
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "common/simd.h"

namespace specops::SPECOPS_ISA {
namespace {

constexpr int kLeaf = 1024;

struct SamplingParams {
  float temperature;
  int32_t top_k;
  float top_p;
  float min_p;
};

struct RowChoice {
  int32_t token_id;
  float logprob;
};

struct LeafStats {
  float max;   // of the leaf's logits
  float raw;   // sum of e^(logit - max)
  float warm;  // sum of e^((logit - max) / temperature)
};

// Memory of one thread that grows to the largest row it has met.
struct LeafBuffer {
  LeafStats* stats = nullptr;
  int64_t capacity = 0;
  ~LeafBuffer() { std::free(stats); }

  LeafStats* reserve(int64_t num_leaves) {
    if (num_leaves > capacity) {
      std::free(stats);
      stats = static_cast<LeafStats*>(std::malloc(num_leaves * sizeof(LeafStats)));
      capacity = num_leaves;
    }
    return stats;
  }
};
thread_local LeafBuffer tls_leaves;

// The tokens that a filter keeps: logits above value, and those equal to it up to token last_id.
struct Cut {
  float value;
  int32_t last_id;
};

inline Cut tighter(Cut a, Cut b) {
  if (a.value != b.value) return a.value > b.value ? a : b;
  return a.last_id < b.last_id ? a : b;
}

// Floats as integers of the same order, for bisection over every representable threshold.
inline uint32_t ordered_bits(float x) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  return word & 0x80000000u ? ~word : word | 0x80000000u;
}

inline float from_ordered_bits(uint32_t word) {
  word = word & 0x80000000u ? word & 0x7fffffffu : ~word;
  float x;
  std::memcpy(&x, &word, 4);
  return x;
}

inline F32x16 clean(F32x16 x) { return min(max(x, set1(-INFINITY)), set1(FLT_MAX)); }

inline float clean(float x) {
  float floored = x > -INFINITY ? x : -INFINITY;
  return floored < FLT_MAX ? floored : FLT_MAX;
}

template <typename T>
class Row {
 public:
  Row(const T* logits, int64_t vocab_size, float temperature)
      : logits_(logits),
        vocab_size_(static_cast<int32_t>(vocab_size)),
        num_leaves_(static_cast<int32_t>((vocab_size + kLeaf - 1) / kLeaf)) {
    // Within the finite floats, so that 0 * inv_temperature is 0 and -inf stays -inf.
    float inverse = temperature > 0.0f ? 1.0f / temperature : 1.0f;
    inverse_ = inverse > FLT_MAX ? FLT_MAX : inverse < FLT_MIN ? FLT_MIN : inverse;
  }

  // The one read of the row from memory: maxima, and the two sums that were asked for.
  void scan(bool want_raw, bool want_warm) {
    leaves_ = tls_leaves.reserve(num_leaves_);
    max_ = -INFINITY;
    for (int32_t leaf = 0; leaf < num_leaves_; ++leaf) {
      leaves_[leaf] = scan_leaf(leaf, want_raw, want_warm);
      if (leaves_[leaf].max > max_) max_ = leaves_[leaf].max;
    }
    if (!want_raw || max_ == -INFINITY) return;
    double sum = 0.0;
    for (int32_t leaf = 0; leaf < num_leaves_; ++leaf) {
      if (leaves_[leaf].max == -INFINITY) continue;
      sum += leaves_[leaf].raw * std::exp(static_cast<double>(leaves_[leaf].max) - max_);
    }
    log_sum_ = std::log(sum);
  }

  float lse() const { return max_ == -INFINITY ? max_ : static_cast<float>(max_ + log_sum_); }

  // The raw log-softmax of a logit of this row.
  float logprob(float logit) const {
    if (max_ == -INFINITY) return max_;
    return static_cast<float>((static_cast<double>(clean(logit)) - max_) - log_sum_);
  }

  float logit(int32_t id) const { return clean(to_float(logits_[id])); }

  int32_t argmax() const {
    if (max_ == -INFINITY) return 0;
    for (int32_t leaf = 0; leaf < num_leaves_; ++leaf) {
      if (leaves_[leaf].max != max_) continue;
      int32_t id = leaf * kLeaf;
      while (logit(id) != max_) ++id;
      return id;
    }
    return 0;
  }

  // temperature -> top-k -> top-p of what is left -> min-p -> inverse CDF in token-id order.
  // `uniform` is called once, and only when there is something to decide.
  template <typename Uniform>
  int32_t choose(const SamplingParams& params, Uniform&& uniform) const {
    if (max_ == -INFINITY) return 0;
    Cut cut{-INFINITY, vocab_size_ - 1};
    bool kept_all = true;
    if (params.top_k > 0 && params.top_k < vocab_size_) {
      cut = select_count(params.top_k);
      kept_all = false;
    }
    if (params.top_p < 1.0f) {
      cut = select_mass(cut, params.top_p);
      kept_all = false;
    }
    if (params.min_p > 0.0f) {
      // weight >= min_p * the largest weight, which is 1
      double least = max_ + std::log(static_cast<double>(params.min_p)) / inverse_;
      float value = static_cast<float>(least);
      cut = tighter(cut, {value < max_ ? value : max_, vocab_size_ - 1});
      kept_all = false;
    }
    return invert_cdf(cut, kept_all, uniform());
  }

  // The cut that keeps exactly count tokens, 1 <= count < vocab_size.
  Cut select_count(int64_t count) const {
    // Invariant: low keeps at least count tokens, high fewer.
    uint32_t low = ordered_bits(-INFINITY), high = ordered_bits(max_) + 1;
    while (high - low > 1) {
      uint32_t middle = low + (high - low) / 2;
      if (count_from(from_ordered_bits(middle)) >= count) {
        low = middle;
      } else {
        high = middle;
      }
    }
    float value = from_ordered_bits(low);
    int64_t above = high > ordered_bits(max_) ? 0 : count_from(from_ordered_bits(high));
    return {value, nth_tie(value, vocab_size_ - 1, [&](int64_t n) { return above + n >= count; })};
  }

  // Calls visit(id, logit) for every token the cut keeps, in id order.
  template <typename Visit>
  void for_each_kept(Cut cut, Visit&& visit) const {
    float x[kLeaf];
    for (int32_t leaf = 0; leaf < num_leaves_; ++leaf) {
      if (leaves_[leaf].max < cut.value) continue;
      int count = load_leaf(leaf, x);
      for (int i = 0; i < count; ++i) {
        int32_t id = leaf * kLeaf + i;
        if (keeps(cut, x[i], id)) visit(id, x[i]);
      }
    }
  }

 private:
  static bool keeps(Cut cut, float x, int32_t id) {
    return x > cut.value || (x == cut.value && id <= cut.last_id);
  }

  int leaf_size(int32_t leaf) const {
    int32_t rest = vocab_size_ - leaf * kLeaf;
    return rest < kLeaf ? rest : kLeaf;
  }

  LeafStats scan_leaf(int32_t leaf, bool want_raw, bool want_warm) const {
    const T* x = logits_ + static_cast<int64_t>(leaf) * kLeaf;
    int size = leaf_size(leaf);
    F32x16 top = set1(-INFINITY);
    for (int i = 0; i < size; i += kLanes) {
      top = max(load_partial(x + i, size - i, -INFINITY), top);  // skips NaN
    }
    LeafStats stats{clean(reduce_max(top)), 0.0f, 0.0f};
    if (stats.max == -INFINITY) return stats;
    // The second look finds the leaf in L1.
    if (want_raw) stats.raw = leaf_mass(x, size, stats.max, 1.0f);
    if (want_warm) {
      stats.warm =
          want_raw && inverse_ == 1.0f ? stats.raw : leaf_mass(x, size, stats.max, inverse_);
    }
    return stats;
  }

  // sum of e^((x - origin) * inverse)
  static float leaf_mass(const T* x, int size, float origin, float inverse) {
    F32x16 sum = zero();
    for (int i = 0; i < size; i += kLanes) {
      sum = add(sum, weight(clean(load_partial(x + i, size - i, -INFINITY)), origin, inverse));
    }
    return reduce_add(sum);
  }

  static F32x16 weight(F32x16 x, float origin, float inverse) {
    return exp(mul(sub(x, set1(origin)), set1(inverse)));
  }

  // Clean logits of a leaf, filled up with -inf to whole vectors. Returns the leaf's size.
  int load_leaf(int32_t leaf, float* x) const {
    const T* source = logits_ + static_cast<int64_t>(leaf) * kLeaf;
    int size = leaf_size(leaf);
    for (int i = 0; i < size; i += kLanes) {
      store(x + i, clean(load_partial(source + i, size - i, -INFINITY)));
    }
    return size;
  }

  // How many logits are at least value.
  int64_t count_from(float value) const {
    int64_t total = 0;
    float x[kLeaf];
    for (int32_t leaf = 0; leaf < num_leaves_; ++leaf) {
      if (leaves_[leaf].max < value) continue;
      int size = load_leaf(leaf, x);
      int32_t count = 0;
      for (int i = 0; i < size; ++i) count += x[i] >= value;
      total += count;
    }
    return total;
  }

  // Mass of the kept tokens of one leaf, in units of e^((origin) / temperature).
  float kept_leaf_mass(int32_t leaf, Cut cut, float origin) const {
    float x[kLeaf];
    int size = load_leaf(leaf, x);
    F32x16 sum = zero();
    for (int i = 0; i < size; i += kLanes) {
      float w[kLanes];
      store(w, weight(load(x + i), origin, inverse_));
      for (int j = 0; j < kLanes; ++j) {
        if (!keeps(cut, x[i + j], leaf * kLeaf + i + j)) w[j] = 0.0f;
      }
      sum = add(sum, load(w));
    }
    return reduce_add(sum);
  }

  // Mass of the kept tokens of the row; the largest logit weighs 1.
  double kept_mass(Cut cut) const {
    double total = 0.0;
    for (int32_t leaf = 0; leaf < num_leaves_; ++leaf) {
      if (leaves_[leaf].max >= cut.value) total += kept_leaf_mass(leaf, cut, max_);
    }
    return total;
  }

  // The id of the first token equal to value for which enough(how many there were) holds, or the
  // last one up to last_id.
  template <typename Enough>
  int32_t nth_tie(float value, int32_t last_id, Enough&& enough) const {
    int64_t count = 0;
    int32_t found = 0;
    float x[kLeaf];
    for (int32_t leaf = 0; leaf < num_leaves_; ++leaf) {
      if (leaves_[leaf].max < value) continue;
      int size = load_leaf(leaf, x);
      for (int i = 0; i < size; ++i) {
        int32_t id = leaf * kLeaf + i;
        if (x[i] != value || id > last_id) continue;
        found = id;
        if (enough(++count)) return found;
      }
    }
    return found;
  }

  // The smallest prefix of the kept tokens whose mass is at least top_p of theirs.
  Cut select_mass(Cut base, float top_p) const {
    double target = static_cast<double>(top_p) * kept_mass(base);
    auto mass_from = [&](uint32_t bits) {
      return kept_mass(tighter(base, {from_ordered_bits(bits), vocab_size_ - 1}));
    };
    // Invariant: low keeps enough mass, high too little.
    uint32_t low = ordered_bits(base.value), high = ordered_bits(max_) + 1;
    while (high - low > 1) {
      uint32_t middle = low + (high - low) / 2;
      if (mass_from(middle) >= target) {
        low = middle;
      } else {
        high = middle;
      }
    }
    float value = from_ordered_bits(low);
    double above = high > ordered_bits(max_) ? 0.0 : mass_from(high);
    float w[kLanes];
    store(w, weight(set1(value), max_, inverse_));
    int32_t last_id = value == base.value ? base.last_id : vocab_size_ - 1;
    return {value,
            nth_tie(value, last_id, [&](int64_t n) { return above + n * double{w[0]} >= target; })};
  }

  // The first kept token, in id order, at which the running mass exceeds uniform * total.
  int32_t invert_cdf(Cut cut, bool kept_all, float uniform) const {
    auto mass = [&](int32_t leaf) {
      const LeafStats& stats = leaves_[leaf];
      if (stats.max == -INFINITY || stats.max < cut.value) return 0.0;
      float sum = kept_all ? stats.warm : kept_leaf_mass(leaf, cut, stats.max);
      return sum * leaf_scale(leaf);
    };
    double total = 0.0;
    for (int32_t leaf = 0; leaf < num_leaves_; ++leaf) total += mass(leaf);
    double target = static_cast<double>(uniform) * total;
    double before = 0.0, after = 0.0;
    int32_t chosen = 0;
    for (int32_t leaf = 0; leaf < num_leaves_ && after <= target; ++leaf) {
      double own = mass(leaf);
      if (own <= 0.0) continue;
      before = after;
      after = before + own;
      chosen = leaf;
    }
    // Inside the leaf, in its own units; rounding may leave the target just past its last token.
    double rest = (target - before) / leaf_scale(chosen);
    double sum = 0.0;
    int32_t found = 0;
    float x[kLeaf];
    int size = load_leaf(chosen, x);
    for (int i = 0; i < size; i += kLanes) {
      float w[kLanes];
      store(w, weight(load(x + i), leaves_[chosen].max, inverse_));
      for (int j = 0; j < kLanes; ++j) {
        int32_t id = chosen * kLeaf + i + j;
        if (w[j] <= 0.0f || !keeps(cut, x[i + j], id)) continue;
        found = id;
        sum += w[j];
        if (sum > rest) return found;
      }
    }
    return found;
  }

  double leaf_scale(int32_t leaf) const {
    return std::exp((static_cast<double>(leaves_[leaf].max) - max_) * inverse_);
  }

  const T* logits_;
  int32_t vocab_size_;
  int32_t num_leaves_;
  float inverse_;
  LeafStats* leaves_ = nullptr;
  float max_ = -INFINITY;
  double log_sum_ = 0.0;
};

// The row function of sample and verify: the token, and its raw log-softmax when wanted.
template <typename T, typename Uniform>
[[maybe_unused]] RowChoice choose_token(const T* logits,
                                        int64_t vocab_size,
                                        const SamplingParams& params,
                                        bool want_logprob,
                                        Uniform&& uniform) {
  bool greedy = params.temperature == 0.0f || params.top_k == 1 || params.top_p == 0.0f;
  Row<T> row(logits, vocab_size, params.temperature);
  row.scan(want_logprob, !greedy);
  int32_t token_id = greedy ? row.argmax() : row.choose(params, uniform);
  return {token_id, want_logprob ? row.logprob(row.logit(token_id)) : 0.0f};
}

// A token that is taken unseen, with its raw log-softmax when wanted.
template <typename T>
[[maybe_unused]] RowChoice score_token(const T* logits,
                                       int64_t vocab_size,
                                       int32_t token_id,
                                       bool want_logprob) {
  if (!want_logprob) return {token_id, 0.0f};
  Row<T> row(logits, vocab_size, 0.0f);
  row.scan(true, false);
  return {token_id, row.logprob(row.logit(token_id))};
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
