// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "batching/prepare_batch.h"
#include "batching/row_scan.cuh"
#include "common/device.cuh"

namespace specops {

constexpr int kPrepareBatchThreads = 256;
constexpr int kPrepareBatchBlocksPerSm = 5;  // six would leave 40 registers per thread and spill
constexpr int kPrepareBatchWarps = kPrepareBatchThreads / kWarpSize;

// A tile of requests in shared memory. Each row finds its request in it by binary search.
struct PrepareBatchTile {
  int32_t first_row[kPrepareBatchThreads];         // capped by total_rows
  int32_t first_output[kPrepareBatchThreads];      // capped by num_output_rows
  int32_t first_output_row[kPrepareBatchThreads];  // the row of that output; capped by total_rows
  int32_t first_position[kPrepareBatchThreads];    // -1: its rows are padding
  int32_t first_page[kPrepareBatchThreads];        // in kv_indices
  int64_t warp_rows[kPrepareBatchWarps];           // sums over a warp's requests
  int64_t warp_outputs[kPrepareBatchWarps];
};

constexpr int kPrepareBatchSmemBytes = sizeof(PrepareBatchTile);

// A request after validation. An invalid request has no output rows, but its rows remain as
// padding, so that the rows of the other requests stay where the caller expects them.
struct PrepareBatchRequest {
  int64_t qo_len = 0;
  int64_t outputs = 0;
  int32_t first_position = -1;
  int32_t first_page = 0;
};

__device__ inline PrepareBatchRequest load_request(const PrepareBatchParams& params,
                                                   int64_t request) {
  PrepareBatchRequest out;
  int32_t qo_len = params.qo_lens[request];
  Fault fault = find_fault(params, request);
  out.qo_len = qo_len < 0 ? 0 : qo_len;
  if (fault.found()) {
    report_error(params.error, fault.code);
    return out;
  }
  out.outputs = num_outputs(static_cast<OutputMode>(params.output_modes[request]), qo_len);
  out.first_position = params.kv_lens[request] - qo_len;
  out.first_page = params.kv_indptr ? params.kv_indptr[request] : 0;
  return out;
}

// Clamps an index to the capacity of its arrays; both fit int32.
__device__ inline int32_t cap(int64_t value, int64_t capacity) {
  return static_cast<int32_t>(value < capacity ? value : capacity);
}

// Computes the index arrays of a step. Row i of request b has position = kv_len - qo_len + i, and
// slot = first slot of its page plus the offset in the page, or -1 without a page table. Output
// rows and the padded view are as in prepare_batch_cpu.
// Grid:    x = slices of the row capacities (unbounded); every block scans all requests, so that
//          no block waits for another.
// Block:   256 threads; a thread owns one request of a tile of 256, then rows of the slice.
// Smem:    one tile: 5 * 4 * 256 + 2 * 8 * 8 = 5,248 bytes.
// Cost:    20 bytes read per request and block, 28 to 40 written per row; a scan of ten shuffles
//          per 256 requests, then eight search steps per row; latency-bound.
// Assumes: shapes checked by ops.cpp; capacities fit int32.
// Order:   integers only.
// Source:  FastDeploy's virtual padding: the padded tensor is never built, only its offsets.
__global__ void __launch_bounds__(kPrepareBatchThreads, kPrepareBatchBlocksPerSm)
    prepare_batch_kernel(PrepareBatchParams params, int64_t rows_per_block) {
  wait_for_previous_kernel();
  auto& tile = *reinterpret_cast<PrepareBatchTile*>(shared_memory());
  int thread = static_cast<int>(threadIdx.x);
  int lane = thread % kWarpSize;
  int warp = thread / kWarpSize;
  // If a page has more slots than there are int32 positions, every position lies in the first page.
  constexpr int64_t kAllPositions = int64_t{1} << 31;
  auto page_size =
      static_cast<uint32_t>(params.page_size < kAllPositions ? params.page_size : kAllPositions);
  int64_t slice_begin = blockIdx.x * rows_per_block;
  int64_t slice_end = slice_begin + rows_per_block;
  bool first_block = blockIdx.x == 0;

  int64_t rows = 0;  // rows of the requests of earlier tiles
  int64_t outputs = 0;
  if (first_block && thread == 0) {
    params.qo_indptr[0] = 0;
    params.output_indptr[0] = 0;
  }
  for (int64_t first = 0; first < params.batch; first += kPrepareBatchThreads) {
    // Each thread checks one request; the block scans rows and output rows over the tile.
    int64_t request = first + thread;
    PrepareBatchRequest own;
    if (request < params.batch) own = load_request(params, request);
    int64_t row_end = own.qo_len;
    int64_t output_end = own.outputs;
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      int64_t other_rows = __shfl_up_sync(kFullMask, row_end, distance);
      int64_t other_outputs = __shfl_up_sync(kFullMask, output_end, distance);
      if (lane >= distance) {
        row_end += other_rows;
        output_end += other_outputs;
      }
    }
    if (lane == kWarpSize - 1) {
      tile.warp_rows[warp] = row_end;
      tile.warp_outputs[warp] = output_end;
    }
    __syncthreads();
    int64_t tile_rows = rows;
    int64_t tile_outputs = outputs;
    for (int i = 0; i < kPrepareBatchWarps; ++i) {
      if (i == warp) {
        row_end += tile_rows;
        output_end += tile_outputs;
      }
      tile_rows += tile.warp_rows[i];
      tile_outputs += tile.warp_outputs[i];
    }
    int32_t first_output = cap(output_end - own.outputs, params.num_output_rows);
    tile.first_row[thread] = cap(row_end - own.qo_len, params.total_rows);
    tile.first_output[thread] = first_output;
    tile.first_output_row[thread] = cap(row_end - own.outputs, params.total_rows);
    tile.first_position[thread] = own.first_position;
    tile.first_page[thread] = own.first_page;
    if (first_block && request < params.batch) {
      params.qo_indptr[request + 1] = cap(row_end, params.total_rows);
      params.output_indptr[request + 1] = cap(output_end, params.num_output_rows);
      if (params.output_cum_offsets) {
        params.output_cum_offsets[request] =
            static_cast<int32_t>(request * params.max_seq_len - first_output);
      }
    }
    __syncthreads();

    // The rows of the slice that belong to this tile.
    int64_t begin = max(slice_begin, rows);
    int64_t end = min(min(slice_end, tile_rows), params.total_rows);
    for (int64_t row = begin + thread; row < end; row += kPrepareBatchThreads) {
      int i = last_at_most<kPrepareBatchThreads>(tile.first_row, static_cast<int32_t>(row));
      int32_t position = tile.first_position[i];
      bool padding = position < 0;
      int64_t slot = -1;
      if (!padding) {
        position += static_cast<int32_t>(row) - tile.first_row[i];
      }
      if (!padding && params.kv_indptr != nullptr) {
        uint32_t page = static_cast<uint32_t>(position) / page_size;
        uint32_t offset = static_cast<uint32_t>(position) % page_size;
        int32_t page_id = params.kv_indices[tile.first_page[i] + int64_t{page}];
        if (is_page_id(page_id)) {
          slot = page_id * params.page_size + offset;
        } else {
          report_error(params.error, kPrepareBatchKvIndices);
        }
      }
      params.row_to_request[row] = padding ? -1 : static_cast<int32_t>(first + i);
      params.positions[row] = position;
      params.cache_slots[row] = slot;
    }

    // The output rows of the slice that belong to this tile.
    begin = max(slice_begin, outputs);
    end = min(min(slice_end, tile_outputs), params.num_output_rows);
    for (int64_t output = begin + thread; output < end; output += kPrepareBatchThreads) {
      int i = last_at_most<kPrepareBatchThreads>(tile.first_output, static_cast<int32_t>(output));
      int64_t row = output - tile.first_output[i] + tile.first_output_row[i];
      params.output_rows[output] = row < params.total_rows ? static_cast<int32_t>(row) : -1;
      params.output_row_to_request[output] = static_cast<int32_t>(first + i);
      if (params.output_padding_offset) {
        params.output_padding_offset[output] =
            static_cast<int32_t>((first + i) * params.max_seq_len - tile.first_output[i]);
      }
    }
    rows = tile_rows;
    outputs = tile_outputs;
  }

  // Fill the rest of the slice with padding.
  int64_t end = min(slice_end, params.total_rows);
  for (int64_t row = max(slice_begin, rows) + thread; row < end; row += kPrepareBatchThreads) {
    params.row_to_request[row] = -1;
    params.positions[row] = -1;
    params.cache_slots[row] = -1;
  }
  end = min(slice_end, params.num_output_rows);
  for (int64_t output = max(slice_begin, outputs) + thread; output < end;
       output += kPrepareBatchThreads) {
    params.output_rows[output] = -1;
    params.output_row_to_request[output] = -1;
    if (params.output_padding_offset) params.output_padding_offset[output] = -1;
  }
  if (first_block && thread == 0) {
    Fault fault = find_capacity_fault(params, rows, outputs);
    if (fault.found()) report_error(params.error, fault.code);
  }
}

}  // namespace specops
