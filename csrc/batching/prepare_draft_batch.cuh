// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "batching/prepare_draft_batch.h"
#include "batching/row_scan.cuh"
#include "common/device.cuh"

namespace specops {

constexpr int kPrepareDraftThreads = 256;

// A tile of requests in shared memory. Each row finds its request in it by binary search.
struct PrepareDraftTile {
  int32_t first_row[kPrepareDraftThreads];  // capped by total_rows
  int32_t first_position[kPrepareDraftThreads];
  int32_t begin[kPrepareDraftThreads];       // first position of the target's step
  int32_t target_row[kPrepareDraftThreads];  // first row of the target's step
  int32_t slot[kPrepareDraftThreads];
  int32_t first_page[kPrepareDraftThreads];  // in kv_indices
  int64_t warp_sums[kPrepareDraftThreads / kWarpSize];
};

constexpr int kPrepareDraftSmemBytes = sizeof(PrepareDraftTile);

// A request after validation. An invalid request has no rows.
struct PrepareDraftRequest {
  DraftRows rows{};
  int32_t slot = -1;
  int32_t target_row = 0;
  int32_t first_page = 0;
  bool drafts = false;
};

__device__ inline PrepareDraftRequest load_request(const PrepareDraftBatchParams& params,
                                                   uint32_t page_size,
                                                   int64_t request) {
  PrepareDraftRequest out;
  int32_t slot = params.slots[request];
  if (slot == -1) return out;
  ErrorCode code = find_fault(params, request).code;
  if (code == ErrorCode::kNone) {
    DraftRows rows = draft_rows(params, request);
    int32_t first_page = params.kv_indptr[request];
    int64_t end_page = (int64_t{rows.end} + page_size - 1) / page_size;
    bool any = rows.end > rows.first;
    int32_t page_ids = 0;
    for (int64_t page = rows.first / page_size; any && page < end_page; ++page) {
      page_ids |= params.kv_indices[first_page + page];
    }
    if (is_page_id(page_ids)) {
      out.rows = rows;
      out.slot = slot;
      out.target_row = params.qo_indptr[request];
      out.first_page = first_page;
      out.drafts = any && rows.end == params.lens[slot] - 1 && params.max_draft_tokens[slot] > 0;
    } else {
      code = kPrepareDraftBatchKvIndices;
    }
  }
  if (code != ErrorCode::kNone) report_error(params.error, code);
  return out;
}

// Computes the rows of the drafting module. It gets a row for position i if token i + 1 is known:
// for all positions that the step confirmed, and for the redraft_len positions before them.
// Rejected drafts have no known next token, so they get no row.
// Grid:    x = slices of the row capacity (unbounded); every block scans all requests, so that no
//          block waits for another.
// Block:   256 threads; a thread owns one request of a tile of 256, then rows of the slice.
// Smem:    one tile: 6 * 4 * 256 + 8 * 8 = 6,208 bytes.
// Cost:    40 bytes read per request and block, 24 written per row; latency-bound.
// Assumes: shapes checked by ops.cpp; capacities fit int32.
// Order:   integers only.
// Source:  DeepSeek-V3, section 2.2: module 1 at position i takes token i + 1.
__global__ void __launch_bounds__(kPrepareDraftThreads)
    prepare_draft_batch_kernel(PrepareDraftBatchParams params, int64_t rows_per_block) {
  wait_for_previous_kernel();
  auto& tile = *reinterpret_cast<PrepareDraftTile*>(shared_memory());
  int thread = static_cast<int>(threadIdx.x);
  // If a page has more slots than there are int32 positions, every position lies in the first page.
  constexpr int64_t kAllPositions = int64_t{1} << 31;
  auto page_size =
      static_cast<uint32_t>(params.page_size < kAllPositions ? params.page_size : kAllPositions);
  int64_t slice_begin = blockIdx.x * rows_per_block;
  int64_t slice_end = min(slice_begin + rows_per_block, params.total_rows);
  bool first_block = blockIdx.x == 0;

  auto cap = [&](int64_t row) {
    return static_cast<int32_t>(row < params.total_rows ? row : params.total_rows);
  };
  int64_t rows = 0;  // rows of the requests of earlier tiles
  if (first_block && thread == 0) params.draft_qo_indptr[0] = 0;
  for (int64_t first = 0; first < params.batch; first += kPrepareDraftThreads) {
    int64_t request = first + thread;
    PrepareDraftRequest own;
    if (request < params.batch) own = load_request(params, page_size, request);
    int64_t count = own.rows.end - own.rows.first;
    int64_t tile_rows;
    int64_t row_end = rows + scan_rows<kPrepareDraftThreads>(count, tile.warp_sums, &tile_rows);
    tile_rows += rows;
    tile.first_row[thread] = cap(row_end - count);
    tile.first_position[thread] = own.rows.first;
    tile.begin[thread] = own.rows.begin;
    tile.target_row[thread] = own.target_row;
    tile.slot[thread] = own.slot;
    tile.first_page[thread] = own.first_page;
    if (first_block && request < params.batch) {
      params.draft_qo_indptr[request + 1] = cap(row_end);
      params.draft_kv_lens[request] = count > 0 ? own.rows.end : 0;
      bool drafts = own.drafts && row_end <= params.total_rows;
      params.last_rows[request] = drafts ? static_cast<int32_t>(row_end - 1) : -1;
      // A request drafts if its rows end at position len - 1.
      params.draft_positions[request] = drafts ? own.rows.end + 1 : 0;
    }
    __syncthreads();

    // Write the rows of the slice that belong to this tile.
    int64_t begin = max(slice_begin, rows);
    int64_t end = min(slice_end, tile_rows);
    for (int64_t row = begin + thread; row < end; row += kPrepareDraftThreads) {
      int i = last_at_most<kPrepareDraftThreads>(tile.first_row, static_cast<int32_t>(row));
      int32_t position = tile.first_position[i] + static_cast<int32_t>(row) - tile.first_row[i];
      DraftRows of_request{.begin = tile.begin[i], .first = tile.first_position[i], .end = 0};
      uint32_t page = static_cast<uint32_t>(position) / page_size;
      uint32_t offset = static_cast<uint32_t>(position) % page_size;
      int64_t page_id = params.kv_indices[tile.first_page[i] + int64_t{page}];
      params.row_to_request[row] = static_cast<int32_t>(first + i);
      params.positions[row] = position;
      params.cache_slots[row] = page_id * params.page_size + offset;
      params.source_rows[row] =
          draft_source(of_request, position, tile.target_row[i], tile.slot[i], params.window);
    }
    rows = tile_rows;
  }

  // Fill the rest of the slice with padding.
  for (int64_t row = max(slice_begin, rows) + thread; row < slice_end;
       row += kPrepareDraftThreads) {
    params.row_to_request[row] = -1;
    params.positions[row] = -1;
    params.cache_slots[row] = -1;
    params.source_rows[row] = -1;
  }
  if (first_block && thread == 0) {
    Fault fault = find_capacity_fault(params, rows);
    if (fault.found()) report_error(params.error, fault.code);
  }
}

}  // namespace specops
