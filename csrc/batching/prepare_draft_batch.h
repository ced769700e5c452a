// SPDX-License-Identifier: Apache-2.0
// prepare_draft_batch: the rows that a drafting module runs right after the target's step.
#pragma once

#include <cstdint>

#include "common/error_flag.h"
#include "common/host_device.h"
#include "common/isa.h"

namespace specops {

struct PrepareDraftBatchParams {
  const int32_t* slots;             // [batch], row of the per-slot arrays; -1: drafts nothing
  const int32_t* qo_indptr;         // [batch + 1], rows of the target's step
  const int32_t* kv_lens;           // [batch], of the target's step
  const int32_t* redraft_lens;      // [batch], rows before the step's that are run again
  const int32_t* kv_indptr;         // [batch + 1], in pages
  const int32_t* kv_indices;        // [num_indices], page ids
  const int32_t* lens;              // [num_slots], tokens known after the step
  const int32_t* max_draft_tokens;  // [num_slots]
  int32_t* draft_qo_indptr;         // [batch + 1]
  int32_t* draft_kv_lens;           // [batch], 0 without rows
  int32_t* last_rows;               // [batch], the row that drafts, or -1
  int32_t* draft_positions;         // [batch], of the token it drafts, or 0
  int32_t* row_to_request;          // [total_rows]
  int32_t* positions;               // [total_rows]
  int64_t* cache_slots;             // [total_rows]
  int32_t* source_rows;             // [total_rows], as draft_source()
  int64_t batch;
  int64_t num_slots;
  int64_t num_indices;
  int64_t total_rows;  // capacity; entries past the real rows become -1
  int64_t page_size;
  int64_t window;  // rows that keep_hidden_rows holds of a slot
  ErrorFlag error;
};

// The rows of one request: positions first .. end of those whose next token is known.
struct DraftRows {
  int32_t begin;  // first position of the target's step
  int32_t first;
  int32_t end;
};

SPECOPS_HOST_DEVICE DraftRows draft_rows(int32_t qo_len,
                                         int32_t kv_len,
                                         int32_t redraft_len,
                                         int32_t len) {
  DraftRows out{.begin = kv_len - qo_len, .first = kv_len - qo_len - redraft_len, .end = len - 1};
  if (out.end > kv_len) out.end = kv_len;
  if (qo_len == 0 || out.end < out.first) out.end = out.first;
  return out;
}

// Where the target's state of a position is found: a row of this step, or -2 - its kept row.
SPECOPS_HOST_DEVICE int32_t draft_source(
    const DraftRows& rows, int32_t position, int32_t first_row, int32_t slot, int64_t window) {
  if (position >= rows.begin) return first_row + position - rows.begin;
  return static_cast<int32_t>(-2 - (slot * window + position % window));
}

SPECOPS_DECLARE_CPU(prepare_draft_batch_cpu, PrepareDraftBatchParams);
SPECOPS_DECLARE_CUDA(prepare_draft_batch_cuda, PrepareDraftBatchParams);

}  // namespace specops
