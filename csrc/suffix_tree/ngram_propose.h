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
  const int32_t* leftmost;          // [batch], or nullptr: is_leftmost for all
  const int32_t* num_given_drafts;  // [batch], or nullptr: none
  int32_t* draft_token_ids;         // [batch, capacity], -1 padded; first the given drafts
  int32_t* num_draft_tokens;        // [batch]; may be num_given_drafts
  int32_t* match_lens;              // [batch], may be nullptr
  uint32_t* table;                  // [batch, table_entries], or nullptr: every row is scanned
  int32_t* state;                   // [batch, 2], of the table
  int64_t batch;
  int64_t max_len;
  int64_t stride;
  int64_t capacity;
  int64_t table_entries;
  int64_t scan_tokens;   // last tokens of a row that are scanned rather than indexed
  int64_t index_tokens;  // most of a row to index in one call
  int64_t work;          // about how many tokens are to be scanned; unknown on CUDA
  int32_t min_size;
  int32_t max_size;
  bool is_leftmost;
  int64_t max_total_draft_tokens;  // of all requests; -1: no limit
  ErrorFlag error;
};

// Where not given: what a scan costs little more than an empty one, and what to index beside it.
constexpr int64_t kNgramScanTokensCpu = 2048;
constexpr int64_t kNgramScanTokensCuda = 4096;
constexpr int64_t kNgramIndexTokens = 256;

SPECOPS_DECLARE_CPU(ngram_propose_cpu, NgramProposeParams);
SPECOPS_DECLARE_CUDA(ngram_propose_cuda, NgramProposeParams);

}  // namespace specops
