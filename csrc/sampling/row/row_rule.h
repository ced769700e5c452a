// SPDX-License-Identifier: Apache-2.0
// What decides about one row of a request that is verified: its strategy, its policy, its drafts and
// the random numbers it may look at. Plain C++ and CUDA.
#pragma once

#include <cstdint>

#include "common/philox.h"

namespace specops {

// How drafts are judged; values of specops.sampling.VerifyStrategy.
enum class VerifyStrategy : int32_t {
  kGreedy = 0,
  kTargetMatch = 1,
  kRejection = 2,
  kBlock = 3,
  kTopP = 4,
};

// Values of specops.sampling.AcceptPolicy; all but kNormal and kRejectAll measure, not decode.
enum class AcceptPolicy : int32_t { kNormal = 0, kAcceptAll = 1, kRejectAll = 2, kSynthetic = 3 };

// Whether a value of the strategy array is one that serves chains, or trees.
SPECOPS_HOST_DEVICE bool is_strategy(int32_t value, bool tree) {
  return value >= 0 &&
         value <= static_cast<int32_t>(tree ? VerifyStrategy::kRejection : VerifyStrategy::kTopP);
}

// The same of the policy array: policies that measure are for chains.
SPECOPS_HOST_DEVICE bool is_policy(int32_t value, bool tree) {
  if (tree) {
    return value == static_cast<int32_t>(AcceptPolicy::kNormal) ||
           value == static_cast<int32_t>(AcceptPolicy::kRejectAll);
  }
  return value >= 0 && value <= static_cast<int32_t>(AcceptPolicy::kSynthetic);
}

// Whether a request consumes uniforms, and so needs a seed.
SPECOPS_HOST_DEVICE bool draws(VerifyStrategy strategy, AcceptPolicy policy, float temperature) {
  return (strategy != VerifyStrategy::kGreedy && temperature > 0.0f) ||
         policy == AcceptPolicy::kSynthetic;
}

// One request's drafts. Row 0 of its logits follows the last known token, row r > 0 follows node
// r - 1.
struct Drafts {
  // Of the nodes. Less than 0 is no token; past the vocabulary is one that no row gives a chance.
  const int32_t* token_ids = nullptr;
  const int32_t* parents = nullptr;  // below the node itself, -1 = row 0; nullptr: a chain
  int32_t num_nodes = 0;
};

// The child of a row that comes after node `previous` (-1: the first), or -1. A child that is no
// token ends the children of its row.
SPECOPS_HOST_DEVICE int32_t next_child(const Drafts& drafts, int32_t row, int32_t previous = -1) {
  int32_t node = previous < row ? row : previous + 1;  // children come after their parent
  if (drafts.parents == nullptr) {
    if (node != row) return -1;
  } else {
    while (node < drafts.num_nodes && drafts.parents[node] != row - 1) ++node;
  }
  return node < drafts.num_nodes && drafts.token_ids[node] >= 0 ? node : -1;
}

// How many drafts of a chain there are before one that is no token.
SPECOPS_HOST_DEVICE int32_t chain_len(const Drafts& drafts) {
  int32_t length = 0;
  while (length < drafts.num_nodes && drafts.token_ids[length] >= 0) ++length;
  return length;
}

// How many drafts lie between the known tokens and a row.
SPECOPS_HOST_DEVICE int32_t row_depth(const Drafts& drafts, int32_t row) {
  if (drafts.parents == nullptr) return row;
  int32_t depth = 0;
  for (; row > 0; row = drafts.parents[row - 1] + 1) ++depth;
  return depth;
}

// Block verification looks at coins and drafts beyond the accepted prefix, so a step's uniforms must
// not be met again by the next one: they carry the step's first position, plus one so that it is
// never 0, which every other decision has.
SPECOPS_HOST_DEVICE uint32_t block_anchor(int32_t first_position) {
  return static_cast<uint32_t>(first_position) + 1u;
}

// Whether a request's rows are decided together, with the step's own uniforms. `certain`: its targets
// are one-hot, where every strategy chooses what sample does.
SPECOPS_HOST_DEVICE bool is_block_step(VerifyStrategy strategy,
                                       AcceptPolicy policy,
                                       const Drafts& drafts,
                                       bool certain) {
  return strategy == VerifyStrategy::kBlock && policy == AcceptPolicy::kNormal && !certain &&
         chain_len(drafts) > 0;
}

// What the choice of a row is, in a step that is not a block step.
enum class RowRule : int32_t {
  kOwn,        // the token that sample chooses
  kEnd,        // the same, and the path ends there whatever the drafts are
  kDraft,      // the draft, unseen
  kTopP,       // the draft where the filters keep it, else the row's own token
  kRejection,  // a child that is accepted, else what the children leave
};

// `first_draft`: token of the first child, -1 = none; no policy emits one past the vocabulary.
// `accept_rate`: of that draft, under kSynthetic. uniform(purpose, sub_index) is the row's.
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

// A draft's probability as it counts: NaN is 0, and none is above 1.
SPECOPS_HOST_DEVICE float clean_draft_prob(float prob) {
  return prob > 0.0f ? (prob < 1.0f ? prob : 1.0f) : 0.0f;
}

// What is left of a row to draw from, not normalised:
//
//     left(x) = max(weight * target_probs(x) - taken * draft_probs(x), 0)      mass = sum of left(x)
//
// At first that is the target itself. Rejecting a token that was drawn from draft_probs takes
// draft_probs away from left / mass; and since max(max(a, 0) - b, 0) = max(a - b, 0), however many
// siblings were rejected, `taken` says it all. Block verification has weights, and takes once.
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

// Whether a child is accepted, of which `left` is left: never one with nothing left. Drafts that were
// chosen and not drawn have draft_prob 1.
SPECOPS_HOST_DEVICE bool accepts(const Residual& residual,
                                 float uniform,
                                 double left,
                                 double draft_prob) {
  return uniform * draft_prob * residual.mass < left;
}

// What a rejection leaves; the caller sums up the mass, and keeps `residual` where that is 0.
SPECOPS_HOST_DEVICE Residual after_rejection(const Residual& residual) {
  return {1.0, residual.taken + residual.mass, 0.0};
}

// What the row after draft i leaves where `weight` of its target is compared with draft_probs.
SPECOPS_HOST_DEVICE Residual block_residual(double weight) { return {weight, 1.0, 0.0}; }

}  // namespace specops
