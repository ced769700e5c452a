// SPDX-License-Identifier: Apache-2.0
// verify: the tokens a step emits, given the target's logits for every draft and the bonus.
#pragma once

#include <cstdint>

#include "common/cuda_stream.h"
#include "common/dtype.h"
#include "common/error_flag.h"
#include "common/host_device.h"
#include "common/isa.h"
#include "common/per_row.h"
#include "sampling/filters.h"
#include "sampling/logits_processors.h"

namespace specops {

constexpr int64_t kMaxTreeDrafts = 3072;  // of a request: siblings fit a CUDA block's list

struct VerifyParams {
  const void* logits;              // [num_output_rows, vocab_size], rows logits_stride apart
  const int32_t* output_indptr;    // [batch + 1], the rows of each request
  const int32_t* draft_token_ids;  // [batch, max_draft_tokens], -1 padded
  const int32_t* parents;          // [batch, max_draft_tokens], -1 = the root; nullptr: chains
  const int32_t* positions;        // [batch], position of the first token chosen
  PerRow<int32_t> strategy;        // [batch], VerifyStrategy
  PerRow<int32_t> policy;          // [batch], AcceptPolicy
  FilterArrays filters;            // [batch]
  LogitsProcessors processors;
  // [num_draft_prob_rows, max_drawn_drafts, num_draft_probs]; nullptr: one-hot drafts
  const float* draft_probs;
  const int32_t* draft_prob_token_ids;  // the same shape, -1 padded; nullptr: every id in turn
  const int32_t* draft_prob_rows;       // [batch], -1 = one-hot drafts; nullptr: row b
  const float* accept_rates;     // [batch, max_draft_tokens]; nullptr where none is kSynthetic
  int32_t* output_token_ids;     // [batch, max_draft_tokens + 1]
  int32_t* num_accepted_tokens;  // [batch], the bonus not counted
  int32_t* accepted_nodes;       // [batch, max_draft_tokens], may be nullptr
  float* logprobs;               // [batch, max_draft_tokens + 1], may be nullptr
  int32_t* ranks;                // [batch, max_draft_tokens + 1], may be nullptr
  bool processed_logprobs;       // logprobs and ranks after processors and filters
  int64_t rows;                  // of logits
  int64_t batch;
  int64_t max_draft_tokens;
  int64_t num_draft_prob_rows;
  int64_t max_drawn_drafts;  // at most max_draft_tokens; the drafts behind them are one-hot
  int64_t num_draft_probs;
  int64_t vocab_size;
  int64_t logits_stride;  // elements between rows
  DType dtype;            // of logits: float32 or bfloat16
  void* workspace;        // CUDA only; its start is zero, and is left so
  int64_t workspace_bytes;
  ErrorFlag error;
};

// Where in draft_probs the distribution begins that the drafts after row `row` of a request were
// drawn from; -1: they were chosen.
SPECOPS_HOST_DEVICE int64_t draft_probs_begin(const VerifyParams& params,
                                              int64_t batch_idx,
                                              int64_t row) {
  if (params.draft_probs == nullptr || row >= params.max_drawn_drafts) return -1;
  int64_t source = params.draft_prob_rows ? params.draft_prob_rows[batch_idx] : batch_idx;
  if (source < 0) return -1;
  return (source * params.max_drawn_drafts + row) * params.num_draft_probs;
}

SPECOPS_DECLARE_CPU(verify_cpu, VerifyParams);
SPECOPS_DECLARE_CUDA(verify_cuda, VerifyParams);

}  // namespace specops
