// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "batching/keep_hidden_rows.h"
#include "common/device.cuh"

namespace specops {

constexpr int kKeepHiddenThreads = 128;

// Copies hidden rows to the buffer `kept`, at slot * window + i % window for position i. Copies the
// last `window` positions of the step whose next token is known, so no rejected drafts.
// Grid:    x = batch * window, one block per row that may be copied (unbounded).
// Block:   128 threads; a thread owns every 128th word of the row.
// Smem:    none.
// Cost:    2 * row_bytes moved per copied row; memory-bound.
// Assumes: shapes checked by ops.cpp.
// Order:   copies only.
// Source:  -
template <typename Word>
__global__ void __launch_bounds__(kKeepHiddenThreads)
    keep_hidden_rows_kernel(KeepHiddenRowsParams params) {
  wait_for_previous_kernel();
  int64_t request = blockIdx.x / params.window;
  int64_t back = blockIdx.x % params.window;  // distance from the last position to copy
  int64_t slot = params.slots[request];
  if (slot == -1) return;
  Fault fault = find_fault(params, request);
  if (fault.found()) {
    if (threadIdx.x == 0) report_error(params.error, fault.code);
    return;
  }
  int64_t first_row = params.qo_indptr[request];
  int64_t end_row = params.qo_indptr[request + 1];
  int64_t kv_len = params.kv_lens[request];
  int64_t begin = kv_len - (end_row - first_row);
  int64_t position = min(kv_len, int64_t{params.lens[slot]} - 1) - 1 - back;
  if (position < begin) return;
  int64_t kept = slot * params.window + position % params.window;
  int64_t row = first_row + position - begin;
  const auto* from = reinterpret_cast<const Word*>(static_cast<const char*>(params.hidden) +
                                                   row * params.hidden_stride_bytes);
  auto* to = reinterpret_cast<Word*>(static_cast<char*>(params.kept) + kept * params.row_bytes);
  int64_t words = params.row_bytes / static_cast<int64_t>(sizeof(Word));
  for (int64_t word = threadIdx.x; word < words; word += kKeepHiddenThreads) to[word] = from[word];
}

}  // namespace specops
