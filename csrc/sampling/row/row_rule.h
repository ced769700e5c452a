// SPDX-License-Identifier: Apache-2.0
// The rules of verification for one row of a request: its strategy, its policy, its drafts and the
// random numbers it may use. Plain C++ and CUDA.
#pragma once

#include <cstdint>

#include "common/philox.h"

namespace specops {

// Verification strategies; values of specops.sampling.VerifyStrategy.
enum class VerifyStrategy : int32_t {
  kGreedy = 0,
  kTargetMatch = 1,
  kRejection = 2,
  kBlock = 3,
  kTopP = 4,
};

// Values of specops.sampling.AcceptPolicy. All except kNormal and kRejectAll are for measurements
// and do not give the target distribution.
enum class AcceptPolicy : int32_t { kNormal = 0, kAcceptAll = 1, kRejectAll = 2, kSynthetic = 3 };

// Returns whether `value` is a strategy. `tree`: whether the strategy must support trees of drafts;
// otherwise only chains.
SPECOPS_HOST_DEVICE bool is_strategy(int32_t value, bool tree) {
  return value >= 0 &&
         value <= static_cast<int32_t>(tree ? VerifyStrategy::kRejection : VerifyStrategy::kTopP);
}

// Returns whether `value` is a supported policy. Measurement policies support chains only.
SPECOPS_HOST_DEVICE bool is_policy(int32_t value, bool tree) {
  if (tree) {
    return value == static_cast<int32_t>(AcceptPolicy::kNormal) ||
           value == static_cast<int32_t>(AcceptPolicy::kRejectAll);
  }
  return value >= 0 && value <= static_cast<int32_t>(AcceptPolicy::kSynthetic);
}

// Returns whether a request uses random numbers and therefore needs a seed.
SPECOPS_HOST_DEVICE bool draws(VerifyStrategy strategy, AcceptPolicy policy, float temperature) {
  return (strategy != VerifyStrategy::kGreedy && temperature > 0.0f) ||
         policy == AcceptPolicy::kSynthetic;
}

// The drafts of all requests of a step, with the rows of logits that verify them.
struct Drafts {
  const int32_t* output_indptr = nullptr;  // [batch + 1], row offsets of each request
  const int32_t* token_ids = nullptr;      // [batch, max_draft_tokens], -1 padded
  const int32_t* parents = nullptr;  // [batch, max_draft_tokens], -1 = the root; nullptr: chains
  int64_t max_draft_tokens = 0;
};

// The drafts of one request, as nodes of a tree. Row 0 of the request's logits follows the last
// known token; row r > 0 follows node r - 1.
struct RequestDrafts {
  // Per node. A negative id ends the drafts. An id past the vocabulary has probability 0 in every
  // row.
  const int32_t* token_ids = nullptr;
  const int32_t* parents = nullptr;  // less than the node's index; -1 = row 0; nullptr: a chain
  int32_t num_nodes = 0;
};

SPECOPS_HOST_DEVICE RequestDrafts drafts_of(const Drafts& drafts,
                                            int64_t batch_idx,
                                            int32_t num_nodes) {
  int64_t first = batch_idx * drafts.max_draft_tokens;
  return {drafts.token_ids + first, drafts.parents ? drafts.parents + first : nullptr, num_nodes};
}

// Returns the node of the next child of a row after node `previous` (-1: the first child); -1 if
// there is none. A child with a negative id ends the children of its row.
SPECOPS_HOST_DEVICE int32_t next_child(const RequestDrafts& drafts,
                                       int32_t row,
                                       int32_t previous = -1) {
  int32_t node = previous < row ? row : previous + 1;  // children come after their parent
  if (drafts.parents == nullptr) {
    if (node != row) return -1;
  } else {
    while (node < drafts.num_nodes && drafts.parents[node] != row - 1) ++node;
  }
  return node < drafts.num_nodes && drafts.token_ids[node] >= 0 ? node : -1;
}

// Returns the number of drafts of a chain before the first negative id.
SPECOPS_HOST_DEVICE int32_t chain_len(const RequestDrafts& drafts) {
  int32_t length = 0;
  while (length < drafts.num_nodes && drafts.token_ids[length] >= 0) ++length;
  return length;
}

// Returns the number of drafts between the last known token and a row.
SPECOPS_HOST_DEVICE int32_t row_depth(const RequestDrafts& drafts, int32_t row) {
  if (drafts.parents == nullptr) return row;
  int32_t depth = 0;
  for (; row > 0; row = drafts.parents[row - 1] + 1) ++depth;
  return depth;
}

// Returns the anchor of the random numbers of a block step. Block verification uses random numbers
// and drafts beyond the accepted prefix, so the next step must not use the same numbers again.
// Therefore the first position of the step, plus one, is part of their key; all other decisions
// have anchor 0.
SPECOPS_HOST_DEVICE uint32_t block_anchor(int32_t first_position) {
  return static_cast<uint32_t>(first_position) + 1u;
}

// Returns whether the rows of a request are decided together by block verification, with random
// numbers of the step. `certain`: the target distributions are one-hot, so that every strategy
// chooses the token that `sample` chooses.
SPECOPS_HOST_DEVICE bool is_block_step(VerifyStrategy strategy,
                                       AcceptPolicy policy,
                                       const RequestDrafts& drafts,
                                       bool certain) {
  return strategy == VerifyStrategy::kBlock && policy == AcceptPolicy::kNormal && !certain &&
         chain_len(drafts) > 0;
}

// Rule by which a row chooses its token, in a step without block verification.
enum class RowRule : int32_t {
  kOwn,        // the token that `sample` chooses for the row
  kEnd,        // like kOwn, but the path ends there whatever the drafts are
  kDraft,      // the draft, regardless of the logits
  kTopP,       // the draft if the filters keep it, else as kOwn
  kRejection,  // an accepted child, else a token drawn from the residual
};

// Returns the rule of a row. `first_draft`: the token of the first child, or -1; if it is past the
// vocabulary, no policy emits it. `accept_rate`: the probability with which kSynthetic accepts this
// draft. uniform(purpose, sub_index) returns random numbers of the row.
template <typename Uniform>
SPECOPS_HOST_DEVICE RowRule row_rule(VerifyStrategy strategy,
                                     AcceptPolicy policy,
                                     int32_t first_draft,
                                     int64_t vocab_size,
                                     float accept_rate,
                                     bool certain,
                                     const Uniform& uniform) {
  bool may_emit = first_draft >= 0 && first_draft < vocab_size;
  switch (policy) {
    case AcceptPolicy::kRejectAll:
      return RowRule::kEnd;
    case AcceptPolicy::kAcceptAll:
      return may_emit ? RowRule::kDraft : RowRule::kEnd;
    case AcceptPolicy::kSynthetic:
      return may_emit && uniform(Purpose::kAccept, 0) < accept_rate ? RowRule::kDraft
                                                                    : RowRule::kEnd;
    case AcceptPolicy::kNormal:
      break;
  }
  if (first_draft < 0 || certain) return RowRule::kOwn;
  if (strategy == VerifyStrategy::kRejection) return RowRule::kRejection;
  if (strategy == VerifyStrategy::kTopP) return RowRule::kTopP;
  return RowRule::kOwn;
}

// Returns a draft probability clamped to [0, 1], with NaN as 0.
SPECOPS_HOST_DEVICE float clean_draft_prob(float prob) {
  return prob > 0.0f ? (prob < 1.0f ? prob : 1.0f) : 0.0f;
}

// The residual: the distribution of a row that is left to draw from after rejections, not
// normalized:
//
//     left(x) = max(weight * target_probs(x) - taken * draft_probs(x), 0)    mass = sum of left(x)
//
// At first it is the target distribution. Rejecting a token that was drawn from draft_probs
// subtracts draft_probs from left / mass. Since max(max(a, 0) - b, 0) = max(a - b, 0), the single
// number `taken` represents any number of rejected siblings. Block verification uses `weight` and
// subtracts once.
struct Residual {
  double weight = 1.0;
  double taken = 0.0;
  double mass = 1.0;
};

SPECOPS_HOST_DEVICE double left_of(const Residual& residual,
                                   double target_prob,
                                   double draft_prob) {
  double left = residual.weight * target_prob - residual.taken * draft_prob;
  return left > 0.0 ? left : 0.0;
}

// Returns whether a child is accepted whose token has residual `left`; false if `left` is 0. Drafts
// that were chosen without randomness have draft_prob 1.
SPECOPS_HOST_DEVICE bool accepts(const Residual& residual,
                                 float uniform,
                                 double left,
                                 double draft_prob) {
  return uniform * draft_prob * residual.mass < left;
}

// Returns the residual after a rejection. The caller must compute its mass, and continue with
// `residual` if that is 0.
SPECOPS_HOST_DEVICE Residual after_rejection(const Residual& residual) {
  return {1.0, residual.taken + residual.mass, 0.0};
}

// Returns the residual of block verification for one row: `weight` times its target distribution,
// less draft_probs.
SPECOPS_HOST_DEVICE Residual block_residual(double weight) { return {weight, 1.0, 0.0}; }

}  // namespace specops
