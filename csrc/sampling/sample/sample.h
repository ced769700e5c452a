// SPDX-License-Identifier: Apache-2.0
// sample: chooses one token per row of logits.
#pragma once

#include <cstdint>

#include "common/cuda_stream.h"
#include "common/dtype.h"
#include "common/error_flag.h"
#include "common/isa.h"
#include "sampling/row/filters.h"
#include "sampling/row/logits_processors.h"
#include "sampling/row/value_rule.h"

namespace specops {

struct SampleOutputs {
  int32_t* token_ids = nullptr;  // [rows]
  float* logprobs = nullptr;     // [rows]; nullptr if not requested
  int32_t* ranks = nullptr;      // [rows]; nullptr if not requested
  float* probs =
      nullptr;  // [rows, vocab_size], probs_stride apart: the drawn distribution, or null
  int64_t probs_stride = 0;  // elements between rows
};

struct SampleParams {
  const void* logits;        // [rows, vocab_size], rows logits_stride apart
  const int32_t* positions;  // [rows], absolute position of the token being chosen
  SamplingTensors sampling;  // [rows]
  LogitsProcessors processors;
  Purpose purpose;          // kTarget, or kDraft for a drafter
  const int32_t* anchors;   // [rows], part of the key of the random numbers; nullptr = all 0
  bool processed_logprobs;  // logprobs and ranks are taken after processors and filters
  SampleOutputs outputs;
  int64_t rows;
  int64_t vocab_size;
  int64_t logits_stride;  // elements between rows
  DType dtype;            // dtype of logits: float32 or bfloat16
  void* workspace;        // CUDA only; its start must be zero, and is left zero
  int64_t workspace_bytes;
  ErrorFlag error;
};

// Checks the values of one row. kProcessed: whether there may be processors.
template <bool kProcessed>
SPECOPS_HOST_DEVICE Fault find_fault(const SampleParams& params, int64_t row) {
  constexpr SamplingOp kOp = SamplingOp::kSample;
  SamplingParams filters = filters_of(params.sampling, row);
  Fault fault = find_filters_fault(kOp, params.sampling, filters, row);
  if (!fault.found() && filters.temperature > 0.0f && params.sampling.seeds == nullptr) {
    fault.code = code_of(kOp, kSeedsRule);
  }
  if (!kProcessed) return fault;
  if (!fault.found()) {
    fault = find_processors_fault(kOp, params.processors, row, params.positions[row]);
  }
  return fault.found() ? fault : find_mask_fault(kOp, params.processors, row);
}

SPECOPS_DECLARE_CPU(sample_cpu, SampleParams);
SPECOPS_DECLARE_CUDA(sample_cuda, SampleParams);

struct SamplingWorkspaceParams {
  int64_t* num_bytes;  // receives the bytes that sample, verify or top_logprobs needs
  int64_t rows;
  int64_t vocab_size;
  int64_t element_bytes;  // bytes per logit
  int64_t batch;          // batch size of verify, else 0
};

SPECOPS_DECLARE_CUDA(sampling_workspace_cuda, SamplingWorkspaceParams);

}  // namespace specops
