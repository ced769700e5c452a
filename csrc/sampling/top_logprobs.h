// SPDX-License-Identifier: Apache-2.0
// top_logprobs: the n most probable tokens of each row, with their log-probabilities.
#pragma once

#include <cstdint>

#include "common/cuda_stream.h"
#include "common/dtype.h"
#include "common/isa.h"

namespace specops {

struct TopLogprobsParams {
  const void* logits;  // [rows, vocab_size], rows logits_stride apart
  int32_t* token_ids;  // [rows, n], most probable first
  float* logprobs;     // [rows, n]
  float* lse;          // [rows], natural log
  int64_t rows;
  int64_t vocab_size;
  int64_t n;
  int64_t logits_stride;  // elements between rows
  DType dtype;            // of logits: float32 or bfloat16
  void* workspace;        // CUDA only; its start is zero, and is left so
  int64_t workspace_bytes;
};

SPECOPS_DECLARE_CPU(top_logprobs_cpu, TopLogprobsParams);
SPECOPS_DECLARE_CUDA(top_logprobs_cuda, TopLogprobsParams);

}  // namespace specops
