// SPDX-License-Identifier: Apache-2.0
// top_logprobs: the n most probable tokens of each row, with their log-probabilities.
#pragma once

#include <cstdint>

#include "common/cuda_stream.h"
#include "common/dtype.h"
#include "common/error_flag.h"
#include "common/isa.h"
#include "sampling/filters.h"
#include "sampling/logits_processors.h"

namespace specops {

struct TopLogprobsParams {
  const void* logits;  // [rows, vocab_size], rows logits_stride apart
  // What makes processed logprobs of the raw ones; requests own rows as in verify, or one each where
  // output_indptr is nullptr.
  bool processed_logprobs;
  const int32_t* output_indptr;    // [batch + 1]
  const int32_t* draft_token_ids;  // [batch, max_draft_tokens]; nullptr: no drafts
  const int32_t* parents;          // [batch, max_draft_tokens]; nullptr: chains
  const int32_t* positions;        // [batch]; nullptr where processors are off
  FilterArrays filters;            // [batch]
  LogitsProcessors processors;
  int32_t* token_ids;  // [rows, n], most probable first
  float* logprobs;     // [rows, n]
  int32_t* ranks;      // [rows, n], may be nullptr
  float* lse;          // [rows], natural log, of the raw logits
  int64_t rows;
  int64_t batch;
  int64_t max_draft_tokens;
  int64_t vocab_size;
  int64_t n;
  int64_t logits_stride;  // elements between rows
  DType dtype;            // of logits: float32 or bfloat16
  void* workspace;        // CUDA only; its start is zero, and is left so
  int64_t workspace_bytes;
  ErrorFlag error;
};

SPECOPS_DECLARE_CPU(top_logprobs_cpu, TopLogprobsParams);
SPECOPS_DECLARE_CUDA(top_logprobs_cuda, TopLogprobsParams);

}  // namespace specops
