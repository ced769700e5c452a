// SPDX-License-Identifier: Apache-2.0
// One row of logits -> its token and logprob, by one block, after one or several blocks have scanned
// the row. sample, verify and top_logprobs are loops around these functions.
//
// Order: a leaf's sum is fp32 in a fixed tree (leaf.cuh). From there on masses are integers, 2^-39
// of the row's heaviest token: sums of those do not depend on an order, so leaves may be folded by
// any threads, and lists filled in any order. NaN counts as -inf and +inf as the largest finite
// float. Tokens are ordered by (logit descending, id ascending).
#pragma once

#include "sampling/filters.h"
#include "sampling/leaf.cuh"

namespace specops {

using Mass = unsigned long long;

constexpr int kListCapacity = 3072;  // tokens that leave the row for a list
constexpr int kSharedLeaves = 512;   // of a row whose leaves are kept in shared memory
constexpr int kThresholds = 4;       // masses taken in one pass over a row
constexpr int kBins = 256;           // of a histogram over a list
constexpr int kBinsPerLane = kBins / kWarpSize;
constexpr int kLowMassBits = 20;  // so that a list's masses fit two histograms of 32 bits

// Whether the choice needs the second sum of a scan: the mass of all tokens.
__device__ inline bool needs_warm(const SamplingParams& filters, int32_t vocab_size) {
  bool counted = filters.top_k > 0 && filters.top_k < vocab_size;
  return !is_greedy(filters) && !counted && (filters.top_p < 1.0f || filters.min_p == 0.0f);
}

struct RowToken {
  int32_t id;
  float logit;
};

// Within the finite floats, so that 0 times it is 0 and -inf stays -inf.
__device__ inline float inverse_temperature(float temperature) {
  float inverse = temperature > 0.0f ? 1.0f / temperature : 1.0f;
  return fminf(fmaxf(inverse, FLT_MIN), FLT_MAX / 2);
}

// The tokens that a filter keeps: logits above value, and those equal to it up to token last_id.
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

// A token's place in the ranking: larger is earlier, no two are equal.
__device__ inline Mass rank_key(float x, int32_t id) {
  return Mass{ordered_bits(x)} << 31 | static_cast<uint32_t>(INT32_MAX - id);
}

__device__ inline Cut cut_at(Mass key) {
  return {from_ordered_bits(static_cast<uint32_t>(key >> 31)),
          INT32_MAX - static_cast<int32_t>(key & INT32_MAX)};
}

// What typical-p keeps of the other filters' tokens: those whose surprise is nearest to the mean
// surprise, up to a distance and among the most distant ones up to a token.
struct TypicalCut {
  float mean;  // surprise, in nats above the first token's
  float distance;
  int32_t last_id;
};

// A block's shared memory.
struct RowShared {
  Mass scratch[kMaxRowThreads / kWarpSize];  // of the block's reductions and scans
  Mass key_low, key_high, above;             // of the bin a histogram led to
  Mass key;                                  // of the token found in it
  uint32_t number[kBins], low_mass[kBins], high_mass[kBins];
  uint32_t bin_number;
  int32_t list_count;
  LeafStats* row_stats;  // the row's leaves: below, or in the workspace
  Mass* row_masses;
  SamplingParams filters;
  float inverse;                  // of the temperature
  Cut cut;                        // what the filters so far keep: a selection starts from it
  Cut kept;                       // what temperature, top-k, top-p and min-p keep
  TypicalCut typical;             // and what typical-p keeps of it
  int32_t weighed;                // whether masses are the kept tokens', or the scan's sums are
  float raw_max;                  // of the logits in memory
  float likely;                   // the least logit that min-p keeps
  Mass target, total;             // a selection's
  float thresholds[kThresholds];  // masses wanted in one pass over a row
  Mass sums[kThresholds];
  int32_t leaf, rest_id;
  float rest_logit;
  double part;
  int32_t is_last;
  int32_t batch_idx, first_row, num_rows, num_read, num_together;  // of the block's request
  int32_t row_of_request, rule, given_id, again;                   // of what it looks at
  float taken;  // by rejected drafts, in weights of the row
  LeafStats stats[kSharedLeaves];
  Mass masses[kSharedLeaves];
  float list_x[kListCapacity];
  int32_t list_id[kListCapacity];
};

struct Add {
  template <typename V>
  __device__ V operator()(V a, V b) const {
    return a + b;
  }
};
struct Max {
  template <typename V>
  __device__ V operator()(V a, V b) const {
    return a > b ? a : b;
  }
};
struct Min {
  template <typename V>
  __device__ V operator()(V a, V b) const {
    return a < b ? a : b;
  }
};

// Of integers and maxima only: the order is nobody's business. Every thread gets the result; what
// the block wrote before is visible after.
template <typename Op, typename V>
__device__ inline V block_reduce(RowShared& shared, V value) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value = Op()(value, __shfl_xor_sync(kFullMask, value, offset));
  }
  V* scratch = reinterpret_cast<V*>(shared.scratch);
  __syncthreads();
  if (lane_id() == 0) scratch[warp_id()] = value;
  __syncthreads();
  value = scratch[0];
#pragma unroll 1
  for (int warp = 1; warp < num_warps(); ++warp) value = Op()(value, scratch[warp]);
  return value;
}

__device__ inline Mass warp_inclusive(Mass value) {
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    Mass before = __shfl_up_sync(kFullMask, value, offset);
    if (lane_id() >= offset) value += before;
  }
  return value;
}

// The sum over the threads up to this one; *total is the block's.
__device__ inline Mass block_inclusive(RowShared& shared, Mass value, Mass* total) {
  value = warp_inclusive(value);
  __syncthreads();
  if (lane_id() == kWarpSize - 1) shared.scratch[warp_id()] = value;
  __syncthreads();
  Mass sum = 0;
#pragma unroll 1
  for (int warp = 0; warp < num_warps(); ++warp) {
    if (warp == warp_id()) value += sum;
    sum += shared.scratch[warp];
  }
  *total = sum;
  return value;
}

// Whether this block is the last of `expected` that count themselves here. What they wrote before is
// then visible to it, and the counter is zero again.
__device__ inline bool last_to_arrive(RowShared& shared, int32_t* counter, int expected) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    // Back to zero in one piece: requests at fault may claim the same rows, whose counters then see
    // more arrivals, some between a look and a store.
    unsigned limit = static_cast<unsigned>(expected) - 1;
    bool last = atomicInc(reinterpret_cast<unsigned*>(counter), limit) == limit;
    __threadfence();
    shared.is_last = last;
  }
  __syncthreads();
  return shared.is_last != 0;
}

template <typename T, bool kProcessed = false>
class Row {
 public:
  // What every thread would keep in registers, most of them for later, waits in shared memory.
  __device__ Row(RowShared& shared,
                 const RowLogits<T, kProcessed>& row,
                 const SamplingParams& filters,
                 LeafStats* stats,
                 Mass* masses)
      : shared_(shared), row_(row), num_leaves_(row.num_leaves()) {
    if (thread() == 0) {
      shared_.row_stats = stats;
      shared_.row_masses = masses;
      shared_.filters = filters;
      shared_.inverse = inverse_temperature(filters.temperature);
      shared_.typical = {0.0f, INFINITY, INT32_MAX};
    }
    __syncthreads();
  }

  // Puts the leaves together: the row's maximum and, when wanted, the sum of its raw logits.
  __device__ void fold(bool want_raw) {
    float top = -INFINITY;
#pragma unroll 1
    for (int32_t leaf = thread(); leaf < num_leaves_; leaf += threads()) {
      top = fmaxf(top, stats(leaf).max);
    }
    max_ = block_reduce<Max>(shared_, top) + 0.0f;  // the sum makes +0 of -0
    if (!want_raw) return;
    float raw_max = max_;
    if constexpr (kProcessed) {
      top = -INFINITY;
#pragma unroll 1
      for (int32_t leaf = thread(); leaf < num_leaves_; leaf += threads()) {
        top = fmaxf(top, stats(leaf).raw_max);
      }
      raw_max = block_reduce<Max>(shared_, top) + 0.0f;
      if (thread() == 0) shared_.raw_max = raw_max;
    }
    if (raw_max == -INFINITY) return;
    Mass total = 0;
#pragma unroll 1
    for (int32_t leaf = thread(); leaf < num_leaves_; leaf += threads()) {
      float leaf_max = kProcessed ? stats(leaf).raw_max : stats(leaf).max;
      if (leaf_max == -INFINITY) continue;
      total += mass(stats(leaf).raw * ptx::exp2_approx((leaf_max - raw_max) * kLog2e));
    }
    total = block_reduce<Add>(shared_, total);
    log_sum_ = log_of(total);
  }

  // Of the raw logits, after fold(true).
  __device__ float lse() const { return raw_max() == -INFINITY ? -INFINITY : raw_max() + log_sum_; }

  // The raw log-softmax of a token with that logit, after fold(true).
  __device__ float logprob(RowToken token) const {
    float x = token.logit;
    if constexpr (kProcessed) x = to_float(row_.data[token.id]);
    return raw_max() == -INFINITY ? -INFINITY : (clean(x) - raw_max()) - log_sum_;
  }

  __device__ float logit(int32_t id) const { return clean(row_.logit(id)); }

  // 1 + the number of tokens with a greater logit, of the raw ones or those under the overlay. Every
  // thread names the token.
  __device__ int32_t rank(RowToken token, bool raw) {
    if constexpr (kProcessed) {
      if (raw) {
        float x = clean(to_float(row_.data[token.id]));
        return rank_in(row_.raw(), x, [&](int32_t leaf) { return stats(leaf).raw_max; });
      }
    }
    return rank_in(row_, clean(token.logit), [&](int32_t leaf) { return stats(leaf).max; });
  }

  // The first warp's token, for every thread.
  __device__ RowToken broadcast(RowToken token) {
    __syncthreads();
    if (thread() == 0) {
      shared_.rest_id = token.id;
      shared_.rest_logit = token.logit;
    }
    __syncthreads();
    return {shared_.rest_id, shared_.rest_logit};
  }

  // Whether the distribution that is drawn from is one token's.
  __device__ bool one_hot() const { return max_ == -INFINITY || is_greedy(shared_.filters); }

  // Temperature -> top-k -> top-p of what is left -> min-p -> typical-p, or the first token. Finds
  // what is kept; all below is about that.
  __device__ __forceinline__ void filter() {
    if (one_hot()) {
      RowToken first{0, max_};
      if (max_ > -INFINITY) first = first_token();
      if (thread() == 0) shared_.kept = {max_, first.id};
      __syncthreads();
      return;
    }
    bool weighed = cut_ranking() == kMasses;
    if (thread() == 0) shared_.kept = shared_.cut;
    __syncthreads();
    if (shared_.filters.typical_p < 1.0f) {
      cut_typical();
      weighed = true;
    }
    if (thread() == 0) shared_.weighed = weighed;
    __syncthreads();
  }

  // Whether the filters keep a token with that clean logit.
  __device__ bool keeps(float x, int32_t id) const {
    return shared_.kept.keeps(x, id) && is_typical(x, id);
  }

  // e^((x - max) / temperature) for a clean x: the first token's is 1.
  __device__ float weight(float x) const { return ptx::exp2_approx((x - max_) * scale()); }

  // The mass of a weight: an integer, so that sums of masses do not depend on an order.
  __device__ Mass mass(float weight) const { return static_cast<Mass>(weight * unit()); }

  // Of all kept tokens, from the masses of their leaves; for every thread.
  __device__ Mass kept_mass() {
    if (one_hot()) return mass(1.0f);
    Mass total = 0;
#pragma unroll 1
    for (int32_t leaf = thread(); leaf < num_leaves_; leaf += threads()) total += leaf_mass(leaf);
    return block_reduce<Add>(shared_, total);
  }

  // The distribution that is drawn from, given kept_mass().
  __device__ float target_prob(float x, int32_t id, Mass kept_mass) const {
    if (!keeps(x, id)) return 0.0f;
    return one_hot() ? 1.0f : weight(x) * (unit() / static_cast<float>(kept_mass));
  }

  // The inverse CDF of that distribution in token-id order. The result is the first warp's.
  __device__ __forceinline__ RowToken draw(float uniform) {
    if (one_hot()) return {shared_.kept.last_id, max_};
    return invert_cdf(uniform);
  }

  // Both at once. uniform() is called where it matters.
  template <typename Uniform>
  __device__ __forceinline__ RowToken choose(Uniform uniform) {
    filter();
    return draw(one_hot() ? 0.0f : uniform());
  }

  // After filter(), for processed_logprob: the sum of what is kept, or of everything at temperature
  // 0, for which the scan must have been asked. It takes the place of the raw logits' sum.
  __device__ void fold_kept() {
    bool everything = shared_.filters.temperature == 0.0f;
    if (max_ == -INFINITY) return;
    log_sum_ = log_of(everything ? scanned_total() : kept_mass());
  }

  // The logarithm of target_prob; at temperature 0 the log-softmax under the overlay.
  __device__ float processed_logprob(RowToken token) const {
    float x = clean(token.logit);
    bool dropped = shared_.filters.temperature > 0.0f && !keeps(x, token.id);
    if (max_ == -INFINITY || dropped) return -INFINITY;
    return (x - max_) * shared_.inverse - log_sum_;
  }

  // Writes target_prob of every token.
  __device__ void write_probs(float* probs) {
    Mass total = kept_mass();
#pragma unroll 1
    for (int32_t id = thread(); id < row_.size; id += threads()) {
      probs[id] = target_prob(logit(id), id, total);
    }
  }

  // Sums weigh(logit, id), at most 1, over the leaves, each in fp32 in one fixed tree; masses() ends
  // as the leaves' where `keep` says so. Leaves whose logits all are below `least` are passed over.
  template <typename Weigh>
  __device__ __forceinline__ Mass weigh_leaves(bool keep, float least, Weigh weigh) {
    __syncthreads();
    Mass total = 0;
#pragma unroll 1
    for (int32_t leaf = warp_id(); leaf < num_leaves_; leaf += num_warps()) {
      Mass own = 0;
      if (stats(leaf).max >= least) {
        int32_t begin = leaf * Leaf<T>::kSize;
        Leaf<T> x;
        x.load(row_, leaf);
        float sums[4] = {};
#pragma unroll
        for (int i = 0; i < Leaf<T>::kOwn; ++i) {
          sums[i % 4] += weigh(clean(x[i]), begin + Leaf<T>::offset(i));
        }
        own = mass(warp_sum((sums[0] + sums[1]) + (sums[2] + sums[3])));
      }
      if (lane_id() != 0) continue;
      if (keep) masses()[leaf] = own;
      total += own;
    }
    return block_reduce<Add>(shared_, total);
  }

  // The first token, in id order, at which the sum of amount(logit, id) reaches `wanted`; the last one
  // that has an amount where it never does. A warp has a run of leaves, a lane a run of a leaf.
  template <typename Amount>
  __device__ __forceinline__ int32_t id_reaching(Mass wanted, float least, Amount amount) {
    int32_t run = (num_leaves_ - 1) / num_warps() + 1;
    int32_t begin = warp_id() * run, end = min(begin + run, num_leaves_);
    auto lane_amount = [&](int32_t leaf) {
      Mass own = 0;
      if (stats(leaf).max < least) return own;
      for_each_in_order(row_, leaf, [&](float x, int32_t id) {
        if (id < row_.size) own += amount(x, id);
      });
      return own;
    };
    Mass own = 0, total;
#pragma unroll 1
    for (int32_t leaf = begin; leaf < end; ++leaf) own += lane_amount(leaf);
    Mass upto = block_inclusive(shared_, own, &total);
    Mass before = __shfl_sync(kFullMask, upto - own, 0);  // of the warp's run
    wanted = wanted < total ? wanted : total;
    wanted = wanted > 0 ? wanted : 1;
#pragma unroll 1
    for (int32_t leaf = begin; leaf < end && before < wanted; ++leaf) {
      own = lane_amount(leaf);
      upto = before + warp_inclusive(own);
      Mass running = upto - own;
      if (running < wanted && wanted <= upto) {
        for_each_in_order(row_, leaf, [&](float x, int32_t id) {
          Mass here = id < row_.size ? amount(x, id) : 0;
          if (here > 0 && running < wanted && wanted <= running + here) shared_.rest_id = id;
          running += here;
        });
      }
      before = __shfl_sync(kFullMask, upto, kWarpSize - 1);
    }
    __syncthreads();
    return shared_.rest_id;
  }

  // The cut that keeps exactly count tokens, 1 <= count < vocab_size. *listed: the list holds them,
  // and perhaps more.
  __device__ Cut select_count(int32_t count, bool* listed) {
    begin_selection(everything(), static_cast<Mass>(count), 0);
    return select(false, count_floor(count), listed);
  }

  // Calls visit(logit, id) for every token the cut keeps, in any order.
  template <typename Visit>
  __device__ void for_each_kept(Cut cut, Visit visit) const {
#pragma unroll 1
    for (int32_t leaf = warp_id(); leaf < num_leaves_; leaf += num_warps()) {
      if (stats(leaf).max < cut.value) continue;
      int32_t begin = leaf * Leaf<T>::kSize;
      Leaf<T> x;
      x.load(row_, leaf);
#pragma unroll
      for (int i = 0; i < Leaf<T>::kOwn; ++i) {
        int32_t id = begin + Leaf<T>::offset(i);
        float value = clean(x[i]);
        if (id < row_.size && cut.keeps(value, id)) visit(value, id);
      }
    }
  }

  template <typename Visit>
  __device__ void for_each_listed(Cut cut, Visit visit) const {
#pragma unroll 1
    for (int i = thread(); i < list_count(); i += threads()) {
      if (cut.keeps(shared_.list_x[i], shared_.list_id[i])) {
        visit(shared_.list_x[i], shared_.list_id[i]);
      }
    }
  }

  __device__ int list_count() const { return shared_.list_count; }

  __device__ Cut everything() const { return {-INFINITY, INT32_MAX}; }

 protected:
  // Where the kept tokens' weights are: in the scan's sums, in the list, in masses().
  enum Where { kScan, kList, kMasses, kNowhere };

  // The ranking's prefix that reaches a target: at `low` it does, at `high` it does not.
  struct Bracket {
    uint32_t low, high;  // ordered bits

    __device__ bool single() const { return high - low <= 1; }
  };

  __device__ const LeafStats& stats(int32_t leaf) const { return shared_.row_stats[leaf]; }
  __device__ Mass* masses() const { return shared_.row_masses; }

  __device__ float scale() const { return shared_.inverse * kLog2e; }

  // The heaviest token's mass: a row's masses fit 64 bits.
  __device__ float unit() const { return row_.size <= 1 << 24 ? 0x1p39f : 0x1p32f; }

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int threads() { return static_cast<int>(blockDim.x); }

  __device__ float log_of(Mass total) const { return logf(static_cast<float>(total) / unit()); }

  __device__ float raw_max() const {
    if constexpr (kProcessed) return shared_.raw_max;
    return max_;
  }

  __device__ Mass leaf_mass(int32_t leaf) const {
    return shared_.weighed != 0 ? masses()[leaf] : scanned_mass(leaf);
  }

  // How far a token's surprise is from the mean.
  __device__ float distance(float x) const {
    return fabsf((max_ - x) * shared_.inverse - shared_.typical.mean);
  }

  __device__ bool is_typical(float x, int32_t id) const {
    if (!(shared_.filters.typical_p < 1.0f)) return true;
    TypicalCut cut = shared_.typical;
    float own = distance(x);
    return own < cut.distance || (own == cut.distance && id <= cut.last_id);
  }

  template <typename OneRow, typename LeafMax>
  __device__ int32_t rank_in(const OneRow& row, float value, LeafMax leaf_max) {
    int number = 0;
#pragma unroll 1
    for (int32_t leaf = warp_id(); leaf < num_leaves_; leaf += num_warps()) {
      if (leaf_max(leaf) <= value) continue;
      Leaf<T> x;
      x.load(row, leaf);
#pragma unroll
      for (int i = 0; i < Leaf<T>::kOwn; ++i) number += clean(x[i]) > value;
    }
    return 1 + block_reduce<Add>(shared_, number);
  }

  // The result is the first warp's.
  __device__ RowToken first_token() {
    int32_t first = num_leaves_;
#pragma unroll 1
    for (int32_t leaf = thread(); leaf < num_leaves_; leaf += threads()) {
      if (stats(leaf).max == max_ && leaf < first) first = leaf;
    }
    return pick(block_reduce<Min>(shared_, first), {max_, INT32_MAX}, 0.0);
  }

  __device__ Mass amount(bool by_mass, float x) const { return by_mass ? mass(weight(x)) : 1; }

  __device__ Mass scanned_mass(int32_t leaf) const {
    LeafStats leaf_stats = stats(leaf);
    if (leaf_stats.max == -INFINITY) return 0;
    return mass(leaf_stats.warm * ptx::exp2_approx((leaf_stats.max - max_) * scale()));
  }

  // What a selection starts from is kept in shared memory, not in registers of every thread.
  __device__ void begin_selection(Cut base, Mass target, Mass total) {
    __syncthreads();
    if (thread() == 0) {
      shared_.cut = base;
      shared_.target = target;
      shared_.total = total;
    }
    __syncthreads();
  }

  // All filters but typical-p: a prefix of the ranking. Leaves the cut in shared_.cut; returns where
  // the kept tokens' weights are, the scan's sums or masses().
  __device__ __forceinline__ Where cut_ranking() {
    if (thread() == 0) {
      const SamplingParams& params = shared_.filters;
      shared_.likely = -INFINITY;
      if (params.min_p > 0.0f) {  // weight >= min_p * the largest weight, which is 1
        // Never -inf: that says there is no min-p, and the scan has left the sum out that would serve.
        double least = max_ + static_cast<double>(logf(params.min_p)) / shared_.inverse;
        shared_.likely = fminf(least > -FLT_MAX ? static_cast<float>(least) : -FLT_MAX, max_);
      }
    }
    int32_t top_k = shared_.filters.top_k;
    bool counted = top_k > 0 && top_k < row_.size;
    begin_selection(everything(), static_cast<Mass>(top_k), 0);
    Where where = kScan;
#pragma unroll 1
    for (int stage = counted ? 0 : 1; stage < 2; ++stage) {
      bool by_mass = stage == 1;
      float low;
      if (by_mass) {
        bool weighed = shared_.filters.top_p < 1.0f;
        if (!weighed && shared_.likely > -INFINITY) {
          begin_selection(tighter(shared_.cut, {shared_.likely, INT32_MAX}), 0, 0);
          if (where == kScan) where = kNowhere;
        }
        Mass total = 0;
        if (where == kNowhere) {
          total = gather(INFINITY, -INFINITY, true);
          where = kMasses;
        } else if (weighed) {
          total = where == kScan ? scanned_total() : listed_total(true, shared_.cut);
        }
        if (!weighed) break;
        double part = static_cast<double>(shared_.filters.top_p) * static_cast<double>(total);
        Mass target = part < 1.0 ? 1 : static_cast<Mass>(part);
        begin_selection(shared_.cut, target, total);
        if (where == kList) {
          Mass least = rank_key(shared_.cut.value, shared_.cut.last_id);
          Cut cut = cut_at(select_listed(true, least, rank_key(max_, 0), 0, target));
          begin_selection(tighter(cut, {shared_.likely, INT32_MAX}), 0, 0);
          break;
        }
        low = mass_floor();
      } else {
        low = count_floor(shared_.filters.top_k);
      }
      bool listed = false;
      begin_selection(select(by_mass, low, &listed), 0, 0);
      where = by_mass ? kMasses : listed ? kList : kNowhere;
    }
    if (where == kList) {
      deposit(shared_.cut);
      where = kMasses;
    }
    return where;
  }

  // Of the tokens in shared_.kept, those whose surprise -log(probability) is nearest to its mean, the
  // entropy, until they have typical_p of the mass; ties to the lower id. Above the first token's, a
  // surprise is (max - logit) / temperature, so no logarithm is taken. Leaves the cut in
  // shared_.typical, and its mass in masses().
  __device__ __forceinline__ void cut_typical() {
    auto weight_kept = [&](float x, int32_t id) { return keeps(x, id) ? weight(x) : 0.0f; };
    float least = shared_.kept.value;
    Mass total = weigh_leaves(true, least, weight_kept);
    Mass surprise = weigh_leaves(false, least, [&](float x, int32_t id) {
      float own = weight_kept(x, id);
      return own > 0.0f ? own * ((max_ - x) * shared_.inverse) : 0.0f;
    });
    double part = static_cast<double>(shared_.filters.typical_p) * static_cast<double>(total);
    Mass target = part < 1.0 ? 1 : static_cast<Mass>(part);
    if (thread() == 0) {
      double mean = static_cast<double>(surprise) / static_cast<double>(total);
      shared_.typical.mean = static_cast<float>(mean);
    }
    __syncthreads();
    // A distance's bits ascend with it: more than `low` is needed, `high` is enough.
    int32_t low = -1, high = static_cast<int32_t>(__float_as_uint(INFINITY));
    Mass below = 0;
#pragma unroll 1
    while (high - low > 1) {
      if (thread() < kThresholds) {
        int64_t width = int64_t{high} - low;
        int32_t bits = low + static_cast<int32_t>(width * (thread() + 1) / (kThresholds + 1));
        bits = max(bits, low + 1);
        shared_.thresholds[thread()] = __uint_as_float(static_cast<uint32_t>(bits));
        shared_.sums[thread()] = 0;
      }
      __syncthreads();
      masses_within();
#pragma unroll 1
      for (int j = 0; j < kThresholds; ++j) {
        int32_t bits = static_cast<int32_t>(__float_as_uint(shared_.thresholds[j]));
        if (bits <= low || bits >= high) continue;
        if (shared_.sums[j] >= target) {
          high = bits;
          break;
        }
        low = bits;
        below = shared_.sums[j];
      }
      __syncthreads();
    }
    float furthest = __uint_as_float(static_cast<uint32_t>(high));
    int32_t last = id_reaching(target - below, least, [&](float x, int32_t id) {
      if (!keeps(x, id) || distance(x) != furthest) return Mass{0};
      Mass own = mass(weight(x));
      return own > 0 ? own : Mass{1};
    });
    __syncthreads();
    if (thread() == 0) {
      shared_.typical.distance = furthest;
      shared_.typical.last_id = last;
    }
    weigh_leaves(true, least, weight_kept);
  }

  // shared_.sums[j] += mass of the kept tokens no further than shared_.thresholds[j].
  __device__ __forceinline__ void masses_within() {
#pragma unroll 1
    for (int32_t leaf = warp_id(); leaf < num_leaves_; leaf += num_warps()) {
      if (stats(leaf).max < shared_.kept.value) continue;
      int32_t begin = leaf * Leaf<T>::kSize;
      Leaf<T> x;
      x.load(row_, leaf);
#pragma unroll 1
      for (int j = 0; j < kThresholds; ++j) {
        x.forget_derived();
        float furthest = shared_.thresholds[j], sums[4] = {};
#pragma unroll
        for (int i = 0; i < Leaf<T>::kOwn; ++i) {
          float value = clean(x[i]);
          bool within =
              shared_.kept.keeps(value, begin + Leaf<T>::offset(i)) && distance(value) <= furthest;
          sums[i % 4] += within ? weight(value) : 0.0f;
        }
        Mass own = mass(warp_sum((sums[0] + sums[1]) + (sums[2] + sums[3])));
        if (lane_id() == 0) atomicAdd(&shared_.sums[j], own);
      }
    }
    __syncthreads();
  }

  // Tokens lighter than half of (1 - top_p) * total / vocab_size together weigh too little to matter.
  // Nor does what min-p drops: it is past the cut.
  __device__ float mass_floor() const {
    float total = static_cast<float>(shared_.total) / unit();
    float rest = 0.5f * (1.0f - shared_.filters.top_p) * total;
    double lightest = max_ + static_cast<double>(logf(rest / row_.size)) / shared_.inverse;
    float low = lightest > -FLT_MAX ? static_cast<float>(lightest) : -FLT_MAX;
    return fmaxf(fmaxf(low, shared_.likely), shared_.cut.value);
  }

  __device__ Mass scanned_total() {
    Mass total = 0;
#pragma unroll 1
    for (int32_t leaf = thread(); leaf < num_leaves_; leaf += threads()) {
      total += scanned_mass(leaf);
    }
    return block_reduce<Add>(shared_, total);
  }

  // Of the list's tokens that the cut keeps.
  __device__ Mass listed_total(bool by_mass, Cut cut) {
    Mass total = 0;
    for_each_listed(cut, [&](float x, int32_t) { total += amount(by_mass, x); });
    return block_reduce<Add>(shared_, total);
  }

  // Adds the list's kept tokens to the masses of their leaves.
  __device__ void deposit(Cut cut) {
    for_each_listed(cut, [&](float x, int32_t id) {
      atomicAdd(&masses()[id / Leaf<T>::kSize], mass(weight(x)));
    });
    __syncthreads();
  }

  // A logit that at least count tokens reach: as many leaves reach the count-th largest of the
  // leaves' maxima.
  __device__ float count_floor(int32_t count) {
    if (count > num_leaves_ || num_leaves_ > kListCapacity) return -INFINITY;
    __syncthreads();
#pragma unroll 1
    for (int32_t leaf = thread(); leaf < num_leaves_; leaf += threads()) {
      shared_.list_x[leaf] = stats(leaf).max;
      shared_.list_id[leaf] = leaf;
    }
    if (thread() == 0) shared_.list_count = num_leaves_;
    __syncthreads();
    Mass key = select_listed(
        false, rank_key(-INFINITY, INT32_MAX), rank_key(max_, 0), 0, static_cast<Mass>(count));
    return cut_at(key).value;
  }

  // The key of the listed token, its key within [low, high], at which the ranking first reaches the
  // target: the last token where it never does, high + 1 where there is none. `above` is the mass
  // before the range. Keys split into 256 bins, then the bin that reaches the target does.
  __device__ Mass select_listed(bool by_mass, Mass low, Mass high, Mass above, Mass target) {
    Mass none = high + 1;
    int count = list_count();
    while (true) {
      Mass range = high - low;
      int upper = static_cast<int>(range >> 32);
      int bits = upper != 0 ? 64 - __clz(upper) : 32 - __clz(static_cast<int>(range));
      int shift = bits > 8 ? bits - 8 : 0;
#pragma unroll 1
      for (int bin = thread(); bin < kBins; bin += threads()) {
        shared_.number[bin] = shared_.low_mass[bin] = shared_.high_mass[bin] = 0;
      }
      __syncthreads();
#pragma unroll 1
      for (int i = thread(); i < count; i += threads()) {
        Mass key = rank_key(shared_.list_x[i], shared_.list_id[i]);
        if (key < low || key > high) continue;
        int bin = static_cast<int>((high - key) >> shift);
        atomicAdd(&shared_.number[bin], 1u);
        if (!by_mass) continue;
        Mass own = mass(weight(shared_.list_x[i]));
        atomicAdd(&shared_.low_mass[bin], static_cast<uint32_t>(own & ((1u << kLowMassBits) - 1)));
        atomicAdd(&shared_.high_mass[bin], static_cast<uint32_t>(own >> kLowMassBits));
      }
      __syncthreads();
      if (warp_id() == 0) find_bin(by_mass, low, high, shift, above, target);
      __syncthreads();
      low = shared_.key_low;
      high = shared_.key_high;
      above = shared_.above;
      if (shared_.bin_number <= 1) break;
    }
    if (shared_.bin_number == 0) return none;
#pragma unroll 1
    for (int i = thread(); i < count; i += threads()) {
      Mass key = rank_key(shared_.list_x[i], shared_.list_id[i]);
      if (key >= low && key <= high) shared_.key = key;
    }
    __syncthreads();
    return shared_.key;
  }

  // The first warp's part: eight bins a lane.
  __device__ void find_bin(bool by_mass, Mass low, Mass high, int shift, Mass above, Mass target) {
    int first = lane_id() * kBinsPerLane;
    Mass own = 0;
    uint32_t number = 0;
#pragma unroll 1
    for (int bin = first; bin < first + kBinsPerLane; ++bin) {
      own += bin_amount(by_mass, bin);
      number += shared_.number[bin];
    }
    Mass before = above + warp_inclusive(own) - own;
    unsigned reached = __ballot_sync(kFullMask, number > 0 && before + own >= target);
    unsigned filled = __ballot_sync(kFullMask, number > 0);
    int chosen = reached != 0 ? __ffs(static_cast<int>(reached)) - 1
                              : kWarpSize - 1 - __clz(static_cast<int>(filled));
    if (filled == 0 && lane_id() == 0) shared_.bin_number = 0;
    if (filled == 0 || lane_id() != chosen) return;
    int found = first;
    Mass found_before = before;
#pragma unroll 1
    for (int bin = first; bin < first + kBinsPerLane; ++bin) {
      if (shared_.number[bin] == 0) continue;
      found = bin;
      found_before = before;
      before += bin_amount(by_mass, bin);
      if (before >= target) break;
    }
    shared_.bin_number = shared_.number[found];
    shared_.above = found_before;
    Mass top = high - (static_cast<Mass>(found) << shift);
    Mass bottom = top - ((Mass{1} << shift) - 1);
    shared_.key_high = top;
    shared_.key_low = bottom > low && bottom <= top ? bottom : low;
  }

  __device__ Mass bin_amount(bool by_mass, int bin) const {
    if (!by_mass) return shared_.number[bin];
    return (Mass{shared_.high_mass[bin]} << kLowMassBits) + shared_.low_mass[bin];
  }

  // Lists the tokens of shared_.cut with low <= logit < high, and writes of every leaf what reaches
  // high: its mass, or how many. Returns the sum of those. Where the list overflows only its count
  // is right.
  __device__ __forceinline__ Mass gather(float low, float high, bool by_mass) {
    __syncthreads();
    if (thread() == 0) shared_.list_count = 0;
    __syncthreads();
    Mass above = 0;
#pragma unroll 1
    for (int32_t leaf = warp_id(); leaf < num_leaves_; leaf += num_warps()) {
      Limits limits = limits_of(leaf);
      float from = fmaxf(low, limits.least), upto = fmaxf(high, limits.least);
      float top = stats(leaf).max;
      Mass own = 0;
      if (top >= fminf(from, upto)) {
        Leaf<T> x;
        load(x, leaf, limits);
        if (top >= upto) own = amount_from(x, upto, by_mass);
        x.forget_derived();
        unsigned between = 0;
#pragma unroll
        for (int i = 0; i < Leaf<T>::kOwn; ++i) {
          float value = clean(x[i]);
          between |= static_cast<unsigned>(value >= from && value < upto) << i;
        }
        if (__any_sync(kFullMask, between != 0)) append(x, leaf, between);
      }
      if (lane_id() == 0) {
        masses()[leaf] = own;
        above += own;
      }
    }
    return block_reduce<Add>(shared_, above);
  }

  // One warp's part of a list.
  __device__ void append(Leaf<T>& x, int32_t leaf, unsigned mask) {
    x.forget_derived();
    int32_t begin = leaf * Leaf<T>::kSize;
    if (row_.size - begin < Leaf<T>::kSize) {
#pragma unroll
      for (int i = 0; i < Leaf<T>::kOwn; ++i) {
        if (Leaf<T>::offset(i) >= row_.size - begin) mask &= ~(1u << i);
      }
    }
    int own = __popc(mask), upto = own;
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      int before = __shfl_up_sync(kFullMask, upto, offset);
      if (lane_id() >= offset) upto += before;
    }
    int slot = 0;
    if (lane_id() == kWarpSize - 1) slot = atomicAdd(&shared_.list_count, upto);
    slot = __shfl_sync(kFullMask, slot, kWarpSize - 1) + upto - own;
#pragma unroll
    for (int i = 0; i < Leaf<T>::kOwn; ++i) {
      if ((mask >> i & 1u) == 0) continue;
      if (slot < kListCapacity) {
        shared_.list_x[slot] = clean(x[i]);
        shared_.list_id[slot] = begin + Leaf<T>::offset(i);
      }
      ++slot;
    }
  }

  // How a cut meets a leaf: least is what its tokens must reach; `divided` where ties end inside.
  struct Limits {
    float least;
    bool divided;
  };

  __device__ Limits limits_of(int32_t leaf) const {
    Cut base = shared_.cut;
    int32_t begin = leaf * Leaf<T>::kSize;
    if (base.last_id < begin) return {next_above(base.value), false};
    return {base.value, base.last_id - begin < Leaf<T>::kSize - 1};
  }

  __device__ void load(Leaf<T>& x, int32_t leaf, Limits limits) const {
    x.load(row_, leaf);
    if (limits.divided) x.drop_ties(limits.least, shared_.cut.last_id - leaf * Leaf<T>::kSize);
  }

  // shared_.sums[j] = mass, or number, of shared_.cut's tokens with logits >= shared_.thresholds[j],
  // which descend.
  __device__ __forceinline__ void masses_from(bool by_mass) {
    if (thread() < kThresholds) shared_.sums[thread()] = 0;
    __syncthreads();
#pragma unroll 1
    for (int32_t leaf = warp_id(); leaf < num_leaves_; leaf += num_warps()) {
      Limits limits = limits_of(leaf);
      float top = stats(leaf).max;
      if (top < fmaxf(shared_.thresholds[kThresholds - 1], limits.least)) continue;
      Leaf<T> x;
      load(x, leaf, limits);
#pragma unroll 1
      for (int j = 0; j < kThresholds; ++j) {
        float least = fmaxf(shared_.thresholds[j], limits.least);
        Mass own = amount_from(x, least, by_mass);
        if (lane_id() == 0) atomicAdd(&shared_.sums[j], own);
      }
    }
    __syncthreads();
  }

  // Mass, or number, of the leaf's tokens from `least` upwards.
  __device__ Mass amount_from(Leaf<T>& x, float least, bool by_mass) const {
    x.forget_derived();
    if (by_mass) {
      float sums[4] = {};
#pragma unroll
      for (int i = 0; i < Leaf<T>::kOwn; ++i) {
        float value = clean(x[i]);
        sums[i % 4] += value >= least ? weight(value) : 0.0f;
      }
      return mass(warp_sum((sums[0] + sums[1]) + (sums[2] + sums[3])));
    }
    int number = 0;
#pragma unroll
    for (int i = 0; i < Leaf<T>::kOwn; ++i) number += clean(x[i]) >= least;
    return static_cast<Mass>(__reduce_add_sync(kFullMask, number));
  }

  // Lists evenly spread vectors of a large row, one of each stretch, and returns how many tokens of
  // the row one of the list stands for.
  __device__ double sample_row() {
    constexpr int kWidth = Leaf<T>::kWidth;
    int vectors = row_.size / kWidth;
    int stride = (vectors + kListCapacity / kWidth - 1) / (kListCapacity / kWidth);
    int number = vectors / stride;
    __syncthreads();
#pragma unroll 1
    for (int i = thread(); i < number * kWidth; i += threads()) {
      uint32_t stretch = static_cast<uint32_t>(i / kWidth);
      int within = static_cast<int>((stretch * 2654435761u >> 8) % static_cast<uint32_t>(stride));
      int64_t vector = static_cast<int64_t>(stretch) * stride + within;
      shared_.list_x[i] = logit(static_cast<int32_t>(vector * kWidth + i % kWidth));
      shared_.list_id[i] = i;
    }
    if (thread() == 0) shared_.list_count = number * kWidth;
    __syncthreads();
    return static_cast<double>(row_.size) / (number * kWidth);
  }

  // Bounds around the cut, guessed from a sample. What lies below the cut is many tokens of little
  // weight, so its mass is guessed well, however few tokens hold the rest.
  __device__ void guess(bool by_mass, float floor, float* from, float* upto) {
    double ratio = sample_row();
    double count = static_cast<double>(list_count());
    Cut reachable{floor, INT32_MAX};
    if (static_cast<double>(listed_total(false, reachable)) * ratio < 0.75 * kListCapacity) return;
    double low, high, sampled = count;
    if (by_mass) {
      sampled = static_cast<double>(listed_total(true, everything()));
      double below = static_cast<double>(shared_.total - shared_.target) / ratio;
      double tolerance = 6.0f / sqrtf(static_cast<float>(count));
      low = sampled - below * (1.0 - tolerance);
      high = sampled - below * (1.0 + tolerance);
    } else {
      double expected = static_cast<double>(shared_.target) / ratio;
      double slack = 3.0f * sqrtf(static_cast<float>(expected)) + 1.0f;
      low = expected + slack;
      high = expected - slack;
    }
#pragma unroll 1
    for (int side = 0; side < 2; ++side) {
      double wanted = side == 0 ? high : low;
      if (wanted < 1.0 || wanted >= sampled) continue;
      Mass key = select_listed(
          by_mass, rank_key(-INFINITY, INT32_MAX), rank_key(max_, 0), 0, static_cast<Mass>(wanted));
      float value = cut_at(key).value;
      if (side == 0) {
        *upto = next_above(value);
      } else {
        *from = fmaxf(value, floor);
      }
    }
  }

  // The cut, no looser than shared_.cut, at which the ranking's mass, or number, first reaches
  // shared_.target; past `low` nothing is looked for. *listed: the list holds every kept token. By
  // mass, masses() ends as the kept tokens' of every leaf; by number it is zero where *listed.
  __device__ __forceinline__ Cut select(bool by_mass, float low, bool* listed) {
    Bracket bracket{ordered_bits(low), ordered_bits(max_) + 1};
    float from = low, upto = next_above(max_);
    if (row_.size > kListCapacity) guess(by_mass, low, &from, &upto);
#pragma unroll 1
    for (int round = 0;; ++round) {
      Mass above = gather(from, upto, by_mass);
      Mass target = shared_.target;
      bool fits = list_count() <= kListCapacity;
      bool guessed = round == 0;
      if (fits && (!guessed || above < target)) {
        bool reaches = !guessed || ordered_bits(from) <= bracket.low ||
                       above + listed_total(by_mass, everything()) >= target;
        if (reaches) {
          Mass key = select_listed(
              by_mass, rank_key(from, INT32_MAX), rank_key(upto, INT32_MAX) - 1, above, target);
          Cut cut = cut_at(key);
          *listed = above == 0;
          if (by_mass) deposit(cut);
          return cut;
        }
        bracket.high = ordered_bits(from);
      } else if (guessed) {
        if (above < target) {
          bracket.high = ordered_bits(upto);
        } else {
          bracket.low = ordered_bits(upto);
        }
      } else if (bracket.single()) {
        *listed = false;
        return tied_prefix(from_ordered_bits(bracket.low), by_mass, above);
      }
      if (!bracket.single()) narrow(by_mass, round, &bracket);
      from = from_ordered_bits(bracket.low);
      upto = from_ordered_bits(bracket.high);
    }
  }

  // Thresholds strictly inside the bracket. Even in value for a few rounds, which suits logits; then
  // even in representation, which ends in a bracket of one float.
  __device__ void narrow(bool by_mass, int round, Bracket* bracket) {
    float low = from_ordered_bits(bracket->low), high = from_ordered_bits(bracket->high);
    bool by_value = round < 4 && low > -FLT_MAX && high < FLT_MAX;
    __syncthreads();
    if (thread() < kThresholds) {
      uint32_t part = static_cast<uint32_t>(kThresholds - thread());
      float threshold;
      if (by_value) {
        double width = static_cast<double>(high) - low;
        threshold = static_cast<float>(low + width * part / (kThresholds + 1));
      } else {
        uint64_t width = bracket->high - bracket->low;
        threshold = from_ordered_bits(bracket->low +
                                      static_cast<uint32_t>(width * part / (kThresholds + 1)));
      }
      shared_.thresholds[thread()] = threshold;
    }
    masses_from(by_mass);
    uint32_t lowest = bracket->low;
#pragma unroll 1
    for (int j = 0; j < kThresholds; ++j) {
      uint32_t bits = ordered_bits(shared_.thresholds[j]);
      if (bits <= lowest || bits >= bracket->high) continue;
      if (shared_.sums[j] >= shared_.target) {
        bracket->low = bits;
        break;
      }
      bracket->high = bits;
    }
  }

  // More equal tokens than a list holds: counted off in id order. A warp has a run of leaves.
  __device__ Cut tied_prefix(float value, bool by_mass, Mass above) {
    Mass target = shared_.target;
    Mass each = by_mass ? mass(weight(value)) : 1;
    if (each == 0) each = 1;
    Mass wanted = target > above ? (target - above + each - 1) / each : 0;
    int32_t run = (num_leaves_ - 1) / num_warps() + 1;
    int32_t begin = warp_id() * run, end = min(begin + run, num_leaves_);
    Mass number = 0, total;
#pragma unroll 1
    for (int32_t leaf = begin; leaf < end; ++leaf) number += number_tied(leaf, value);
    Mass own = lane_id() == 0 ? number : 0;
    Mass upto = __shfl_sync(kFullMask, block_inclusive(shared_, own, &total), 0) - number;
    wanted = wanted < 1 ? 1 : wanted > total ? total : wanted;
#pragma unroll 1
    for (int32_t leaf = begin; leaf < end && upto < wanted; ++leaf) {
      Mass found = static_cast<Mass>(number_tied(leaf, value));
      Mass kept = found < wanted - upto ? found : wanted - upto;
      if (by_mass && lane_id() == 0) masses()[leaf] += kept * each;
      upto += kept;
      if (kept > 0 && upto == wanted) {
        // the kept-th tie of this leaf
        int own_number = 0;
        for_each_in_order(row_, leaf, [&](float x, int32_t) { own_number += x == value; });
        int before = static_cast<int>(warp_inclusive(static_cast<Mass>(own_number))) - own_number;
        for_each_in_order(row_, leaf, [&](float x, int32_t id) {
          before += x == value;
          if (x == value && before == static_cast<int>(kept)) shared_.rest_id = id;
        });
      }
    }
    __syncthreads();
    return {value, shared_.rest_id};
  }

  __device__ int number_tied(int32_t leaf, float value) const {
    Limits limits = limits_of(leaf);
    if (stats(leaf).max < value || value < limits.least) return 0;
    Leaf<T> x;
    load(x, leaf, limits);
    int number = 0;
#pragma unroll
    for (int i = 0; i < Leaf<T>::kOwn; ++i) number += clean(x[i]) == value;
    return __reduce_add_sync(kFullMask, number);
  }

  // The first kept token, in id order, at which the running mass exceeds uniform * total.
  __device__ __forceinline__ RowToken invert_cdf(float uniform) {
    seek(uniform);
    return pick(shared_.leaf, shared_.kept, shared_.part);
  }

  // The leaf of that token, shared_.leaf, and the part of its mass that lies before the token.
  __device__ __forceinline__ void seek(float uniform) {
    int32_t run = (num_leaves_ - 1) / threads() + 1;
    int32_t begin = min(thread() * run, num_leaves_), end = min(begin + run, num_leaves_);
    Mass own = 0, total;
#pragma unroll 1
    for (int32_t leaf = begin; leaf < end; ++leaf) own += leaf_mass(leaf);
    Mass upto = block_inclusive(shared_, own, &total);
    // floor(total * n / 2^24), of the uniform's 24 bits
    Mass n = static_cast<Mass>(uniform * 0x1p24f);
    Mass target = (total >> 24) * n + ((total & 0xffffffu) * n >> 24);
    Mass before = upto - own;
    if (before <= target && target < upto) {
#pragma unroll 1
      for (int32_t leaf = begin; leaf < end; ++leaf) {
        Mass here = leaf_mass(leaf);
        if (before + here > target) {
          shared_.leaf = leaf;
          shared_.part = static_cast<double>(target - before) / static_cast<double>(here);
          break;
        }
        before += here;
      }
    }
    __syncthreads();
  }

  // The first kept token of the leaf at which the running mass exceeds that part of the leaf's.
  __device__ __forceinline__ RowToken pick(int32_t leaf, Cut cut, double part) const {
    if (warp_id() != 0) return {0, 0.0f};
    float origin = stats(leaf).max;
    auto share = [&](float x, int32_t id) {
      bool kept = cut.keeps(x, id) && is_typical(x, id);
      return kept ? mass(ptx::exp2_approx((x - origin) * scale())) : Mass{0};
    };
    Mass own = 0;
    for_each_in_order(row_, leaf, [&](float x, int32_t id) { own += share(x, id); });
    Mass upto = warp_inclusive(own);
    Mass total = __shfl_sync(kFullMask, upto, kWarpSize - 1);
    Mass target = static_cast<Mass>(part * static_cast<double>(total));
    if (target >= total) target = total - 1;
    Mass running = upto - own;
    bool mine = running <= target && target < upto;
    RowToken found{-1, 0.0f};
    for_each_in_order(row_, leaf, [&](float x, int32_t id) {
      running += share(x, id);
      if (mine && found.id < 0 && running > target) found = {id, x};
    });
    int owner = __ffs(static_cast<int>(__ballot_sync(kFullMask, mine))) - 1;
    return {__shfl_sync(kFullMask, found.id, owner), __shfl_sync(kFullMask, found.logit, owner)};
  }

  RowShared& shared_;
  const RowLogits<T, kProcessed>& row_;
  int32_t num_leaves_;
  float max_ = -INFINITY;
  float log_sum_ = 0.0f;  // of the raw logits, then of what is kept
};

}  // namespace specops
