// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "batching/gather_output_rows.h"
#include "common/parallel.h"

namespace specops::SPECOPS_ISA {

// Sets out[i] = hidden[output_rows[i]], or zeros if output_rows[i] is -1.
// Cost:    2 * num_output_rows * row_bytes moved; memory-bound.
// Assumes: indices checked by ops.cpp; rows contiguous; out does not overlap hidden.
// Order:   copies only.
// Source:  FastDeploy's rebuild_padding.
// Threads: one item per piece of rows of about 32 KiB.
void gather_output_rows_cpu(const GatherOutputRowsParams& params) {
  constexpr int64_t kPieceBytes = 32 * 1024;
  const char* hidden = static_cast<const char*>(params.hidden);
  char* out = static_cast<char*>(params.out);
  int64_t grain = kPieceBytes / params.row_bytes + 1;
  parallel_for(params.num_output_rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      char* dst = out + i * params.row_bytes;
      int64_t row = params.output_rows[i];
      if (row < 0) {
        std::memset(dst, 0, static_cast<size_t>(params.row_bytes));
      } else {
        std::memcpy(
            dst, hidden + row * params.hidden_stride_bytes, static_cast<size_t>(params.row_bytes));
      }
    }
  });
}

}  // namespace specops::SPECOPS_ISA
