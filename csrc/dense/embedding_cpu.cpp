// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "common/parallel.h"
#include "dense/embedding.h"

namespace specops::SPECOPS_ISA {

// Copies out[row] = weight[token_ids[row]] unchanged.
// Cost:    2 * rows * row_bytes moved; memory-bound.
// Assumes: every id is in range, as ops.cpp checks.
// Order:   a copy.
// Source:  -
// Threads: one item per range of rows.
void embedding_cpu(const EmbeddingParams& params) {
  // A chunk should be worth waking a thread for: about 32 KiB.
  parallel_for(params.rows, (32 << 10) / params.row_bytes + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      std::memcpy(static_cast<char*>(params.out) + row * params.row_bytes,
                  static_cast<const char*>(params.weight) +
                      static_cast<int64_t>(params.token_ids[row]) * params.row_bytes,
                  static_cast<size_t>(params.row_bytes));
    }
  });
}

}  // namespace specops::SPECOPS_ISA
