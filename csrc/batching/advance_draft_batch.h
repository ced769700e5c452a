// SPDX-License-Identifier: Apache-2.0
// advance_draft_batch: notes the drafts just sampled, and makes the rows of the module's next pass.
#pragma once

#include <cstdint>

#include "common/error_flag.h"
#include "common/isa.h"

namespace specops {

struct AdvanceDraftBatchParams {
  const int32_t* sampled_token_ids;  // [batch]
  const int32_t* last_rows;          // [batch], the rows they were sampled from, or -1: none was
  const int32_t* slots;              // [batch]; -1: drafts nothing
  const int32_t* kv_indptr;          // [batch + 1], in pages
  const int32_t* kv_indices;         // [num_indices], page ids
  const int32_t* lens;               // [num_slots]
  const int32_t* max_draft_tokens;   // [num_slots]
  int32_t* draft_token_ids;          // [num_slots, capacity]
  int32_t* num_draft_tokens;         // [num_slots]
  // The next rows, at most one a request; nullptr, all of them: none follow.
  int32_t* draft_qo_indptr;  // [batch + 1]
  int32_t* draft_kv_lens;    // [batch], 0 without a row
  int32_t* next_last_rows;   // [batch]
  int32_t* draft_positions;  // [batch], of the token that the row drafts, or 0
  int32_t* row_to_request;   // [batch], as the three below: -1 padded
  int32_t* positions;        // [batch]
  int64_t* cache_slots;      // [batch]
  int32_t* source_rows;      // [batch], the request's row of the pass before
  int64_t batch;
  int64_t num_slots;
  int64_t num_indices;
  int64_t capacity;
  int64_t page_size;
  int32_t step;   // which draft was sampled, from 0
  int32_t ahead;  // the next rows run at position lens + step - ahead
  ErrorFlag error;
};

SPECOPS_DECLARE_CPU(advance_draft_batch_cpu, AdvanceDraftBatchParams);
SPECOPS_DECLARE_CUDA(advance_draft_batch_cuda, AdvanceDraftBatchParams);

}  // namespace specops
