// SPDX-License-Identifier: Apache-2.0
// Compiled forms of append_attention on CUDA. Each cache element type has its own file
// (append_attention_<element>.cu), so that they compile in parallel.
#pragma once

#include "attention/append_attention/append_attention.h"

namespace specops {

struct AttentionLaunch;

// Most blocks per SM for a kernel with at most two row tiles, and with more.
constexpr int kMostBlocksPerSm = 3, kBlocksOfHighTiles = 2;

// A kernel and its launch parameters.
struct AttentionForm {
  void (*kernel)(AttentionLaunch);
  int threads;  // per block
  int rows;     // per tile
  int blocks_per_sm;
  int shared_bytes;
  int total_bytes;  // extra shared memory if totals are not in the workspace
};

// Return the form with the lowest tiles that hold `rows` packed rows, or the highest of at most
// `most_rows`.
AttentionForm attention_form_bf16(const AppendAttentionParams& params,
                                  int64_t rows,
                                  int64_t most_rows);
AttentionForm attention_form_f16(const AppendAttentionParams& params,
                                 int64_t rows,
                                 int64_t most_rows);
AttentionForm attention_form_f32(const AppendAttentionParams& params,
                                 int64_t rows,
                                 int64_t most_rows);
AttentionForm attention_form_int8(const AppendAttentionParams& params,
                                  int64_t rows,
                                  int64_t most_rows);
AttentionForm attention_form_e4m3(const AppendAttentionParams& params,
                                  int64_t rows,
                                  int64_t most_rows);

}  // namespace specops
