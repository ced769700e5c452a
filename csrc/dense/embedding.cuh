// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/device.cuh"
#include "dense/embedding.h"

namespace specops {

constexpr int kEmbeddingThreads = 256;

// Copies out[row] = weight[token_ids[row]] unchanged. For an invalid id, writes zeros and reports a
// fault.
// Grid:    x = rows (unbounded), y = pieces of a row.
// Block:   up to 256 threads; each thread owns one word of kWord bytes.
// Smem:    none.
// Cost:    2 * row_bytes moved per row; memory-bound.
// Assumes: weight, out and row_bytes are multiples of the word.
// Order:   a copy.
// Source:  -
template <typename Word>
__global__ void __launch_bounds__(kEmbeddingThreads) embedding_kernel(EmbeddingParams params) {
  wait_for_previous_kernel();
  int64_t row = blockIdx.x;
  int64_t word = int64_t{blockIdx.y} * blockDim.x + threadIdx.x;
  int64_t words = params.row_bytes / static_cast<int64_t>(sizeof(Word));
  if (word >= words) return;
  int64_t id = params.token_ids[row];
  Fault fault = find_fault(params, row);
  if (fault.found() && word == 0) report_error(params.error, fault.code);
  Word value{};
  if (!fault.found()) value = static_cast<const Word*>(params.weight)[id * words + word];
  static_cast<Word*>(params.out)[row * words + word] = value;
}

}  // namespace specops
