// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "batching/gather_output_rows.h"
#include "common/device.cuh"

namespace specops {

constexpr int kGatherThreads = 128;
constexpr int kGatherWarps = kGatherThreads / kWarpSize;
constexpr int kGatherWords = 4;  // loads in flight per lane

// Sets out[i] = hidden[output_rows[i]], or zeros if output_rows[i] is -1. An invalid index also
// yields zeros and is reported.
// Grid:    x = pieces of output rows, four per block (unbounded).
// Block:   128 threads; a warp owns a piece of 128 words: 2 KB of a row with 16-byte words.
// Smem:    none.
// Cost:    2 * num_output_rows * row_bytes moved; memory-bound.
// Assumes: rows and strides are whole, aligned words; out does not overlap hidden.
// Order:   copies only.
// Source:  FastDeploy's rebuild_padding.
template <typename Word>
__global__ void __launch_bounds__(kGatherThreads)
    gather_output_rows_kernel(GatherOutputRowsParams params) {
  wait_for_previous_kernel();
  int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  int64_t piece = int64_t{blockIdx.x} * kGatherWarps + threadIdx.x / kWarpSize;
  int64_t row_words = params.row_bytes / static_cast<int64_t>(sizeof(Word));
  constexpr int64_t kPieceWords = kGatherWords * kWarpSize;
  int64_t pieces_per_row = (row_words + kPieceWords - 1) / kPieceWords;
  int64_t output = piece / pieces_per_row;
  if (output >= params.num_output_rows) return;
  int64_t first_word = piece % pieces_per_row * kPieceWords + lane;
  int64_t row = params.output_rows[output];
  Fault fault = find_fault(params, output);
  if (fault.found()) report_error(params.error, fault.code);
  bool valid = row >= 0 && !fault.found();
  const auto* hidden = reinterpret_cast<const Word*>(
      static_cast<const char*>(params.hidden) + (valid ? row : 0) * params.hidden_stride_bytes);
  auto* out = reinterpret_cast<Word*>(static_cast<char*>(params.out) + output * params.row_bytes);
  Word words[kGatherWords] = {};
  for (int i = 0; i < kGatherWords; ++i) {
    int64_t word = first_word + i * kWarpSize;
    if (valid && word < row_words) words[i] = hidden[word];
  }
  for (int i = 0; i < kGatherWords; ++i) {
    int64_t word = first_word + i * kWarpSize;
    if (word < row_words) out[word] = words[i];
  }
}

}  // namespace specops
