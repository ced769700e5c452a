// SPDX-License-Identifier: Apache-2.0
// ngram_propose: drafts copied from behind an earlier occurrence of the last tokens.
#pragma once

#include <cstdint>

#include "common/error_flag.h"
#include "common/isa.h"

namespace specops {

struct NgramProposeParams {
  const int32_t* token_ids;         // [batch, max_len], prompt and output; rows stride apart
  const int32_t* lens;              // [batch], tokens of each row
  const int32_t* max_draft_tokens;  // [batch], the request's own limit
  const int32_t* min_sizes;         // [batch], or nullptr: min_size for all
  const int32_t* max_sizes;         // [batch], or nullptr: max_size for all
  int32_t* draft_token_ids;         // [batch, capacity], -1 padded
  int32_t* num_draft_tokens;        // [batch]
  int64_t batch;
  int64_t max_len;
  int64_t stride;
  int64_t capacity;
  int64_t total_tokens;  // sum of lens; unknown on CUDA
  int32_t min_size;
  int32_t max_size;
  ErrorFlag error;
};

SPECOPS_DECLARE_CPU(ngram_propose_cpu, NgramProposeParams);
SPECOPS_DECLARE_CUDA(ngram_propose_cuda, NgramProposeParams);

}  // namespace specops
