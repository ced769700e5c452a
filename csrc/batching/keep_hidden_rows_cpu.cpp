// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "batching/keep_hidden_rows.h"

namespace specops::SPECOPS_ISA {

// Copies hidden rows to the buffer `kept`, at slot * window + i % window for position i. Copies the
// last `window` positions of the step whose next token is known, so no rejected drafts.
// Cost:    2 * row_bytes moved per copied row, at most `window` rows per request.
// Assumes: slots, lengths and rows checked by ops.cpp.
// Order:   copies only.
// Source:  -
// Threads: one, because a decoding request copies only one or a few rows.
void keep_hidden_rows_cpu(const KeepHiddenRowsParams& params) {
  for (int64_t b = 0; b < params.batch; ++b) {
    int64_t slot = params.slots[b];
    int64_t first_row = params.qo_indptr[b];
    int64_t begin = params.kv_lens[b] - (params.qo_indptr[b + 1] - first_row);
    if (slot < 0 || begin == params.kv_lens[b]) continue;
    int64_t end = params.lens[slot] - 1;
    if (end > params.kv_lens[b]) end = params.kv_lens[b];
    int64_t position = end - params.window > begin ? end - params.window : begin;
    for (; position < end; ++position) {
      int64_t kept = slot * params.window + position % params.window;
      int64_t row = first_row + position - begin;
      std::memcpy(static_cast<char*>(params.kept) + kept * params.row_bytes,
                  static_cast<const char*>(params.hidden) + row * params.hidden_stride_bytes,
                  static_cast<size_t>(params.row_bytes));
    }
  }
}

}  // namespace specops::SPECOPS_ISA
