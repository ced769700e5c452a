// SPDX-License-Identifier: Apache-2.0
// verify: computes the tokens that a step emits, from the target's logits for every draft and for
// the bonus token.
#pragma once

#include <cstdint>

#include "common/cuda_stream.h"
#include "common/dtype.h"
#include "common/error_flag.h"
#include "common/host_device.h"
#include "common/isa.h"
#include "common/per_row.h"
#include "sampling/row/filters.h"
#include "sampling/row/logits_processors.h"
#include "sampling/row/row_rule.h"
#include "sampling/row/value_rule.h"

namespace specops {

constexpr int64_t kMaxTreeDrafts = 3072;  // per request: siblings must fit a CUDA block's list

// The phases of a block on CUDA, for time measurements.
enum class VerifyPhase {
  kScan,    // read a part of a row, until the whole row is scanned
  kChoose,  // filters, choice of the token, logprob and rank
  kWalk,    // the walk, after all rows have chosen; also start and end of the kernel
};
constexpr int kVerifyPhases = 3;

// Words per block: begin and end in ns on a clock common to all blocks, cycles of the block's SM in
// each phase, and the SM's clock at the end.
constexpr int64_t kVerifyStampWords = 3 + kVerifyPhases;

// The distributions from which drafts were drawn. One-hot drafts were chosen without randomness.
struct DraftProbs {
  const float* probs = nullptr;        // [num_rows, max_drafts, width]; nullptr: one-hot drafts
  const int32_t* token_ids = nullptr;  // same shape, -1 padded; nullptr: token id has entry [id]
  const int32_t* rows = nullptr;       // [batch], -1 = one-hot drafts; nullptr: row b
  int64_t num_rows = 0;
  int64_t max_drafts = 0;  // at most max_draft_tokens; later drafts are one-hot
  int64_t width = 0;
};

struct VerifyOutputs {
  int32_t* token_ids = nullptr;            // [batch, max_draft_tokens + 1]
  int32_t* num_accepted_tokens = nullptr;  // [batch], without the bonus token
  int32_t* accepted_nodes = nullptr;       // [batch, max_draft_tokens]; nullptr if not requested
  float* logprobs = nullptr;               // [batch, max_draft_tokens + 1]; may be nullptr
  int32_t* ranks = nullptr;                // [batch, max_draft_tokens + 1]; may be nullptr
};

struct VerifyParams {
  const void* logits;  // [num_output_rows, vocab_size], rows logits_stride apart
  Drafts drafts;
  const int32_t* positions;   // [batch], position of the first token chosen
  PerRow<int32_t> strategy;   // [batch], VerifyStrategy
  PerRow<int32_t> policy;     // [batch], AcceptPolicy
  const float* accept_rates;  // [batch, max_draft_tokens]; nullptr if no policy is kSynthetic
  SamplingTensors sampling;   // [batch]
  LogitsProcessors processors;
  DraftProbs draft_probs;
  bool processed_logprobs;  // logprobs and ranks are taken after processors and filters
  VerifyOutputs outputs;
  int64_t rows;  // rows of logits
  int64_t batch;
  int64_t vocab_size;
  int64_t logits_stride;  // elements between rows
  DType dtype;            // dtype of logits: float32 or bfloat16
  void* workspace;        // CUDA only; its start must be zero, and is left zero
  int64_t workspace_bytes;
  ErrorFlag error;
  int64_t* stamps;         // CUDA: [stamped_blocks, kVerifyStampWords]; nullptr if not measured
  int64_t stamped_blocks;  // at least the number of blocks in the grid
};

// Returns whether there is a kernel that records phase times for these parameters; it is compiled
// in one form only.
inline bool has_stamped_kernel(const VerifyParams& params) {
  return params.dtype == DType::kBFloat16 && !has_processors(params.processors);
}

// Returns the offset in draft_probs of the distribution from which the drafts after row `row` were
// drawn; -1 if they are one-hot.
SPECOPS_HOST_DEVICE int64_t draft_probs_begin(const VerifyParams& params,
                                              int64_t batch_idx,
                                              int64_t row) {
  if (params.draft_probs.probs == nullptr || row >= params.draft_probs.max_drafts) return -1;
  int64_t source = params.draft_probs.rows ? params.draft_probs.rows[batch_idx] : batch_idx;
  if (source < 0) return -1;
  return (source * params.draft_probs.max_drafts + row) * params.draft_probs.width;
}

// The values of a request that are known before its rows of logits are read.
struct VerifyValues {
  int32_t begin, end;  // rows of the request
  int32_t strategy, policy;
  int32_t draft_prob_row;
  SamplingParams filters;
};

SPECOPS_HOST_DEVICE VerifyValues values_of(const VerifyParams& params, int64_t batch_idx) {
  return {params.drafts.output_indptr[batch_idx],
          params.drafts.output_indptr[batch_idx + 1],
          params.strategy[batch_idx],
          params.policy[batch_idx],
          params.draft_probs.rows ? params.draft_probs.rows[batch_idx] : -1,
          filters_of(params.sampling, batch_idx)};
}

SPECOPS_FAULT(4401, kVerifyStrategy) =
    "verify: strategy must be 0 (GREEDY), 1 (TARGET_MATCH), 2 (REJECTION), 3 (BLOCK) or 4 (TOPP)";
SPECOPS_FAULT(4402, kVerifyTreeStrategy) =
    "verify: strategy must be 0 (GREEDY), 1 (TARGET_MATCH) or 2 (REJECTION) where parents are "
    "given";
SPECOPS_FAULT(4403, kVerifyPolicy) =
    "verify: policy must be 0 (NORMAL), 1 (ACCEPT_ALL), 2 (REJECT_ALL) or 3 (SYNTHETIC)";
SPECOPS_FAULT(4404, kVerifyTreePolicy) =
    "verify: policy must be 0 (NORMAL) or 2 (REJECT_ALL) where parents are given";
SPECOPS_FAULT(4405, kVerifyNoAcceptRates) =
    "verify: accept_rates must be given where a policy is 3 (SYNTHETIC), got None";
SPECOPS_FAULT(4406, kVerifyAcceptRates) =
    "verify: accept_rates must be within [0, 1] where the policy is 3 (SYNTHETIC)";
SPECOPS_FAULT(4407, kVerifyDraftProbRows) =
    "verify: draft_probs.rows must be -1 or below the rows of draft_probs.probs{ = #}";
SPECOPS_FAULT(4408, kVerifyDraftProbTokenIds) =
    "verify: draft_probs.token_ids must be -1 or below vocab_size{ = #}";

SPECOPS_HOST_DEVICE Fault find_rules_fault(const VerifyParams& params,
                                           int32_t strategy,
                                           int32_t policy,
                                           int64_t batch_idx) {
  bool tree = params.drafts.parents != nullptr;
  if (!is_strategy(strategy, tree)) {
    ErrorCode code = tree ? kVerifyTreeStrategy : kVerifyStrategy;
    return fault_at(code, params.strategy, batch_idx, strategy);
  }
  if (!is_policy(policy, tree)) {
    ErrorCode code = tree ? kVerifyTreePolicy : kVerifyPolicy;
    return fault_at(code, params.policy, batch_idx, policy);
  }
  return {};
}

// Checks the acceptance rates of a request with policy kSynthetic.
SPECOPS_HOST_DEVICE Fault find_rates_fault(const VerifyParams& params,
                                           int64_t batch_idx,
                                           int64_t num_drafts) {
  if (params.drafts.max_draft_tokens == 0) return {};
  if (params.accept_rates == nullptr) return {kVerifyNoAcceptRates};
  const float* rates = params.accept_rates + batch_idx * params.drafts.max_draft_tokens;
  for (int64_t i = 0; i < num_drafts; ++i) {
    if (rates[i] >= 0.0f && rates[i] <= 1.0f) continue;
    return fault_at(kVerifyAcceptRates, rates[i], batch_idx, i);
  }
  return {};
}

// Checks the values of a request; an idle request may have any values. Rows and drafts are checked
// separately: find_mask_fault, find_parent_fault, find_listed_fault.
SPECOPS_HOST_DEVICE Fault find_fault(const VerifyParams& params,
                                     const VerifyValues& values,
                                     int64_t batch_idx) {
  constexpr SamplingOp kOp = SamplingOp::kVerify;
  Fault fault = find_indptr_fault(
      kOp, values.begin, values.end, batch_idx, params.drafts.max_draft_tokens + 1, params.rows);
  if (fault.found() || values.begin == values.end) return fault;
  fault = find_rules_fault(params, values.strategy, values.policy, batch_idx);
  if (fault.found()) return fault;
  if (values.draft_prob_row < -1 || values.draft_prob_row >= params.draft_probs.num_rows) {
    return fault_at(kVerifyDraftProbRows, values.draft_prob_row, batch_idx)
        .with(params.draft_probs.num_rows);
  }
  fault = find_filters_fault(kOp, params.sampling, values.filters, batch_idx);
  if (fault.found()) return fault;
  auto policy = static_cast<AcceptPolicy>(values.policy);
  if (params.sampling.seeds == nullptr &&
      draws(static_cast<VerifyStrategy>(values.strategy), policy, values.filters.temperature)) {
    return {code_of(kOp, kSeedsRule)};
  }
  if (has_processors(params.processors)) {
    fault = find_processors_fault(kOp, params.processors, batch_idx, params.positions[batch_idx]);
    if (fault.found()) return fault;
  }
  if (policy != AcceptPolicy::kSynthetic) return {};
  return find_rates_fault(params, batch_idx, int64_t{values.end} - values.begin - 1);
}

// Returns whether an entry of draft_probs.token_ids is valid.
SPECOPS_HOST_DEVICE bool is_listed_token(int32_t token_id, int64_t vocab_size) {
  return token_id >= -1 && token_id < vocab_size;
}

SPECOPS_HOST_DEVICE Fault find_listed_fault(const VerifyParams& params,
                                            int64_t batch_idx,
                                            int64_t row,
                                            int32_t token_id) {
  if (is_listed_token(token_id, params.vocab_size)) return {};
  return fault_at(kVerifyDraftProbTokenIds, token_id, batch_idx, row).with(params.vocab_size);
}

SPECOPS_DECLARE_CPU(verify_cpu, VerifyParams);
SPECOPS_DECLARE_CUDA(verify_cuda, VerifyParams);

}  // namespace specops
