// SPDX-License-Identifier: Apache-2.0
// ngram_propose: proposes as drafts the tokens after an earlier occurrence of the last tokens.
#pragma once

#include <cstdint>

#include "common/error_flag.h"
#include "common/isa.h"
#include "common/per_row.h"

namespace specops {

struct NgramProposeParams {
  const int32_t* token_ids;         // [batch, max_len], prompt and output; rows are stride apart
  const int32_t* lens;              // [batch], tokens of each row
  const int32_t* max_draft_tokens;  // [batch], limit of each request
  PerRow<int32_t> min_sizes;        // [batch]
  PerRow<int32_t> max_sizes;        // [batch]
  PerRow<int32_t> leftmost;         // [batch], 0 or 1
  const int32_t* num_given_drafts;  // [batch], drafts already in the row; nullptr: none
  int32_t* draft_token_ids;         // [batch, capacity], -1 padded; begins with those drafts
  int32_t* num_draft_tokens;        // [batch]; may alias num_given_drafts
  int32_t* match_lens;              // [batch]; nullptr if not requested
  uint32_t* table;                  // [batch, table_entries]; nullptr: every row is scanned
  int32_t* state;                   // [batch, 2], state of the table
  int64_t batch;
  int64_t max_len;
  int64_t stride;
  int64_t capacity;
  int64_t table_entries;
  int64_t scan_tokens;             // this many last tokens of a row are scanned, not indexed
  int64_t index_tokens;            // most tokens of a row that one call indexes
  int64_t work;                    // approximate number of tokens to scan; unknown on CUDA
  int64_t max_total_draft_tokens;  // over all requests; -1: no limit
  ErrorFlag error;
};

SPECOPS_FAULT(5001, kNgramLens) = "ngram_propose: lens must be in 0 .. max_len{ = #}";
SPECOPS_FAULT(5002, kNgramMaxDraftTokens) = "ngram_propose: max_draft_tokens must be at least 0";
SPECOPS_FAULT(5003, kNgramMinSize) = "ngram_propose: min_ngram_size must be at least 1";
SPECOPS_FAULT(5004, kNgramMaxSize) =
    "ngram_propose: max_ngram_size must be at least min_ngram_size{ = #}";
SPECOPS_FAULT(5005, kNgramLeftmost) = "ngram_propose: leftmost must be 0 or 1";
SPECOPS_FAULT(5006,
              kNgramNumGivenDrafts) = "ngram_propose: num_given_drafts must be in 0 .. k{ = #}";

SPECOPS_HOST_DEVICE Fault find_sizes_fault(const PerRow<int32_t>& min_sizes,
                                           const PerRow<int32_t>& max_sizes,
                                           int64_t batch_idx) {
  int32_t low = min_sizes[batch_idx], high = max_sizes[batch_idx];
  if (low < 1) return fault_at(kNgramMinSize, min_sizes, batch_idx, low);
  if (high >= low) return {};
  return fault_at(kNgramMaxSize, max_sizes, batch_idx, high).with(low);
}

SPECOPS_HOST_DEVICE Fault find_leftmost_fault(const PerRow<int32_t>& leftmost, int64_t batch_idx) {
  int32_t value = leftmost[batch_idx];
  if (value == 0 || value == 1) return {};
  return fault_at(kNgramLeftmost, leftmost, batch_idx, value);
}

SPECOPS_HOST_DEVICE Fault find_fault(const NgramProposeParams& params, int64_t batch_idx) {
  int32_t len = params.lens[batch_idx], limit = params.max_draft_tokens[batch_idx];
  int32_t num_given = params.num_given_drafts ? params.num_given_drafts[batch_idx] : 0;
  if (len < 0 || len > params.max_len) {
    return fault_at(kNgramLens, len, batch_idx).with(params.max_len);
  }
  if (limit < 0) return fault_at(kNgramMaxDraftTokens, limit, batch_idx);
  if (num_given < 0 || num_given > params.capacity) {
    return fault_at(kNgramNumGivenDrafts, num_given, batch_idx).with(params.capacity);
  }
  Fault fault = find_sizes_fault(params.min_sizes, params.max_sizes, batch_idx);
  return fault.found() ? fault : find_leftmost_fault(params.leftmost, batch_idx);
}

// Default values: a scan length that costs little more than a scan of nothing, and how many tokens
// to index in the same call.
constexpr int64_t kNgramScanTokensCpu = 2048;
constexpr int64_t kNgramScanTokensCuda = 4096;
constexpr int64_t kNgramIndexTokens = 256;

SPECOPS_DECLARE_CPU(ngram_propose_cpu, NgramProposeParams);
SPECOPS_DECLARE_CUDA(ngram_propose_cuda, NgramProposeParams);

}  // namespace specops
