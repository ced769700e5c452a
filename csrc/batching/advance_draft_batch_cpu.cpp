// SPDX-License-Identifier: Apache-2.0
#include "batching/advance_draft_batch.h"

namespace specops::SPECOPS_ISA {

// Stores the sampled token as draft `step` of each request that wants it. A request that needs more
// drafts, and has a page for the next row, gets one row, `ahead` tokens before that draft.
// Cost:    60 bytes moved per request.
// Assumes: slots, lengths, page table and capacity checked by ops.cpp.
// Order:   integers only.
// Source:  DeepSeek-V3, section 2.2; one module fed with its own output, as FastDeploy's MTP.
// Threads: one, because a batch's indices are a few hundred bytes.
void advance_draft_batch_cpu(const AdvanceDraftBatchParams& params) {
  int64_t row = 0;
  bool has_rows = params.draft_qo_indptr != nullptr;
  if (has_rows) params.draft_qo_indptr[0] = 0;
  for (int64_t b = 0; b < params.batch; ++b) {
    int32_t slot = params.slots[b];
    bool drafted =
        slot >= 0 && params.last_rows[b] >= 0 && params.step < params.max_draft_tokens[slot];
    if (slot >= 0) {
      int32_t* drafts = params.draft_token_ids + slot * params.capacity;
      if (params.step == 0) {
        for (int64_t i = 0; i < params.capacity; ++i) drafts[i] = -1;
        params.num_draft_tokens[slot] = 0;
      }
      if (drafted) {
        drafts[params.step] = params.sampled_token_ids[b];
        params.num_draft_tokens[slot] = params.step + 1;
      }
    }
    if (!has_rows) continue;
    bool more = drafted && wants_row(params, slot, params.last_rows[b]);
    int64_t position = 0;
    if (more) {
      position = next_position(params, slot);
      int64_t page = params.kv_indptr[b] + position / params.page_size;
      more = page < params.kv_indptr[b + 1];
      if (more) {
        params.row_to_request[row] = static_cast<int32_t>(b);
        params.positions[row] = static_cast<int32_t>(position);
        params.cache_slots[row] =
            params.kv_indices[page] * params.page_size + position % params.page_size;
        params.source_rows[row] = params.last_rows[b];
      }
    }
    params.draft_kv_lens[b] = more ? static_cast<int32_t>(position + 1) : 0;
    params.next_last_rows[b] = more ? static_cast<int32_t>(row) : -1;
    params.draft_positions[b] = more ? params.lens[slot] + params.step + 1 : 0;
    row += more;
    params.draft_qo_indptr[b + 1] = static_cast<int32_t>(row);
  }
  for (; has_rows && row < params.batch; ++row) {
    params.row_to_request[row] = -1;
    params.positions[row] = -1;
    params.cache_slots[row] = -1;
    params.source_rows[row] = -1;
  }
}

}  // namespace specops::SPECOPS_ISA
