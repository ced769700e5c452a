// SPDX-License-Identifier: Apache-2.0
// top_logprobs: finds the n most probable tokens of each row, with their log-probabilities.
#pragma once

#include <cstdint>

#include "common/cuda_stream.h"
#include "common/dtype.h"
#include "common/error_flag.h"
#include "common/isa.h"
#include "sampling/row/filters.h"
#include "sampling/row/logits_processors.h"
#include "sampling/row/row_rule.h"
#include "sampling/row/value_rule.h"

namespace specops {

struct TopLogprobsOutputs {
  int32_t* token_ids = nullptr;  // [rows, n], most probable first
  float* logprobs = nullptr;     // [rows, n]
  int32_t* ranks = nullptr;      // [rows, n]; nullptr if not requested
  float* lse = nullptr;          // [rows], log-sum-exp (natural log) of the raw logits
};

struct TopLogprobsParams {
  const void* logits;  // [rows, vocab_size], rows logits_stride apart
  // The following inputs are used only for processed logprobs.
  bool processed_logprobs;
  Drafts drafts;             // without output_indptr, each request has one row and no drafts
  const int32_t* positions;  // [batch]; nullptr if processors are off
  SamplingTensors sampling;  // [batch]
  LogitsProcessors processors;
  TopLogprobsOutputs outputs;
  int64_t rows;
  int64_t batch;
  int64_t vocab_size;
  int64_t n;
  int64_t logits_stride;  // elements between rows
  DType dtype;            // dtype of logits: float32 or bfloat16
  void* workspace;        // CUDA only; its start must be zero, and is left zero
  int64_t workspace_bytes;
  ErrorFlag error;
};

// The values of one request that processed logprobs depend on.
struct TopLogprobsValues {
  int32_t begin, end;  // rows of the request
  SamplingParams filters;
};

SPECOPS_HOST_DEVICE TopLogprobsValues values_of(const TopLogprobsParams& params,
                                                int64_t batch_idx,
                                                int32_t first) {
  bool ragged = params.drafts.output_indptr != nullptr;
  return {ragged ? params.drafts.output_indptr[batch_idx] : first,
          ragged ? params.drafts.output_indptr[batch_idx + 1] : first + 1,
          filters_of(params.sampling, batch_idx)};
}

// Checks the values of one request. A request without rows has no fault.
SPECOPS_HOST_DEVICE Fault find_fault(const TopLogprobsParams& params,
                                     const TopLogprobsValues& values,
                                     int64_t batch_idx) {
  constexpr SamplingOp kOp = SamplingOp::kTopLogprobs;
  Fault fault;
  if (params.drafts.output_indptr != nullptr) {
    fault = find_indptr_fault(
        kOp, values.begin, values.end, batch_idx, params.drafts.max_draft_tokens + 1, params.rows);
  }
  if (fault.found() || values.begin == values.end) return fault;
  fault = find_filters_fault(kOp, params.sampling, values.filters, batch_idx);
  if (fault.found() || !has_processors(params.processors)) return fault;
  return find_processors_fault(kOp, params.processors, batch_idx, params.positions[batch_idx]);
}

// Checks row i of a request with processors, and the draft that follows the row.
SPECOPS_HOST_DEVICE Fault find_row_fault(const TopLogprobsParams& params,
                                         const TopLogprobsValues& values,
                                         int64_t batch_idx,
                                         int32_t i) {
  constexpr SamplingOp kOp = SamplingOp::kTopLogprobs;
  Fault fault = find_mask_fault(kOp, params.processors, int64_t{values.begin} + i);
  if (fault.found() || i + 1 == values.end - values.begin) return fault;
  return find_parent_fault(
      kOp, params.drafts.parents, params.drafts.max_draft_tokens, batch_idx, i);
}

SPECOPS_DECLARE_CPU(top_logprobs_cpu, TopLogprobsParams);
SPECOPS_DECLARE_CUDA(top_logprobs_cuda, TopLogprobsParams);

}  // namespace specops
