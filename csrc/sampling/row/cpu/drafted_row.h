// SPDX-License-Identifier: Apache-2.0
// Verification of the drafts after a row of logits: which draft is accepted, and which token is
// drawn from the residual distribution after rejections.
//
// Order:   as in row/cpu/row.h. The residual of a leaf is summed in fp32 lanes; leaves are folded
//          left in fp64.
#pragma once

#include <cstdint>

#include "sampling/row/cpu/filtered_row.h"
#include "sampling/row/cpu/row.h"
#include "sampling/row/cpu/scratch.h"
#include "sampling/row/cpu/target_row.h"
#include "sampling/row/row_rule.h"

namespace specops::SPECOPS_ISA {
namespace {

// The distribution from which the drafts after a row were drawn.
struct RowDraftProbs {
  const float* probs = nullptr;        // nullptr: the drafts were chosen without randomness
  const int32_t* token_ids = nullptr;  // ids of probs, -1 = unused; nullptr: token id has probs[id]
  int32_t size = 0;

  float of(int32_t token_id) const {
    if (probs == nullptr) return 1.0f;
    if (token_ids == nullptr) return token_id < size ? clean_draft_prob(probs[token_id]) : 0.0f;
    for (int32_t i = 0; i < size; ++i) {
      if (token_ids[i] == token_id) return clean_draft_prob(probs[i]);
    }
    return 0.0f;
  }
};

struct DraftedRowScratch {
  GrowingArray<double> masses;   // residual mass of each leaf
  GrowingArray<int32_t> head;    // per leaf: index of its last changed token, -1 = none
  GrowingArray<int32_t> next;    // per changed token: the one before it in its leaf, -1 = none
  GrowingArray<int32_t> tokens;  // the rejected drafts
};
thread_local DraftedRowScratch tls_drafted_row;

// A filtered row with drafts. Its residual (Residual in row_rule.h) is target_probs less what
// rejected drafts subtract. If only few tokens change, the leaves without changed tokens keep their
// sums.
template <typename T>
class DraftedRow {
 public:
  // max_rejections: upper bound on rejected drafts; used if drafts were chosen without randomness.
  DraftedRow(const Row<T>& row, const RowDraftProbs& draft_probs, int32_t max_rejections)
      : row_(row), draft_probs_(draft_probs), inverse_mass_(1.0 / row.kept_mass) {
    masses_ = tls_drafted_row.masses.reserve(row.num_leaves);
    if (is_dense()) return;
    head_ = tls_drafted_row.head.reserve(row.num_leaves);
    for (int32_t leaf = 0; leaf < row.num_leaves; ++leaf) head_[leaf] = -1;
    if (draft_probs.probs == nullptr) {
      next_ = tls_drafted_row.next.reserve(max_rejections);
      rejected_ = tls_drafted_row.tokens.reserve(max_rejections);
      return;
    }
    next_ = tls_drafted_row.next.reserve(draft_probs.size);
    for (int32_t i = 0; i < draft_probs.size; ++i) {
      if (draft_probs.token_ids[i] >= 0) link(i, draft_probs.token_ids[i]);
    }
  }

  double target_prob(int32_t token_id) const { return weight_of(row_, token_id) * inverse_mass_; }

  bool accepts_draft(int32_t token_id, float uniform) const {
    double left = left_of(residual_, target_prob(token_id), taken_prob(token_id));
    return accepts(residual_, uniform, left, draft_probs_.of(token_id));
  }

  // Subtracts the distribution of a rejected draft from the residual. If rounding would leave no
  // mass, the residual stays as it was.
  void reject(int32_t token_id) {
    bool chosen = draft_probs_.probs == nullptr;
    if (chosen) {
      rejected_[num_rejected_] = token_id;
      link(num_rejected_++, token_id);
    }
    Residual next = chosen ? Residual{1.0, 1.0, 0.0} : after_rejection(residual_);
    if (take(next) > 0.0) return;
    if (chosen) head_[token_id / kLeaf] = next_[--num_rejected_];
    take(residual_);
  }

  // Sets the residual to weight * target_probs less the draft's distribution, for block
  // verification. Returns its mass. If the mass is 0, the residual is set to target_probs instead.
  double compare(double weight, int32_t token_id) {
    if (draft_probs_.probs == nullptr) {
      rejected_[0] = token_id;
      link(num_rejected_++, token_id);
    }
    double mass = take(block_residual(weight));
    if (mass == 0.0) take({});
    return mass;
  }

  // Draws from the residual by inverse CDF in token-id order, after reject() or compare().
  int32_t draw(float uniform) const {
    double target = uniform * residual_.mass, before = 0.0, after = 0.0;
    int32_t chosen = 0;
    for (int32_t leaf = 0; leaf < row_.num_leaves && after <= target; ++leaf) {
      if (masses_[leaf] <= 0.0) continue;
      before = after;
      after = before + masses_[leaf];
      chosen = leaf;
    }
    // Rounding may place the target just past the last token of the leaf; then the last one is
    // returned.
    float left[kLeaf];
    weigh_leaf(chosen, residual_, left);
    int32_t found = chosen * kLeaf;
    for (int32_t i = 0; i < kLeaf; ++i) {
      if (left[i] <= 0.0f) continue;
      found = chosen * kLeaf + i;
      before += left[i];
      if (before > target) break;
    }
    return found;
  }

 private:
  // A leaf with a smaller mass counts as empty, so that every leaf that is not empty has a token
  // whose mass is not 0 in fp32.
  static constexpr double kLeast = 1e-30;

  // Sums the mass of a residual and returns it. Makes it the current residual if the mass is above
  // 0.
  double take(Residual residual) {
    residual.mass = 0.0;
    float left[kLeaf];
    for (int32_t leaf = 0; leaf < row_.num_leaves; ++leaf) {
      masses_[leaf] = leaf_mass(leaf, residual, left);
      residual.mass += masses_[leaf];
    }
    if (residual.mass > 0.0) residual_ = residual;
    return residual.mass;
  }

  bool is_dense() const {
    return draft_probs_.probs != nullptr && draft_probs_.token_ids == nullptr;
  }

  void link(int32_t i, int32_t token_id) {
    if (token_id / kLeaf >= row_.num_leaves) return;  // an id past the vocabulary subtracts nothing
    next_[i] = head_[token_id / kLeaf];
    head_[token_id / kLeaf] = i;
  }

  // Returns the probability of a token in the distribution that a rejection subtracts. Drafts that
  // were chosen without randomness subtract only the rejected tokens themselves.
  double taken_prob(int32_t token_id) const {
    if (draft_probs_.probs != nullptr) return draft_probs_.of(token_id);
    for (int32_t i = 0; i < num_rejected_; ++i) {
      if (rejected_[i] == token_id) return 1.0;
    }
    return 0.0;
  }

  double leaf_mass(int32_t leaf, const Residual& residual, float* left) const {
    double kept = mass_of_leaf(row_, leaf);
    if (kept <= 0.0) return 0.0;
    double mass = kept * inverse_mass_ * residual.weight;
    if (is_dense() || head_[leaf] >= 0) mass = weigh_leaf(leaf, residual, left);
    return mass > kLeast ? mass : 0.0;
  }

  // Writes the residual of every token of a leaf to `left`, and returns their sum.
  double weigh_leaf(int32_t leaf, const Residual& residual, float* left) const {
    double unit = weigh_kept_leaf(row_, leaf, left);
    F32x16 share = set1(static_cast<float>(unit * inverse_mass_));
    F32x16 weight = set1(static_cast<float>(residual.weight));
    F32x16 taken = set1(static_cast<float>(residual.taken));
    int32_t first = leaf * kLeaf;
    F32x16 sum = zero();
    for (int32_t i = 0; i < kLeaf; i += kLanes) {
      F32x16 kept = mul(mul(load(left + i), share), weight);
      if (is_dense() && first + i < draft_probs_.size) {
        const float* probs = draft_probs_.probs + first + i;
        int32_t size = draft_probs_.size - first - i;
        F32x16 drawn = size >= kLanes ? load(probs) : load_partial(probs, size);
        drawn = min(max(drawn, zero()), set1(1.0f));  // NaN counts as 0
        kept = max(sub(kept, mul(drawn, taken)), zero());
      }
      store(left + i, kept);
    }
    for (int32_t i = is_dense() ? -1 : head_[leaf]; i >= 0; i = next_[i]) {
      bool chosen = draft_probs_.probs == nullptr;
      int32_t token_id = chosen ? rejected_[i] : draft_probs_.token_ids[i];
      double prob = chosen ? 1.0 : clean_draft_prob(draft_probs_.probs[i]);
      float rest = left[token_id - first] - static_cast<float>(residual.taken * prob);
      left[token_id - first] = rest > 0.0f ? rest : 0.0f;
    }
    for (int32_t i = 0; i < kLeaf; i += kLanes) sum = add(sum, load(left + i));
    return reduce_add(sum);
  }

  const Row<T>& row_;
  RowDraftProbs draft_probs_;
  double inverse_mass_;
  Residual residual_;
  double* masses_ = nullptr;
  int32_t* head_ = nullptr;
  int32_t* next_ = nullptr;
  int32_t* rejected_ = nullptr;
  int32_t num_rejected_ = 0;
};

// Returns the choice of a row in a step without block verification. Source: float
// operator()(Purpose, uint32_t sub_index), which returns uniforms in [0, 1).
template <typename T, typename Source>
[[maybe_unused]] int32_t choose_by_rule(TargetRow<T>& target,
                                        RowRule rule,
                                        const RequestDrafts& drafts,
                                        int32_t row_idx,
                                        const RowDraftProbs& draft_probs,
                                        const Source& uniform) {
  int32_t child = next_child(drafts, row_idx);
  if (rule == RowRule::kDraft) return drafts.token_ids[child];
  const Row<T>& row = target.kept();
  bool judged = !row.is_certain() && child >= 0;
  if (judged && rule == RowRule::kTopP && weight_of(row, drafts.token_ids[child]) > 0.0) {
    return drafts.token_ids[child];
  }
  if (!judged || rule != RowRule::kRejection) return target.choose(Purpose::kTarget, uniform);
  DraftedRow<T> drafted(row, draft_probs, drafts.num_nodes);
  for (uint32_t i = 0; child >= 0; child = next_child(drafts, row_idx, child), ++i) {
    int32_t token_id = drafts.token_ids[child];
    if (drafted.accepts_draft(token_id, uniform(Purpose::kAccept, i))) return token_id;
    drafted.reject(token_id);
  }
  return drafted.draw(uniform(Purpose::kResidual, 0));
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
