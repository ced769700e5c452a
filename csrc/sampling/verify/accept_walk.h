// SPDX-License-Identifier: Apache-2.0
// The serial part of verification: how far a request's drafts agree with the choices of its rows,
// and how many drafts of a chain block verification accepts. Plain C++ and CUDA.
#pragma once

#include <cstdint>

#include "sampling/row/row_rule.h"

namespace specops {

// Encodes the choice of a row at which the path must end, even if a draft is the same token.
SPECOPS_HOST_DEVICE int32_t ends_with(int32_t token_id) { return ~token_id; }

SPECOPS_HOST_DEVICE int32_t token_of(int32_t choice) { return choice < 0 ? ~choice : choice; }

// The outputs of a request: before the walk one entry per row, after it one entry per emitted
// token.
struct Emitted {
  int32_t* token_ids;       // [capacity]
  float* logprobs;          // [capacity]; nullptr if not requested
  int32_t* ranks;           // [capacity]; nullptr if not requested
  int32_t* accepted_nodes;  // [capacity - 1]; nullptr if not requested
};

// Walks from the root along the drafts, and returns the number of accepted drafts.
// Before the call, emitted.token_ids[0, num_rows) has the choice of each row, with its logprob and
// rank; only rows on the path are read. After it, the arrays have the emitted tokens, then -1, 0
// and 0; accepted_nodes has the accepted drafts, then -1.
// The path continues at the first child whose token equals the row's choice, and ends at a choice
// without such a child. One more token is emitted than drafts are accepted. An idle request
// (num_rows = 0) emits nothing and returns 0.
SPECOPS_HOST_DEVICE int32_t accept_walk(const RequestDrafts& drafts,
                                        int32_t num_rows,
                                        int32_t capacity,
                                        const Emitted& emitted) {
  int32_t row = 0, depth = 0;
  // Token `depth` of a path comes from a row >= `depth`, so it may overwrite entry `depth`.
  auto emit = [&](int32_t choice) {
    emitted.token_ids[depth] = token_of(choice);
    if (emitted.logprobs != nullptr) emitted.logprobs[depth] = emitted.logprobs[row];
    if (emitted.ranks != nullptr) emitted.ranks[depth] = emitted.ranks[row];
  };
  while (num_rows > 0) {
    int32_t choice = emitted.token_ids[row];
    int32_t node = next_child(drafts, row);
    while (node >= 0 && drafts.token_ids[node] != choice) node = next_child(drafts, row, node);
    emit(choice);
    if (node < 0) break;
    if (emitted.accepted_nodes != nullptr) emitted.accepted_nodes[depth] = node;
    ++depth;
    row = node + 1;
  }
  for (int32_t i = num_rows > 0 ? depth + 1 : 0; i < capacity; ++i) {
    emitted.token_ids[i] = -1;
    if (emitted.logprobs != nullptr) emitted.logprobs[i] = 0.0f;
    if (emitted.ranks != nullptr) emitted.ranks[i] = 0;
  }
  for (int32_t i = depth; emitted.accepted_nodes != nullptr && i + 1 < capacity; ++i) {
    emitted.accepted_nodes[i] = -1;
  }
  return depth;
}

// Returns the weight of block verification after one more draft of a chain. Weight i says how well
// the first i drafts follow the target distribution; weight 0 is 1.
//
//     weight[i] = min(weight[i - 1] * target_prob[i - 1] / draft_prob[i - 1], 1)
//
// with the probabilities of draft i - 1. A draft whose draft probability is 0 is treated as
// accepted if its target probability is above 0. Source: Sun et al. 2024, algorithm 2.
SPECOPS_HOST_DEVICE double next_block_weight(double weight, double target_prob, double draft_prob) {
  if (draft_prob > 0.0) {
    double next = weight * target_prob / draft_prob;
    return next < 1.0 ? next : 1.0;
  }
  return weight > 0.0 && target_prob > 0.0 ? 1.0 : 0.0;
}

// Returns the probability with which block_accepted accepts exactly the first i drafts if it has
// not accepted more, given their weight and the mass of the residual (block_residual) of the row
// after them. For all n drafts, the probability is their weight instead.
SPECOPS_HOST_DEVICE double block_chance(double weight, double mass) {
  double all = mass + (1.0 - weight);
  return all > 0.0 ? mass / all : 1.0;
}

// Returns the number of accepted drafts of block verification. weights: [n + 1]; masses: [n], of
// which the first is ignored; uniform(i) returns the random number of the row before draft i.
template <typename Uniform>
SPECOPS_HOST_DEVICE int32_t block_accepted(const double* weights,
                                           const double* masses,
                                           int32_t num_drafts,
                                           const Uniform& uniform) {
  for (int32_t i = num_drafts; i > 0; --i) {
    double chance = i < num_drafts ? block_chance(weights[i], masses[i]) : weights[i];
    if (uniform(i - 1) < chance) return i;
  }
  return 0;
}

}  // namespace specops
