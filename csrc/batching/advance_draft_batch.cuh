// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "batching/advance_draft_batch.h"
#include "batching/row_scan.cuh"
#include "common/device.cuh"

namespace specops {

constexpr int kAdvanceDraftThreads = 256;
constexpr int kAdvanceDraftSmemBytes = kAdvanceDraftThreads / kWarpSize * sizeof(int64_t);

// The next row of a request. If the request gets no row, cache_slot and position are -1.
struct AdvancedRow {
  int64_t cache_slot = -1;
  int32_t position = -1;
};

// Returns the row that follows draft `step`. There is none if the row's page is missing; if an
// argument is invalid, there is a fault instead.
__device__ inline AdvancedRow next_row(const AdvanceDraftBatchParams& params,
                                       int64_t request,
                                       int32_t slot) {
  Fault fault = find_row_fault(params, request);
  if (fault.found()) {
    report_error(params.error, fault.code);
    return {};
  }
  int64_t position = next_position(params, slot);
  int64_t page = params.kv_indptr[request] + position / params.page_size;
  if (page >= params.kv_indptr[request + 1]) return {};
  return {.cache_slot = params.kv_indices[page] * params.page_size + position % params.page_size,
          .position = static_cast<int32_t>(position)};
}

// Stores the sampled token as draft `step` of each request that wants it. A request that needs more
// drafts, and has a page for the next row, gets one row, `ahead` tokens before that draft.
// Grid:    one block.
// Block:   256 threads; each thread owns every 256th request.
// Smem:    one sum per warp: 64 bytes.
// Cost:    60 bytes moved per request, a scan of five shuffles per 256; latency-bound.
// Assumes: shapes checked by ops.cpp; no slot appears twice.
// Order:   integers only.
// Source:  DeepSeek-V3, section 2.2; one module fed with its own output, as FastDeploy's MTP.
__global__ void __launch_bounds__(kAdvanceDraftThreads)
    advance_draft_batch_kernel(AdvanceDraftBatchParams params) {
  wait_for_previous_kernel();
  auto* warp_sums = reinterpret_cast<int64_t*>(shared_memory());
  int thread = static_cast<int>(threadIdx.x);
  bool has_rows = params.draft_qo_indptr != nullptr;
  if (has_rows && thread == 0) params.draft_qo_indptr[0] = 0;
  int64_t rows = 0;  // rows of the requests of earlier iterations
  for (int64_t first = 0; first < params.batch; first += kAdvanceDraftThreads) {
    int64_t request = first + thread;
    bool real = request < params.batch;
    int32_t slot = real ? params.slots[request] : -1;
    Fault fault = real ? find_fault(params, request) : Fault{};
    if (fault.found()) {
      report_error(params.error, fault.code);
      slot = -1;
    }
    int32_t source = slot >= 0 ? params.last_rows[request] : -1;
    if (slot >= 0) {
      int32_t* drafts = params.draft_token_ids + slot * params.capacity;
      if (params.step == 0) {
        for (int64_t i = 0; i < params.capacity; ++i) drafts[i] = -1;
        params.num_draft_tokens[slot] = 0;
      }
      if (params.step >= params.max_draft_tokens[slot]) source = -1;
      if (source >= 0) {
        drafts[params.step] = params.sampled_token_ids[request];
        params.num_draft_tokens[slot] = params.step + 1;
      }
    }
    if (!has_rows) continue;
    AdvancedRow next;
    if (wants_row(params, slot, source)) next = next_row(params, request, slot);
    bool more = next.position >= 0;
    int64_t total;
    int64_t row_end = rows + scan_rows<kAdvanceDraftThreads>(more, warp_sums, &total);
    rows += total;
    if (real) {
      auto row = static_cast<int32_t>(row_end - 1);
      params.draft_qo_indptr[request + 1] = static_cast<int32_t>(row_end);
      params.draft_kv_lens[request] = next.position + 1;
      params.next_last_rows[request] = more ? row : -1;
      params.draft_positions[request] = more ? next.position + params.ahead + 1 : 0;
      if (more) {
        params.row_to_request[row] = static_cast<int32_t>(request);
        params.positions[row] = next.position;
        params.cache_slots[row] = next.cache_slot;
        params.source_rows[row] = source;
      }
    }
    __syncthreads();
  }
  if (!has_rows) return;
  for (int64_t row = rows + thread; row < params.batch; row += kAdvanceDraftThreads) {
    params.row_to_request[row] = -1;
    params.positions[row] = -1;
    params.cache_slots[row] = -1;
    params.source_rows[row] = -1;
  }
}

}  // namespace specops
