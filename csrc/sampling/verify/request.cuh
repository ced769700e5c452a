// SPDX-License-Identifier: Apache-2.0
// One request of verify on CUDA: its rows, its drafts, the draft distributions, and its random
// numbers.
#pragma once

#include "sampling/row/cuda/drafted_row.cuh"
#include "sampling/row/cuda/filters.cuh"
#include "sampling/row/cuda/row_shared.cuh"
#include "sampling/verify/verify.h"

namespace specops {

// The verification of one request in this step.
struct VerifyRequest {
  int32_t first;         // first row of logits
  int32_t num_rows;      // 0: idle or invalid
  int32_t num_read;      // rows that need a choice
  int32_t num_together;  // drafts that block verification decides together, else 0
  VerifyStrategy strategy;
  AcceptPolicy policy;
  SamplingParams filters;  // sampling parameters; temperature 0 under kGreedy
  ErrorCode fault;         // kNone for an idle request

  // All loads come before their first use, so that their latencies overlap.
  __device__ VerifyRequest(const VerifyParams& params, int64_t batch_idx) {
    VerifyValues values = values_of(params, batch_idx);
    first = values.begin;
    strategy = static_cast<VerifyStrategy>(values.strategy);
    policy = static_cast<AcceptPolicy>(values.policy);
    filters = values.filters;
    fault = find_fault(params, values, batch_idx).code;
    num_rows = fault == ErrorCode::kNone ? values.end - values.begin : 0;
    num_read = policy == AcceptPolicy::kRejectAll && num_rows > 0 ? 1 : num_rows;
    num_together = 0;
    if (strategy == VerifyStrategy::kGreedy) filters = {};
    if (strategy != VerifyStrategy::kBlock || num_rows == 0) return;
    RequestDrafts drafts = drafts_of(params.drafts, batch_idx, num_rows - 1);
    if (!is_block_step(strategy, policy, drafts, is_greedy(filters))) return;
    num_together = chain_len(drafts);
    num_read = num_together + 1;
  }
};

// Returns the drafts before row `idx` of a request. Returns none if a parent does not come before
// its node; the walk reports that error.
__device__ inline DraftPath draft_path(const VerifyParams& params, int64_t batch_idx, int32_t idx) {
  int64_t first = batch_idx * params.drafts.max_draft_tokens;
  DraftPath path{params.drafts.token_ids + first, nullptr, idx - 1};
  if (params.drafts.parents == nullptr) return path;
  path.parents = params.drafts.parents + first;
#pragma unroll 1
  for (int32_t node = idx - 1; node >= 0;) {
    int32_t parent = path.parents[node];
    if (!is_parent(parent, node)) {
      path.node = -1;
      break;
    }
    node = parent;
  }
  return path;
}

// Returns the output array in which the rows of a request store their choices.
__device__ inline int32_t* slots_of(const VerifyParams& params, int64_t batch_idx) {
  return params.outputs.token_ids + batch_idx * (params.drafts.max_draft_tokens + 1);
}

// Returns a uniform random number of a row that is `depth` tokens after the request's position.
// `together`: for block verification.
__device__ inline float coin_of(const VerifyParams& params,
                                int64_t batch_idx,
                                int32_t depth,
                                bool together,
                                Purpose purpose,
                                uint32_t sub_index = 0) {
  if (params.sampling.seeds == nullptr) return 0.0f;  // greedy
  int32_t position = params.positions[batch_idx];
  uint32_t anchor = together ? block_anchor(position) : 0;
  return uniform_source(params.sampling, batch_idx, position + depth, anchor)(purpose, sub_index);
}

// Returns the distribution from which the children of a request's row were drawn.
__device__ inline DraftRow draft_row(const VerifyParams& params, int64_t batch_idx, int32_t row) {
  int64_t first = draft_probs_begin(params, batch_idx, row);
  if (first < 0) return {nullptr, nullptr, 0};
  return {params.draft_probs.probs + first,
          params.draft_probs.token_ids ? params.draft_probs.token_ids + first : nullptr,
          static_cast<int32_t>(params.draft_probs.width)};
}

// Stores a request in the shared memory of the block of one of its rows. Called by one thread.
__device__ inline void enter_request(const VerifyParams& params,
                                     RowShared& shared,
                                     const VerifyRequest& request,
                                     int64_t batch_idx,
                                     int32_t row) {
  RequestDrafts drafts = drafts_of(params.drafts, batch_idx, request.num_rows - 1);
  // If drafts cannot matter, load nothing about them. The children in a tree are searched later,
  // when they are needed.
  bool have_say =
      request.policy == AcceptPolicy::kAcceptAll || request.policy == AcceptPolicy::kSynthetic ||
      request.strategy == VerifyStrategy::kRejection || request.strategy == VerifyStrategy::kTopP;
  int32_t child = !have_say ? -1 : drafts.parents ? 0 : next_child(drafts, row);
  int32_t draft = child >= 0 && drafts.parents == nullptr ? drafts.token_ids[child] : child;
  float rate = 0.0f;
  if (request.policy == AcceptPolicy::kSynthetic && child >= 0) {
    rate = params.accept_rates[batch_idx * params.drafts.max_draft_tokens + child];
  }
  RowRule rule = row_rule(
      request.strategy,
      request.policy,
      draft,
      params.vocab_size,
      rate,
      is_greedy(request.filters),
      [&](Purpose purpose, uint32_t) { return coin_of(params, batch_idx, row, false, purpose); });
  shared.batch_idx = static_cast<int32_t>(batch_idx);
  shared.row_of_request = row;
  shared.again = 0;
  shared.first_row = request.first;
  shared.num_rows = request.num_rows;
  shared.num_read = request.num_read;
  shared.num_together = request.num_together;
  shared.filters = request.filters;
  shared.rule = static_cast<int32_t>(rule);
  shared.given_id = rule == RowRule::kDraft ? draft : -1;
}

}  // namespace specops
