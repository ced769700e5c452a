// SPDX-License-Identifier: Apache-2.0
#include "batching/prepare_draft_batch.h"

namespace specops::SPECOPS_ISA {

// Computes the rows of the drafting module. It gets a row for position i if token i + 1 is known:
// for all positions that the step confirmed, and for the redraft_len positions before them.
// Rejected drafts have no known next token, so they get no row.
// Cost:    24 bytes written per row.
// Assumes: lengths, slots, page table and capacity checked by ops.cpp.
// Order:   integers only.
// Source:  DeepSeek-V3, section 2.2: module 1 at position i takes token i + 1.
// Threads: one, because a step's indices are a few hundred bytes.
void prepare_draft_batch_cpu(const PrepareDraftBatchParams& params) {
  int64_t row = 0;
  params.draft_qo_indptr[0] = 0;
  for (int64_t b = 0; b < params.batch; ++b) {
    int32_t slot = params.slots[b];
    int32_t first_row = params.qo_indptr[b];
    DraftRows rows{};
    int32_t len = 0;
    if (slot >= 0) {
      len = params.lens[slot];
      rows = draft_rows(params, b);
    }
    const int32_t* pages = params.kv_indices + params.kv_indptr[b];
    for (int32_t position = rows.first; position < rows.end; ++position, ++row) {
      params.row_to_request[row] = static_cast<int32_t>(b);
      params.positions[row] = position;
      params.cache_slots[row] =
          pages[position / params.page_size] * params.page_size + position % params.page_size;
      params.source_rows[row] = draft_source(rows, position, first_row, slot, params.window);
    }
    bool any = rows.end > rows.first;
    bool drafts = any && rows.end == len - 1 && params.max_draft_tokens[slot] > 0;
    params.draft_kv_lens[b] = any ? rows.end : 0;
    params.last_rows[b] = drafts ? static_cast<int32_t>(row - 1) : -1;
    params.draft_positions[b] = drafts ? len : 0;
    params.draft_qo_indptr[b + 1] = static_cast<int32_t>(row);
  }
  for (; row < params.total_rows; ++row) {
    params.row_to_request[row] = -1;
    params.positions[row] = -1;
    params.cache_slots[row] = -1;
    params.source_rows[row] = -1;
  }
}

}  // namespace specops::SPECOPS_ISA
