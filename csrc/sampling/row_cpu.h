// SPDX-License-Identifier: Apache-2.0
// One row of logits -> what its filters keep, and a token of it. Included by *_cpu.cpp files only; everything has internal linkage.
//
// Order: the vocabulary is cut into leaves of kLeaf ids. A sum over a leaf is sixteen fp32 lanes in
// id order and one fixed tree; leaves are folded left in fp64. NaN counts as -inf and +inf as the
// largest finite float. Tokens are ordered by (logit descending, id ascending).
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "sampling/filters.h"
#include "sampling/scratch_cpu.h"

namespace specops::SPECOPS_ISA {
namespace {

template <typename T>
class Row {
 public:
  Row(const T* logits, int64_t vocab_size, float temperature)
      : logits_(logits),
        vocab_size_(static_cast<int32_t>(vocab_size)),
        num_leaves_(static_cast<int32_t>((vocab_size + kLeaf - 1) / kLeaf)) {
    // Within the finite floats, so that 0 * inv_temperature is 0 and -inf stays -inf.
    float inverse = temperature > 0.0f ? 1.0f / temperature : 1.0f;
    inverse_ = inverse > FLT_MAX / 2 ? FLT_MAX / 2 : inverse < FLT_MIN ? FLT_MIN : inverse;
    scale_ = inverse_ * kLog2e;
  }

  // The one read of the row from memory: maxima, and the two sums that were asked for.
  void scan(bool want_raw, bool want_warm) {
    scan(want_raw, want_warm, /*untouched=*/false, [](int64_t, int) {});
  }

  // The same of the caller's row beside a copy that is being made of it: visit(first id, size) for
  // every leaf, while it is near.
  template <typename Visit>
  void scan_untouched(bool want_raw, Visit&& visit) {
    scan(want_raw, false, /*untouched=*/true, visit);
  }

  template <typename Visit>
  void for_each_leaf(Visit&& visit) const {
    for (int32_t leaf = 0; leaf < num_leaves_; ++leaf) {
      visit(static_cast<int64_t>(leaf) * kLeaf, leaf_size(leaf));
    }
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

  // Whether filter() needs the second sum: the mass of all tokens.
  static bool needs_warm(const SamplingParams& params) {
    if (is_greedy(params) || params.top_k > 0) return false;
    return params.top_p < 1.0f || (params.min_p == 0.0f && params.typical_p >= 1.0f);
  }

  // Finds the tokens to draw from: temperature -> top-k -> top-p of what is left -> min-p ->
  // typical-p. The scan has been told needs_warm(params).
  void filter(const SamplingParams& params) {
    if (max_ == -INFINITY || is_greedy(params)) {
      kept_ = Kept::kOne;
      one_ = argmax();
      kept_mass_ = 1.0;
      return;
    }
    Candidates& list = scratch_->candidates;
    list_ = &list;
    Cut cut = everything();
    kept_ = Kept::kScanned;
    bool weighed = true;  // whether what kept_ names is there
    if (params.top_k > 0) {
      weighed = false;
      if (params.top_k < vocab_size_) {
        bool listed = false;
        cut = select_count(params.top_k, &listed);
        if (listed) {
          kept_ = Kept::kListed;
          weighed = true;
          list.keep(cut);
          list.weigh(max_, scale_);
        }
      }
    }
    if (params.top_p < 1.0f) {
      if (weighed && kept_ == Kept::kListed) {
        Bracket bracket{ordered_bits(cut.value), ordered_bits(max_) + 1, 0.0};
        cut = list.select(bracket, params.top_p * list.mass());
        list.keep(cut);
      } else {
        cut = select_mass(cut, weighed ? warm_mass() : mass_of_kept(cut), params.top_p);
        kept_ = Kept::kByLeaf;
        weighed = true;
      }
    }
    if (params.min_p > 0.0f) {
      // weight >= min_p * the largest weight, which is 1
      // Never -inf: the scan has left out the sum that serves where nothing is cut.
      constexpr float kLowest = -3.402823466e38f;
      double least = max_ + std::log(static_cast<double>(params.min_p)) / inverse_;
      float value = least > kLowest ? static_cast<float>(least) : kLowest;
      Cut tighter_cut = tighter(cut, {value < max_ ? value : max_, vocab_size_ - 1});
      if (tighter_cut.value != cut.value || tighter_cut.last_id != cut.last_id) {
        cut = tighter_cut;
        if (weighed && kept_ == Kept::kListed) {
          list.keep(cut);
        } else {
          weighed = false;
        }
      }
    }
    cut_ = cut;
    if (params.typical_p < 1.0f) return keep_typical(params.typical_p, weighed);
    if (!weighed) {
      if (gather(cut, INFINITY, list)) {
        kept_ = Kept::kListed;
        list.weigh(max_, scale_);
      } else {
        kept_ = Kept::kByLeaf;
        mass_of_kept(cut);
      }
    }
    if (kept_ == Kept::kScanned) scanned_masses();
    kept_mass_ = kept_ == Kept::kListed ? list.mass() : total_mass();
  }

  // What follows is about the tokens that filter() has kept. Token weights are relative to the row's
  // largest; the distribution to draw from, target_probs, is weight / kept_mass.

  double kept_mass() const { return kept_mass_; }

  // 0 where the filters drop the token.
  // 0 for an id past the vocabulary.
  double weight_of(int32_t id) const {
    if (id >= vocab_size_) return 0.0;
    if (kept_ == Kept::kOne) return id == one_ ? 1.0 : 0.0;
    if (kept_ == Kept::kListed) return list_->weight_of(id);
    float x = logit(id);
    int32_t leaf = id / kLeaf;
    if (leaves_[leaf].max == -INFINITY || !cut_.keeps(x, id)) return 0.0;
    float lanes[kLanes];
    store(lanes, weight(set1(x), set1(leaf_origin(leaf)), set1(scale_)));
    return lanes[0] * weight_unit(leaf);
  }

  // Calls visit(id, weight) for every token of some weight, in id order.
  template <typename Visit>
  void for_each_kept(Visit&& visit) const {
    if (kept_ == Kept::kOne) return visit(one_, 1.0);
    if (kept_ == Kept::kListed) {
      for (int i = 0; i < list_->count; ++i) {
        if (list_->w[i] > 0.0f) visit(list_->id[i], static_cast<double>(list_->w[i]));
      }
      return;
    }
    for (int32_t leaf = 0; leaf < num_leaves_; ++leaf) {
      if (scratch_->masses.data[leaf] <= 0.0) continue;
      double unit = weight_unit(leaf);
      for_each_weighed(leaf, cut_, leaf_origin(leaf), [&](int i, F32x16 weights) {
        float w[kLanes];
        store(w, weights);
        for (int j = 0; j < kLanes; ++j) {
          if (w[j] > 0.0f) visit(leaf * kLeaf + i + j, w[j] * unit);
        }
      });
    }
  }

  // Of the whole vocabulary.
  void write_target_probs(float* probs) const {
    if (kept_ == Kept::kOne || kept_ == Kept::kListed) {
      std::memset(probs, 0, vocab_size_ * sizeof(float));
      for_each_kept([&](int32_t id, double w) { probs[id] = static_cast<float>(w / kept_mass_); });
      return;
    }
    for (int32_t leaf = 0; leaf < num_leaves_; ++leaf) {
      float* of_leaf = probs + static_cast<int64_t>(leaf) * kLeaf;
      int size = leaf_size(leaf);
      if (scratch_->masses.data[leaf] <= 0.0) {
        std::memset(of_leaf, 0, size * sizeof(float));
        continue;
      }
      F32x16 unit = set1(static_cast<float>(weight_unit(leaf) / kept_mass_));
      for_each_weighed(leaf, cut_, leaf_origin(leaf), [&](int i, F32x16 w) {
        store_partial(of_leaf + i, mul(w, unit), size - i);
      });
    }
  }

  int32_t num_leaves() const { return num_leaves_; }

  double mass_of_leaf(int32_t leaf) const {
    if (kept_ == Kept::kOne) return one_ / kLeaf == leaf ? 1.0 : 0.0;
    if (kept_ != Kept::kListed) return scratch_->masses.data[leaf];
    return list_->segment_mass(list_->first_from(leaf * kLeaf),
                               list_->first_from((leaf + 1) * kLeaf));
  }

  // Writes w[0, kLeaf); returns what to multiply them with. Tokens that are not kept weigh 0.
  double weigh_leaf(int32_t leaf, float* w) const {
    int32_t first = leaf * kLeaf;
    if (kept_ == Kept::kOne || kept_ == Kept::kListed) {
      for (int i = 0; i < kLeaf; i += kLanes) store(w + i, zero());
      if (kept_ == Kept::kOne) {
        if (one_ / kLeaf == leaf) w[one_ - first] = 1.0f;
        return 1.0;
      }
      int end = list_->first_from(first + kLeaf);
      for (int i = list_->first_from(first); i < end; ++i) w[list_->id[i] - first] = list_->w[i];
      return 1.0;
    }
    for_each_weighed(leaf, cut_, leaf_origin(leaf), [&](int i, F32x16 x) { store(w + i, x); });
    int end = (leaf_size(leaf) + kLanes - 1) / kLanes * kLanes;
    for (int i = end; i < kLeaf; i += kLanes) store(w + i, zero());
    return weight_unit(leaf);
  }

  // Whether only one token is left, so that drawing needs no random number.
  bool is_certain() const { return kept_ == Kept::kOne; }

  // Inverse CDF in token-id order.
  int32_t draw(float uniform) const {
    if (kept_ == Kept::kOne) return one_;
    if (kept_ == Kept::kListed) return list_->invert_cdf(uniform * kept_mass_);
    return invert_cdf(uniform * kept_mass_);
  }

  // log target_probs; at temperature 0, which is not a distribution's, the log-softmax serves.
  float target_logprob(int32_t id) const {
    if (max_ == -INFINITY || weight_of(id) <= 0.0) return -INFINITY;
    if (kept_ == Kept::kOne) return 0.0f;
    double distance = (static_cast<double>(logit(id)) - max_) * inverse_;
    return static_cast<float>(distance - std::log(kept_mass_));
  }

  // 1 + how many logits are greater.
  int32_t rank(float logit) const {
    int32_t rank = 1;
    float above = next_above(logit);
    for (int32_t leaf = 0; leaf < num_leaves_; ++leaf) {
      if (leaves_[leaf].max <= logit) continue;
      int size = leaf_size(leaf);
      for (int i = 0; i < size; i += kLanes) {
        F32x16 values = take(leaf_data(leaf), i, size);
        rank += __builtin_popcount(lanes_between(values, above, INFINITY));
      }
    }
    return rank;
  }

  // The cut that keeps exactly count tokens, 1 <= count < vocab_size.
  // Tells whether the list now holds every kept token.
  Cut select_count(int64_t count, bool* listed) const {
    Candidates& list = scratch_->candidates;
    Bracket bracket{ordered_bits(-INFINITY), ordered_bits(max_) + 1, 0.0};
    if (count <= num_leaves_ && num_leaves_ <= kMaxCandidates) {
      // As many leaves, so as many tokens, reach the count-th largest of the leaves' maxima.
      list.count = num_leaves_;
      for (int32_t leaf = 0; leaf < num_leaves_; ++leaf) {
        list.x[leaf] = leaves_[leaf].max;
        list.id[leaf] = leaf;
      }
      list.weigh_equally();
      list.pad();
      bracket.low = ordered_bits(list.select(bracket, static_cast<double>(count)).value);
    }
    Cut cut = select<true>(everything(), &bracket, static_cast<double>(count));
    *listed = bracket.above == 0.0 && !bracket.single();
    return cut;
  }

  // Calls visit(id, logit) for every token of a cut, in id order.
  template <typename Visit>
  void for_each_of(Cut cut, Visit&& visit) const {
    float x[kLeaf];
    for (int32_t leaf = 0; leaf < num_leaves_; ++leaf) {
      if (leaves_[leaf].max < cut.value) continue;
      int count = load_leaf(leaf, x);
      for (int i = 0; i < count; ++i) {
        int32_t id = leaf * kLeaf + i;
        if (cut.keeps(x[i], id)) visit(id, x[i]);
      }
    }
  }

 private:
  template <typename Visit>
  void scan(bool want_raw, bool want_warm, bool untouched, Visit&& visit) {
    scratch_ = &tls_scratch;
    scratch_->reserve(num_leaves_);
    leaves_ = (untouched ? scratch_->untouched_stats : scratch_->stats).data;
    max_ = -INFINITY;
    for (int32_t leaf = 0; leaf < num_leaves_; ++leaf) {
      leaves_[leaf] = scan_leaf(leaf, want_raw, want_warm);
      if (leaves_[leaf].max > max_) max_ = leaves_[leaf].max;
      visit(static_cast<int64_t>(leaf) * kLeaf, leaf_size(leaf));
    }
    if (!want_raw || max_ == -INFINITY) return;
    double sum = 0.0;
    for (int32_t leaf = 0; leaf < num_leaves_; ++leaf) {
      if (leaves_[leaf].max == -INFINITY) continue;
      sum += leaves_[leaf].raw * std::exp(static_cast<double>(leaves_[leaf].max) - max_);
    }
    log_sum_ = std::log(sum);
  }

  Cut everything() const { return {-INFINITY, vocab_size_ - 1}; }

  const T* leaf_data(int32_t leaf) const { return logits_ + static_cast<int64_t>(leaf) * kLeaf; }

  int leaf_size(int32_t leaf) const {
    int32_t rest = vocab_size_ - leaf * kLeaf;
    return rest < kLeaf ? rest : kLeaf;
  }

  // Clean logits from x + i, -inf past the end.
  static F32x16 take(const T* x, int i, int size) {
    return clean(i + kLanes <= size ? load(x + i) : load_partial(x + i, size - i, -INFINITY));
  }

  // Clean logits of a leaf, filled up with -inf to whole vectors. Returns the leaf's size.
  int load_leaf(int32_t leaf, float* x) const {
    int size = leaf_size(leaf);
    for (int i = 0; i < size; i += kLanes) store(x + i, take(leaf_data(leaf), i, size));
    return size;
  }

  LeafStats scan_leaf(int32_t leaf, bool want_raw, bool want_warm) const {
    const T* x = leaf_data(leaf);
    int size = leaf_size(leaf);
    F32x16 even = set1(-INFINITY), odd = even;
    int i = 0;
    for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
      even = max(load(x + i), even);  // skips NaN
      odd = max(load(x + i + kLanes), odd);
    }
    for (; i < size; i += kLanes) even = max(load_partial(x + i, size - i, -INFINITY), even);
    LeafStats stats{clean(reduce_max(max(even, odd))), 0.0f, 0.0f};
    if (stats.max == -INFINITY) return stats;
    // The second look finds the leaf in L1, and fetches the next one meanwhile.
    if (want_raw) stats.raw = leaf_mass(x, size, stats.max, kLog2e);
    if (want_warm) {
      bool same = want_raw && inverse_ == 1.0f;
      stats.warm = same ? stats.raw : leaf_mass(x, size, stats.max, scale_);
    }
    return stats;
  }

  static float leaf_mass(const T* x, int size, float origin, float scale) {
    F32x16 even = zero(), odd = zero(), from = set1(origin), factor = set1(scale);
    int i = 0;
    for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
      __builtin_prefetch(x + i + kLeaf);
      __builtin_prefetch(x + i + kLeaf + kLanes);
      even = add(even, weight(load(x + i), from, factor));
      odd = add(odd, weight(load(x + i + kLanes), from, factor));
    }
    for (; i < size; i += kLanes) {
      even = add(even, weight(load_partial(x + i, size - i, -INFINITY), from, factor));
    }
    return reduce_add(add(even, odd));
  }

  // Writes the mass of every leaf, from the scan; the row's largest logit weighs 1.
  void scanned_masses() const {
    for (int32_t leaf = 0; leaf < num_leaves_; ++leaf) {
      bool some = leaves_[leaf].max > -INFINITY;
      scratch_->masses.data[leaf] = some ? leaves_[leaf].warm * leaf_scale(leaf) : 0.0;
    }
  }

  double warm_mass() const {
    scanned_masses();
    return total_mass();
  }

  double total_mass() const {
    double total = 0.0;
    for (int32_t leaf = 0; leaf < num_leaves_; ++leaf) total += scratch_->masses.data[leaf];
    return total;
  }

  double leaf_scale(int32_t leaf) const {
    return std::exp((static_cast<double>(leaves_[leaf].max) - max_) * inverse_);
  }

  // Lists the kept tokens below high; false when there are too many.
  bool gather(Cut cut, float high, Candidates& list) const {
    Appender end{list.x, list.id, 0};
    float past = next_above(cut.value);  // ties count up to the cut's last token
    for (int32_t leaf = 0; leaf < num_leaves_; ++leaf) {
      scratch_->segments.data[leaf] = end.count;
      if (leaves_[leaf].max < cut.value) continue;
      if (end.count + kLeaf > list.capacity) return false;
      const T* x = leaf_data(leaf);
      int size = leaf_size(leaf);
      for (int i = 0; i < size; i += kLanes) {
        F32x16 values = take(x, i, size);
        int32_t first = leaf * kLeaf + i;
        uint32_t mask = lanes_between(values, first <= cut.last_id ? cut.value : past, high);
        if (is_last(cut, first)) mask = kept_lanes(cut, values, first, mask);
        if (i + kLanes > size) mask &= (1u << (size - i)) - 1;
        end.append(values, first, mask);  // no branch on the mask: it is hard to predict
      }
    }
    scratch_->segments.data[num_leaves_] = end.count;
    list.count = end.count;
    list.pad();
    return true;
  }

  // Whether the cut's last token is in this vector, so that each lane must be asked.
  static bool is_last(Cut cut, int32_t first_id) {
    return first_id <= cut.last_id && cut.last_id < first_id + kLanes;
  }

  static uint32_t kept_lanes(Cut cut, F32x16 values, int32_t first_id, uint32_t mask) {
    float x[kLanes];
    store(x, values);
    for (int i = 0; i < kLanes; ++i) {
      if (!cut.keeps(x[i], first_id + i)) mask &= ~(1u << i);
    }
    return mask;
  }

  // masses[j] = mass, or number, of the row's tokens with logits >= thresholds[j], which descend.
  // Leaves the leaves' shares in scratch_->sums.
  template <bool kCount>
  void masses_from(const float* thresholds, double* masses) const {
    for (int j = 0; j < kThresholds; ++j) masses[j] = 0.0;
    F32x16 origin = set1(max_), factor = set1(scale_);
    for (int32_t leaf = 0; leaf < num_leaves_; ++leaf) {
      float* sums = scratch_->sums.data + leaf * kThresholds;
      for (int j = 0; j < kThresholds; ++j) sums[j] = 0.0f;
      if (leaves_[leaf].max < thresholds[kThresholds - 1]) continue;
      const T* x = leaf_data(leaf);
      int size = leaf_size(leaf);
      F32x16 sum[kThresholds];
      for (int j = 0; j < kThresholds; ++j) sum[j] = zero();
      auto step = [&](F32x16 values) {  // NaN is at least nothing
        F32x16 w = kCount ? set1(1.0f) : weight(values, origin, factor);
        for (int j = 0; j < kThresholds; ++j) {
          sum[j] = add_where_ge(sum[j], w, values, set1(thresholds[j]));
        }
      };
      int i = 0;
      for (; i + kLanes <= size; i += kLanes) step(load(x + i));
      if (i < size) step(load_partial(x + i, size - i, -INFINITY));
      for (int j = 0; j < kThresholds; ++j) {
        sums[j] = reduce_add(sum[j]);
        masses[j] += sums[j];
      }
    }
  }

  // Lists every 32nd vector of a large row, weighed, to guess from. Returns how many of the row's
  // tokens one of the list stands for, or 0 where guessing does not pay.
  template <bool kCount>
  double sample_row() const {
    if (num_leaves_ < 32 || num_leaves_ > 32 * (kMaxCandidates / kLeaf)) return 0.0;
    Candidates& list = scratch_->candidates;
    float* x = list.x;
    int count = 0;
    for (int32_t leaf = 0; leaf + 1 < num_leaves_; ++leaf) {
      for (int i = leaf % 32 * kLanes; i < kLeaf; i += 32 * kLanes) {
        store(x + count, take(leaf_data(leaf), i, kLeaf));
        count += kLanes;
      }
    }
    list.count = count;
    list.number_from_zero();
    if (kCount) {
      list.weigh_equally();
    } else {
      list.weigh(max_, scale_);
    }
    return static_cast<double>(vocab_size_) / list.count;
  }

  // Thresholds around the target, guessed from the sample. What lies below the cut is many tokens
  // of little weight, so its mass is guessed well, however few tokens hold the rest.
  template <bool kCount>
  bool guess(const Bracket& bracket, double target, double total, float* thresholds) const {
    double ratio = sample_row<kCount>();
    const Candidates& list = scratch_->candidates;
    if (ratio == 0.0) return false;
    if (list.number_from(from_ordered_bits(bracket.low)) * ratio < kMaxCandidates * 3 / 4)
      return false;
    double tolerance = 6.0 / std::sqrt(static_cast<double>(list.count));
    double sampled = list.mass(), low, high;
    if (kCount) {
      double expected = target / ratio, slack = 3.0 * std::sqrt(expected) + 1.0;
      low = expected + slack, high = expected - slack;
    } else {
      double below = (total - target) / ratio;
      low = sampled - below * (1.0 - tolerance), high = sampled - below * (1.0 + tolerance);
    }
    Bracket whole{ordered_bits(-FLT_MAX), ordered_bits(max_) + 1, 0.0};
    float top = high > 0.0 ? list.select(whole, high).value : max_;
    float bottom = low < sampled ? list.select(whole, low).value : from_ordered_bits(bracket.low);
    for (int j = 0; j < kThresholds; ++j) {
      double part = static_cast<double>(j) / (kThresholds - 1);
      thresholds[j] = static_cast<float>(top + (static_cast<double>(bottom) - top) * part);
    }
    return bottom <= top && bottom > -INFINITY;
  }

  // The cut, no looser than the base, after which the ranking's mass first reaches the target. The
  // bracket ends as the part of the ranking that is in the list; scratch_->masses (unless counting)
  // as the mass of the kept tokens of every leaf.
  template <bool kCount>
  Cut select(Cut base, Bracket* bracket, double target, double total = 0.0) const {
    Candidates& list = scratch_->candidates;
    double* shares = scratch_->masses.data;
    for (int32_t leaf = 0; leaf < num_leaves_; ++leaf) shares[leaf] = 0.0;
    float thresholds[kThresholds];
    bool guessed = guess<kCount>(*bracket, target, total, thresholds);
    for (int round = 0; guessed || !gather_bracket(*bracket, base); ++round) {
      if (bracket->single()) return tied_prefix<kCount>(base, *bracket, target);
      if (!guessed) spread<kThresholds>(bracket->low, bracket->high, round, thresholds);
      guessed = false;
      double masses[kThresholds];
      masses_from<kCount>(thresholds, masses);
      int last = bracket->narrow(thresholds, masses, kThresholds, target);
      for (int32_t leaf = 0; last >= 0 && leaf < num_leaves_; ++leaf) {
        shares[leaf] = scratch_->sums.data[leaf * kThresholds + last];
      }
    }
    if (kCount) {
      list.weigh_equally();
    } else {
      list.weigh(max_, scale_);
    }
    list.pad();
    Cut cut = list.select(*bracket, target);
    if (kCount) return cut;
    list.forget_weights_beyond(cut);
    for (int32_t leaf = 0; leaf < num_leaves_; ++leaf) {
      shares[leaf] +=
          list.segment_mass(scratch_->segments.data[leaf], scratch_->segments.data[leaf + 1]);
    }
    return cut;
  }

  bool gather_bracket(const Bracket& bracket, Cut base) const {
    float low = from_ordered_bits(bracket.low), high = from_ordered_bits(bracket.high);
    Cut cut = low > base.value ? Cut{low, vocab_size_ - 1} : base;
    return gather(cut, high, scratch_->candidates);
  }

  // More equal tokens than a list holds: count them off in id order.
  template <bool kCount>
  Cut tied_prefix(Cut base, const Bracket& bracket, double target) const {
    Cut cut{from_ordered_bits(bracket.low), 0};
    float w[kLanes] = {1.0f};
    if (!kCount) store(w, weight(set1(cut.value), set1(max_), set1(scale_)));
    double mass = bracket.above;
    float x[kLeaf];
    for (int32_t leaf = 0; leaf < num_leaves_; ++leaf) {
      if (leaves_[leaf].max < cut.value) continue;
      int size = load_leaf(leaf, x);
      for (int i = 0; i < size; ++i) {
        int32_t id = leaf * kLeaf + i;
        if (x[i] != cut.value || !base.keeps(x[i], id)) continue;
        cut.last_id = id;
        mass += w[0];
        scratch_->masses.data[leaf] += w[0];
        if (mass >= target) return cut;
      }
    }
    return cut;
  }

  // The smallest prefix of the kept tokens whose mass is at least top_p of their total.
  Cut select_mass(Cut base, double total, float top_p) const {
    double target = top_p * total;
    // All tokens lighter than half of (1 - top_p) * total / vocab_size together weigh too little
    // to matter.
    double lightest = 0.5 * (1.0 - top_p) * total / vocab_size_;
    double value = max_ + std::log(lightest) / inverse_;
    float floor = value > -FLT_MAX ? static_cast<float>(value) : -FLT_MAX;
    if (floor < base.value) floor = base.value;
    Bracket bracket{ordered_bits(floor), ordered_bits(max_) + 1, 0.0};
    return select<false>(base, &bracket, target, total);
  }

  // Calls visit(offset in the leaf, weights) for every vector of a leaf: 0 for what the cut drops.
  template <typename Visit>
  void for_each_weighed(int32_t leaf, Cut cut, float origin, Visit&& visit) const {
    const T* x = leaf_data(leaf);
    int size = leaf_size(leaf);
    float past = next_above(cut.value);  // ties count up to the cut's last token
    for (int i = 0; i < size; i += kLanes) {
      F32x16 values = take(x, i, size);
      F32x16 w = weight(values, set1(origin), set1(scale_));
      int32_t first = leaf * kLeaf + i;
      if (is_last(cut, first)) {
        uint32_t mask = kept_lanes(cut, values, first, 0xffffu);
        float lanes[kLanes];
        store(lanes, w);
        for (int j = 0; j < kLanes; ++j) lanes[j] = mask >> j & 1u ? lanes[j] : 0.0f;
        w = load(lanes);
      }
      float least = first <= cut.last_id ? cut.value : past;
      visit(i, add_where_ge(zero(), w, values, set1(least)));
    }
  }

  // Mass of the kept tokens of one leaf; the largest logit of the row weighs 1.
  float kept_leaf_mass(int32_t leaf, Cut cut) const {
    F32x16 sum = zero();
    for_each_weighed(leaf, cut, max_, [&](int, F32x16 w) { sum = add(sum, w); });
    return reduce_add(sum);
  }

  // Writes the mass of the kept tokens of every leaf; returns the row's.
  double mass_of_kept(Cut cut) const {
    for (int32_t leaf = 0; leaf < num_leaves_; ++leaf) {
      scratch_->masses.data[leaf] =
          leaves_[leaf].max >= cut.value ? kept_leaf_mass(leaf, cut) : 0.0;
    }
    return total_mass();
  }

  // What a token's weight is computed from: the scan's are relative to their leaf's maximum.
  float leaf_origin(int32_t leaf) const {
    return kept_ == Kept::kScanned ? leaves_[leaf].max : max_;
  }

  double weight_unit(int32_t leaf) const {
    return kept_ == Kept::kScanned ? leaf_scale(leaf) : 1.0;
  }

  // Keeps the tokens whose surprise is closest to the entropy: |-log p - H| ascending, ids ascending,
  // until they have typical_p of the mass. With d = log(weight), that is |d - mean of d|.
  void keep_typical(float typical_p, bool weighed) {
    if (!weighed || kept_ != Kept::kListed) {
      if (!gather(cut_, INFINITY, *list_)) {
        list_ = &scratch_->all;
        list_->reserve((num_leaves_ + 1) * kLeaf);
        gather(cut_, INFINITY, *list_);
      }
      list_->weigh(max_, scale_);
    }
    kept_ = Kept::kListed;
    list_->keep_typical(max_, inverse_, typical_p);
    kept_mass_ = list_->mass();
  }

  // The first kept token, in id order, at which the running mass exceeds the target.
  int32_t invert_cdf(double target) const {
    const double* masses = scratch_->masses.data;
    double before = 0.0, after = 0.0;
    int32_t chosen = 0;
    for (int32_t leaf = 0; leaf < num_leaves_ && after <= target; ++leaf) {
      if (masses[leaf] <= 0.0) continue;
      before = after;
      after = before + masses[leaf];
      chosen = leaf;
    }
    // Inside the leaf; rounding may leave the target just past its last token.
    float origin = leaf_origin(chosen);
    double rest = (target - before) / weight_unit(chosen);
    double sum = 0.0;
    int32_t found = chosen * kLeaf;
    float x[kLeaf];
    int size = load_leaf(chosen, x);
    for (int i = 0; i < size; i += kLanes) {
      float w[kLanes];
      store(w, weight(load(x + i), set1(origin), set1(scale_)));
      for (int j = 0; j < kLanes; ++j) {
        int32_t id = chosen * kLeaf + i + j;
        if (w[j] <= 0.0f || !cut_.keeps(x[i + j], id)) continue;
        found = id;
        sum += w[j];
        if (sum > rest) return found;
      }
    }
    return found;
  }

  static constexpr float kLog2e = 1.44269504088896341f;

  const T* logits_;
  int32_t vocab_size_;
  int32_t num_leaves_;
  float inverse_;  // of the temperature
  float scale_;    // inverse_ * log2(e)
  Scratch* scratch_ = nullptr;
  LeafStats* leaves_ = nullptr;
  float max_ = -INFINITY;
  double log_sum_ = 0.0;

  // Where the kept tokens' weights are: one token; the scan's sums by leaf; the list; sums by leaf of
  // the tokens that the cut keeps.
  enum class Kept { kOne, kScanned, kListed, kByLeaf } kept_ = Kept::kOne;
  int32_t one_ = 0;
  Candidates* list_ = nullptr;
  Cut cut_{};
  double kept_mass_ = 1.0;
};

// Rows per chunk: enough logits to be worth waking a thread.
[[maybe_unused]] int64_t row_grain(int64_t vocab_size) {
  return vocab_size < 32768 ? 32768 / vocab_size : 1;
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
