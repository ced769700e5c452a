// SPDX-License-Identifier: Apache-2.0
// commit_tokens: appends what a step emitted to the tokens of each request.
#pragma once

#include <cstdint>

#include "common/cuda_stream.h"
#include "common/error_flag.h"
#include "common/isa.h"

namespace specops {

struct CommitTokensParams {
  const int32_t* output_token_ids;  // [batch, max_tokens], the emitted tokens, then -1
  const int32_t* slots;             // [batch], row of token_ids of each request; -1 = none
  int32_t* token_ids;               // [num_slots, max_len], rows token_ids_stride apart
  int32_t* lens;                    // [num_slots], tokens of each row; grows by what is appended
  int64_t batch;
  int64_t max_tokens;
  int64_t num_slots;
  int64_t max_len;
  int64_t token_ids_stride;  // elements between rows
  ErrorFlag error;
};

SPECOPS_DECLARE_CPU(commit_tokens_cpu, CommitTokensParams);
SPECOPS_DECLARE_CUDA(commit_tokens_cuda, CommitTokensParams);

}  // namespace specops
