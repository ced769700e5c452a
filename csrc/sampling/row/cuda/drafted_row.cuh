// SPDX-License-Identifier: Apache-2.0
// A scanned row with drafts, for rejection, top-p and block verification. A child of a row is a
// draft that follows it. After rejections, the residual of the target distribution is
//
//     left(x) = max(weight(x) - taken * draft_probs(x), 0)
//
// in units of the row's weights, of which the largest is 1. Up to a factor, this is left(x) of
// Residual (row_rule.h).
//
// Order: as in row.cuh. The residual of a leaf is summed in one fp32 tree; sums of leaves are
// integer masses.
#pragma once

#include "sampling/row/cuda/draw.cuh"
#include "sampling/row/cuda/row.cuh"
#include "sampling/row/row_rule.h"
#include "sampling/verify/accept_walk.h"
#include "sampling/verify/verify.h"

namespace specops {

// The distribution from which the children of one row were drawn.
struct DraftRow {
  const float* probs;        // [size]; nullptr: children were chosen without randomness
  const int32_t* token_ids;  // [size], -1 = unused; nullptr: token id has probs[id]
  int32_t size;

  __device__ bool one_hot() const { return probs == nullptr; }
  __device__ bool sparse() const { return token_ids != nullptr; }
};

// Returns the probability of a draft, with the same bits in every thread of a warp. Sets *outside
// if the list of token ids has an invalid token.
__device__ inline float draft_prob(const DraftRow& draft,
                                   int32_t id,
                                   int32_t vocab_size,
                                   bool* outside) {
  *outside = false;
  if (draft.one_hot()) return 1.0f;
  if (!draft.sparse()) return id < vocab_size ? clean_draft_prob(draft.probs[id]) : 0.0f;
  float found = 0.0f;
  bool wrong = false;
#pragma unroll 1
  for (int32_t i = lane_id(); i < draft.size; i += kWarpSize) {
    int32_t named = draft.token_ids[i];
    wrong = wrong || !is_listed_token(named, vocab_size);
    if (named == id) found = clean_draft_prob(draft.probs[i]);
  }
  *outside = __any_sync(kFullMask, wrong) != 0;
  return warp_max(found);
}

constexpr int32_t kNoChoice = INT32_MIN;  // choice of a row whose drafts are invalid

// Result of judge() for the children of a row: the index of the accepted child, or one of these
// values.
enum : int32_t {
  kDrawOwn = -1,   // no child is accepted: draw from the row's own distribution
  kDrawLeft = -2,  // no child is accepted: draw from the residual
  kGoBack = -3,    // block verification ends at an earlier row
  kOutOfOrder = -4,
};

// A row with drafts. Use it after filter(), unless the target distribution has a single token.
template <typename T, bool kProcessed>
class DraftedRow : public Row<T, kProcessed> {
  using Base = Row<T, kProcessed>;

 public:
  using Base::Base;
  using Base::logit;
  using Base::shared;

  // Sums the mass of the kept tokens, which all methods below use.
  __device__ void weigh() {
    Mass total = Base::kept_mass();
    if (Base::thread() == 0) shared.total = total;
    __syncthreads();
  }

  // Returns whether the filters keep a token; false for an id past the vocabulary.
  __device__ bool keeps(int32_t id) const {
    if (id >= Base::logits.size) return false;
    float x = logit(id);
    return x > -INFINITY && Base::keeps(x, id);
  }

  __device__ double target_prob(int32_t id) const {
    return keeps(id) ? static_cast<double>(Base::weight(logit(id)) * Base::unit()) / total() : 0.0;
  }

  // Decides about the children in shared.list_id[0, num_children) in order, and subtracts rejected
  // ones from the row. accept_coin(child) returns the uniform with which a child is accepted or
  // rejected. In block verification, `block_weight` is above 0: the weight of the target before the
  // row's only child. Otherwise it is 0.
  template <typename Coin>
  __device__ int32_t
  judge(const DraftRow& draft, int32_t num_children, double block_weight, Coin accept_coin) {
    Residual left, next;
    bool restores = false;  // rounding left no mass: restore the previous residual
    int32_t child = 0, id = 0;
#pragma unroll 1
    while (child < num_children || restores) {
      if (!restores) {
        id = shared.list_id[child];
        next = block_residual(block_weight);
        if (block_weight == 0.0) {
          bool outside;
          double given = draft_prob(draft, id, Base::logits.size, &outside);
          if (outside) return kOutOfOrder;
          bool gone = draft.one_hot() && is_removed(child, id);
          double own = left_of(left, target_prob(id), draft.one_hot() ? 0.0 : given);
          if (accepts(left, accept_coin(child), gone ? 0.0 : own, given)) return child;
          if (gone) {
            ++child;
            continue;
          }
          next = draft.one_hot() ? Residual{} : after_rejection(left);
        }
      }
      next.mass = take(draft, child, id, next);
      if (restores) {
        restores = false;
        ++child;
        continue;
      }
      if (block_weight > 0.0 && !(accept_coin(0) < block_chance(block_weight, next.mass))) {
        return kGoBack;
      }
      if (next.mass > 0.0) {
        left = next;
        ++child;
        continue;
      }
      restores = true;
      next = block_weight > 0.0 ? Residual{} : left;
      __syncthreads();
      if (Base::thread() == 0 && draft.one_hot()) shared.list_id[child] = -1;
      __syncthreads();
    }
    if (Base::thread() == 0) shared.taken = draft.one_hot() ? 0.0f : taken_of(left);
    __syncthreads();
    return kDrawLeft;
  }

  // Draws from the residual of judge() by inverse CDF. The result is valid in the first warp.
  __device__ RowToken draw_left(const DraftRow& draft, int32_t num_children, float uniform) {
    seek(*this, uniform);
    if (warp_id() != 0) return {0, 0.0f};
    int32_t leaf = shared.leaf;
    // Computed in units of the heaviest token of the leaf, which is finer than the unit of the
    // row's masses, because the residual may be small.
    float lift = 1.0f / Base::weight(Base::stats(leaf).max);
    Mass own = 0, target = 0;
    bool mine = true;
    RowToken found{-1, 0.0f};
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      Mass running = own;
      for_each_left(
          draft, num_children, shared.taken, leaf, [&](float weight, float x, int32_t id) {
            running += static_cast<Mass>(weight * lift * 0x1p52f);
            if (pass == 1 && mine && found.id < 0 && running > target) found = {id, x};
          });
      if (pass == 1) break;
      Mass upto = warp_inclusive(running);
      Mass total = __shfl_sync(kFullMask, upto, kWarpSize - 1);
      target = static_cast<Mass>(shared.part * static_cast<double>(total));
      if (target >= total) target = total - 1;
      own = upto - running;
      mine = own <= target && target < upto;
    }
    int owner = __ffs(static_cast<int>(__ballot_sync(kFullMask, mine))) - 1;
    return {__shfl_sync(kFullMask, found.id, owner), __shfl_sync(kFullMask, found.logit, owner)};
  }

 private:
  __device__ double total() const { return static_cast<double>(shared.total); }

  // Returns `taken` of a residual in units of the row's weights.
  __device__ float taken_of(const Residual& left) const {
    return static_cast<float>(left.taken / left.weight * total() / Base::unit());
  }

  __device__ bool is_removed(int32_t child, int32_t id) const {
    bool found = false;
#pragma unroll 1
    for (int32_t i = 0; i < child; ++i) found = found || shared.list_id[i] == id;
    return found;
  }

  // Sets masses() to the masses of a residual, and returns its total mass, relative to the kept
  // mass. Which leaves change depends on the draft distribution: one-hot drafts remove all children
  // up to `child` (whose token is `id`), and only the leaf of `id` is recomputed; a sparse
  // distribution changes the leaves of the tokens in its list, a dense one all leaves.
  __device__ double take(const DraftRow& draft, int32_t child, int32_t id, const Residual& left) {
    if (shared.weighed == 0) {
      __syncthreads();
#pragma unroll 1
      for (int32_t leaf = Base::thread(); leaf < Base::num_leaves; leaf += Base::threads()) {
        Base::masses()[leaf] = Base::scanned_mass(leaf);
      }
      if (Base::thread() == 0) shared.weighed = 1;
      __syncthreads();
    }
    float taken = taken_of(left);
    int32_t number = draft.one_hot() ? 1 : draft.sparse() ? draft.size : Base::num_leaves;
#pragma unroll 1
    for (int32_t item = warp_id(); item < number; item += num_warps()) {
      int32_t leaf = item;
      if (draft.one_hot()) leaf = id / Leaf<T>::kSize;
      if (draft.sparse()) leaf = leaf_named(draft, item);
      if (leaf < 0 || leaf >= Base::num_leaves) continue;  // an id past the vocabulary
      float sum = 0.0f;
      if (Base::stats(leaf).max >= shared.kept.value) {
        for_each_left(
            draft, child + 1, taken, leaf, [&](float own, float, int32_t) { sum += own; });
      }
      sum = warp_sum(sum);
      if (lane_id() == 0) Base::masses()[leaf] = Base::mass(sum);
    }
    __syncthreads();
    return left.weight * static_cast<double>(Base::kept_mass()) / total();
  }

  // Returns the leaf of entry `item` of the list of token ids; -1 if an earlier entry is in the
  // same leaf.
  __device__ int32_t leaf_named(const DraftRow& draft, int32_t item) const {
    int32_t id = draft.token_ids[item];
    if (id < 0) return -1;
    int32_t leaf = id / Leaf<T>::kSize;
    bool seen = false;
#pragma unroll 1
    for (int32_t i = lane_id(); i < item; i += kWarpSize) {
      int32_t other = draft.token_ids[i];
      seen = seen || (other >= 0 && other / Leaf<T>::kSize == leaf);
    }
    return __any_sync(kFullMask, seen) ? -1 : leaf;
  }

  // Calls visit(left, logit, id) for the lane's tokens of a leaf, in ascending order of ids.
  // `removed`: number of children of one-hot drafts that are removed entirely.
  template <typename Visit>
  __device__ void for_each_left(
      const DraftRow& draft, int32_t removed, float taken, int32_t leaf, Visit visit) const {
    constexpr int kRun = Leaf<T>::kOwn;  // consecutive ids per lane
    static_assert(kRun <= 32);
    const int32_t* ids = draft.one_hot() ? shared.list_id : draft.token_ids;
    int32_t number = draft.one_hot() ? removed : draft.sparse() ? draft.size : 0;
    int32_t first = leaf * Leaf<T>::kSize + lane_id() * kRun;
    uint32_t named = draft.one_hot() || draft.sparse() ? 0 : ~0u;
#pragma unroll 1
    for (int32_t i = 0; i < number; ++i) {
      uint32_t place = static_cast<uint32_t>(ids[i] - first);
      if (place < kRun) named |= 1u << place;
    }
    for_each_in_order<false>(Base::logits, leaf, [&](float x, int32_t id) {
      float own = x > -INFINITY && Base::keeps(x, id) ? Base::weight(x) : 0.0f;
      if ((named >> (id - first) & 1u) != 0 && own > 0.0f) {
        float given = draft.one_hot() ? INFINITY : 0.0f;
        if (!draft.one_hot()) {
          int32_t at = draft.sparse() ? place_in_list(draft, id) : id;
          given = taken * clean_draft_prob(draft.probs[at]);
        }
        own = fmaxf(own - given, 0.0f);
      }
      visit(own, x, id);
    });
  }

  // Returns the index of a token that is in the list of token ids. Called by a single lane.
  __device__ static int32_t place_in_list(const DraftRow& draft, int32_t id) {
    int32_t i = 0;
#pragma unroll 1
    while (draft.token_ids[i] != id) ++i;
    return i;
  }
};

}  // namespace specops
