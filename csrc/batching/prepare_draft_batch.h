// SPDX-License-Identifier: Apache-2.0
// prepare_draft_batch: the rows that a drafting module runs right after the target's step.
#pragma once

#include <cstdint>

#include "common/error_flag.h"
#include "common/host_device.h"
#include "common/index_rule.h"
#include "common/isa.h"

namespace specops {

struct PrepareDraftBatchParams {
  const int32_t* slots;             // [batch], row of the per-slot arrays; -1: does not draft
  const int32_t* qo_indptr;         // [batch + 1], row offsets of the target's step
  const int32_t* kv_lens;           // [batch], KV lengths of the target's step
  const int32_t* redraft_lens;      // [batch], rows before the step's to run again
  const int32_t* kv_indptr;         // [batch + 1], in pages
  const int32_t* kv_indices;        // [num_indices], page ids
  const int32_t* lens;              // [num_slots], tokens known after the step
  const int32_t* max_draft_tokens;  // [num_slots]
  int32_t* draft_qo_indptr;         // [batch + 1], row offsets of the drafting pass
  int32_t* draft_kv_lens;           // [batch], 0 for a request without rows
  int32_t* last_rows;               // [batch], the row that drafts, or -1
  int32_t* draft_positions;         // [batch], position of the token to draft, or 0
  int32_t* row_to_request;          // [total_rows]
  int32_t* positions;               // [total_rows]
  int64_t* cache_slots;             // [total_rows]
  int32_t* source_rows;             // [total_rows], see draft_source()
  int64_t batch;
  int64_t num_slots;
  int64_t num_indices;
  int64_t total_rows;  // capacity; entries past the real rows become -1
  int64_t page_size;
  int64_t window;  // rows per slot that keep_hidden_rows holds
  ErrorFlag error;
};

// The rows of one request: positions [first, end), those whose next token is known.
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

// Returns the rows of a request that has a slot.
SPECOPS_HOST_DEVICE DraftRows draft_rows(const PrepareDraftBatchParams& params, int64_t request) {
  return draft_rows(params.qo_indptr[request + 1] - params.qo_indptr[request],
                    params.kv_lens[request],
                    params.redraft_lens[request],
                    params.lens[params.slots[request]]);
}

SPECOPS_FAULT(3020, kPrepareDraftBatchSlots) =
    "prepare_draft_batch: slots must be -1 or a row of lens{, below #}";
SPECOPS_FAULT(3021, kPrepareDraftBatchQoIndptr) =
    "prepare_draft_batch: qo_indptr must be non-decreasing from 0, at least the entry before it{ = "
    "#}";
SPECOPS_FAULT(3022, kPrepareDraftBatchKvLens) =
    "prepare_draft_batch: kv_lens must be at least the request's {# }rows by qo_indptr";
SPECOPS_FAULT(3023, kPrepareDraftBatchLens) =
    "prepare_draft_batch: lens must be more than the {# }positions before the step's";
SPECOPS_FAULT(3024, kPrepareDraftBatchRedraftLens) =
    "prepare_draft_batch: redraft_lens must be at least 0, at most window{ = #} and the {# "
    "}positions before the step's";
SPECOPS_FAULT(3025, kPrepareDraftBatchKvIndptr) =
    "prepare_draft_batch: kv_indptr must be non-decreasing from 0, at least the entry before it{ = "
    "#} and at most the size of kv_indices{ = #}";
SPECOPS_FAULT(3026, kPrepareDraftBatchPages) =
    "prepare_draft_batch: kv_indptr must be wide enough for the pages of the {# }positions up to "
    "the last row's{, which end at #}";
SPECOPS_FAULT(3027, kPrepareDraftBatchKvIndices) =
    "prepare_draft_batch: kv_indices must be a page id, at least 0";
SPECOPS_FAULT(3028, kPrepareDraftBatchTotalRows) =
    "prepare_draft_batch: total_rows must be at least {#, }the rows of all requests";

// Checks a request's slot, lengths and range of kv_indices. The page ids of its rows are checked
// with is_page_id.
SPECOPS_HOST_DEVICE Fault find_fault(const PrepareDraftBatchParams& params, int64_t request) {
  int32_t slot = params.slots[request];
  if (slot == -1) return {};
  Fault fault = find_slot_fault(kPrepareDraftBatchSlots, slot, request, params.num_slots);
  if (fault.found()) return fault;
  int32_t first_row = params.qo_indptr[request], end_row = params.qo_indptr[request + 1];
  int32_t kv_len = params.kv_lens[request], redraft = params.redraft_lens[request];
  int32_t len = params.lens[slot];
  int32_t first_page = params.kv_indptr[request], end_page = params.kv_indptr[request + 1];
  fault = find_range_fault(kPrepareDraftBatchQoIndptr, first_row, end_row, request);
  if (fault.found()) return fault;
  int32_t qo_len = end_row - first_row;
  if (kv_len < qo_len) {
    return fault_at(kPrepareDraftBatchKvLens, kv_len, request).with(qo_len);
  }
  int32_t begin = kv_len - qo_len;
  if (len <= begin) return fault_at(kPrepareDraftBatchLens, len, slot).with(begin);
  if (redraft < 0 || redraft > params.window || redraft > begin) {
    return fault_at(kPrepareDraftBatchRedraftLens, redraft, request).with(params.window, begin);
  }
  DraftRows rows = draft_rows(qo_len, kv_len, redraft, len);
  if (rows.end == rows.first) return {};
  fault = find_range_fault(
      kPrepareDraftBatchKvIndptr, first_page, end_page, request, params.num_indices);
  if (fault.found()) return fault;
  return find_pages_fault(
      kPrepareDraftBatchPages, first_page, end_page, request, params.page_size, rows.end);
}

// Checks the row capacity, given the rows of all requests.
SPECOPS_HOST_DEVICE Fault find_capacity_fault(const PrepareDraftBatchParams& params, int64_t rows) {
  if (rows <= params.total_rows) return {};
  return fault_at(kPrepareDraftBatchTotalRows, params.total_rows).with(rows);
}

// Returns the source of the target's state of a position: a row of this step, or -2 - its kept row.
SPECOPS_HOST_DEVICE int32_t draft_source(
    const DraftRows& rows, int32_t position, int32_t first_row, int32_t slot, int64_t window) {
  if (position >= rows.begin) return first_row + position - rows.begin;
  return static_cast<int32_t>(-2 - (slot * window + position % window));
}

SPECOPS_DECLARE_CPU(prepare_draft_batch_cpu, PrepareDraftBatchParams);
SPECOPS_DECLARE_CUDA(prepare_draft_batch_cuda, PrepareDraftBatchParams);

}  // namespace specops
