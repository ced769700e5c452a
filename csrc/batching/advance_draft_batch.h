// SPDX-License-Identifier: Apache-2.0
// advance_draft_batch: records the drafts just sampled, and prepares the rows of the module's next
// pass.
#pragma once

#include <cstdint>

#include "common/error_flag.h"
#include "common/host_device.h"
#include "common/index_rule.h"
#include "common/isa.h"

namespace specops {

struct AdvanceDraftBatchParams {
  const int32_t* sampled_token_ids;  // [batch]
  const int32_t* last_rows;          // [batch], the rows they were sampled from; -1: none
  const int32_t* slots;              // [batch]; -1: does not draft
  const int32_t* kv_indptr;          // [batch + 1], in pages
  const int32_t* kv_indices;         // [num_indices], page ids
  const int32_t* lens;               // [num_slots]
  const int32_t* max_draft_tokens;   // [num_slots]
  int32_t* draft_token_ids;          // [num_slots, capacity]
  int32_t* num_draft_tokens;         // [num_slots]
  // The next rows, at most one per request; all nullptr: no pass follows.
  int32_t* draft_qo_indptr;  // [batch + 1]
  int32_t* draft_kv_lens;    // [batch], 0 for a request without a row
  int32_t* next_last_rows;   // [batch]
  int32_t* draft_positions;  // [batch], position of the token to draft, or 0
  int32_t* row_to_request;   // [batch], -1 padded, as are the next three
  int32_t* positions;        // [batch]
  int64_t* cache_slots;      // [batch]
  int32_t* source_rows;      // [batch], the request's row of the previous pass
  int64_t batch;
  int64_t num_slots;
  int64_t num_indices;
  int64_t capacity;
  int64_t page_size;
  int32_t step;   // index of the sampled draft, from 0
  int32_t ahead;  // the next rows run at position lens + step - ahead
  ErrorFlag error;
};

// Returns whether a request needs a row after draft `step`. `source` is the row of the previous
// pass that drafted it, or -1. The caller also requires a page for the row.
SPECOPS_HOST_DEVICE bool wants_row(const AdvanceDraftBatchParams& params,
                                   int32_t slot,
                                   int32_t source) {
  return params.draft_qo_indptr != nullptr && source >= 0 &&
         params.step + 1 < params.max_draft_tokens[slot] && params.step + 1 < params.capacity;
}

// Returns the position of the next row.
SPECOPS_HOST_DEVICE int64_t next_position(const AdvanceDraftBatchParams& params, int32_t slot) {
  return int64_t{params.lens[slot]} + params.step - params.ahead;
}

SPECOPS_FAULT(3029, kAdvanceDraftBatchSlots) =
    "advance_draft_batch: slots must be -1 or a row of lens{, below #}";
SPECOPS_FAULT(3030, kAdvanceDraftBatchLens) =
    "advance_draft_batch: lens must be at least ahead - step{ = #}";
SPECOPS_FAULT(3031, kAdvanceDraftBatchKvIndptr) =
    "advance_draft_batch: kv_indptr must be non-decreasing from 0, at least the entry before it{ = "
    "#} and at most the size of kv_indices{ = #}";
SPECOPS_FAULT(3032, kAdvanceDraftBatchKvIndices) =
    "advance_draft_batch: kv_indices must be a page id, at least 0";

SPECOPS_HOST_DEVICE Fault find_fault(const AdvanceDraftBatchParams& params, int64_t request) {
  return find_slot_fault(kAdvanceDraftBatchSlots, params.slots[request], request, params.num_slots);
}

// Checks a request that needs a row.
SPECOPS_HOST_DEVICE Fault find_row_fault(const AdvanceDraftBatchParams& params, int64_t request) {
  int32_t slot = params.slots[request];
  int64_t position = next_position(params, slot);
  if (position < 0) {
    return fault_at(kAdvanceDraftBatchLens, params.lens[slot], slot)
        .with(params.ahead - params.step);
  }
  int32_t first_page = params.kv_indptr[request], end_page = params.kv_indptr[request + 1];
  Fault fault = find_range_fault(
      kAdvanceDraftBatchKvIndptr, first_page, end_page, request, params.num_indices);
  int64_t place = first_page + position / params.page_size;
  if (fault.found() || place >= end_page) return fault;
  return find_page_id_fault(kAdvanceDraftBatchKvIndices, params.kv_indices[place], place);
}

SPECOPS_DECLARE_CPU(advance_draft_batch_cpu, AdvanceDraftBatchParams);
SPECOPS_DECLARE_CUDA(advance_draft_batch_cuda, AdvanceDraftBatchParams);

}  // namespace specops
