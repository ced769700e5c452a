// SPDX-License-Identifier: Apache-2.0
// The forms in which append_attention on CUDA is compiled. Those of each element of the caches are in a
// file of their own (append_attention_<element>.cu), so that compilers work on them side by side.
#pragma once

#include "attention/append_attention/append_attention.h"

namespace specops {

struct AttentionLaunch;

// Blocks that an SM has for a kernel, at most: of two row tiles and fewer, and of more.
constexpr int kMostBlocksPerSm = 3, kBlocksOfHighTiles = 2;

// The kernel of a form, and its launch parameters.
struct AttentionForm {
  void (*kernel)(AttentionLaunch);
  int threads;  // of a block
  int rows;     // of a tile
  int blocks_per_sm;
  int shared_bytes;
  int total_bytes;  // on top, where totals have no workspace
};

// The form with the lowest tiles that hold `rows` packed rows, or the highest of at most `most_rows`.
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
