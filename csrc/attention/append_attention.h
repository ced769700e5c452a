// SPDX-License-Identifier: Apache-2.0
// append_attention: the last rows of each request attend causally to its paged KV cache.
#pragma once

#include <cstdint>

#include "common/cuda_stream.h"
#include "common/dtype.h"
#include "common/error_flag.h"
#include "common/isa.h"

namespace specops {

// The reduction over KV: leaves at fixed absolute positions, folded left into chunks of leaves, and
// those into the result. Part of what an output bit means: changing either changes bits. CUDA has
// its own, in append_attention.cuh.
constexpr int64_t kAttentionLeaf = 64;
constexpr int64_t kAttentionChunk = 8 * kAttentionLeaf;
constexpr int64_t kAttentionTile = 64;  // rows of a tile: (query row, query head of one KV head)

struct AppendAttentionParams {
  const void* q;              // [rows, num_qo_heads, head_dim], rows q_stride apart
  const void* k_cache;        // [num_pages, page_size, num_kv_heads, head_dim]
  const void* v_cache;        // as k_cache
  const int32_t* qo_indptr;   // [batch + 1]
  const int32_t* kv_indptr;   // [batch + 1], in pages
  const int32_t* kv_indices;  // [pages]
  const int32_t* kv_lens;     // [batch], this step's rows included
  // Which requests share the first tokens of their pages: the first request of the group, and how
  // many tokens, [num_prefix_levels, batch] each, levels from the widest groups to the narrowest;
  // may be nullptr. Only a schedule: no bit of out or lse depends on them.
  const int32_t* prefix_leaders;
  const int32_t* prefix_lens;
  int64_t num_prefix_levels;
  void* out;               // [rows, num_qo_heads, head_dim], contiguous
  float* lse;              // [rows, num_qo_heads], natural log; may be nullptr
  float* workspace;        // partial states of split requests; may be nullptr. On CUDA its head
                           // counts arrivals: zero before and after
  int64_t workspace_size;  // floats; too few: less is split
  int64_t rows;
  int64_t batch;
  int64_t num_pages;    // of the caches
  int64_t num_indices;  // of kv_indices
  int64_t num_qo_heads;
  int64_t num_kv_heads;
  int64_t head_dim;   // 64, 96, 128 or 256
  int64_t page_size;  // 16, 32 or 64
  int64_t q_stride;
  int64_t sliding_window;  // a row sees this many positions, its own included; 0: all
  float sm_scale;
  DType dtype;  // float32, bfloat16 or float16; of q, caches and out
  ErrorFlag error;
};

SPECOPS_DECLARE_CPU(append_attention_cpu, AppendAttentionParams);
SPECOPS_DECLARE_CUDA(append_attention_cuda, AppendAttentionParams);

// How much workspace lets append_attention split as it likes, for calls of no larger shapes.
struct AttentionWorkspaceParams {
  int64_t rows;
  int64_t batch;
  int64_t num_qo_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t tokens;   // that the pages of the batch hold
  int64_t* floats;  // out
  int64_t* zeros;   // out: so many of them, the first, must be zero when first used
};

SPECOPS_DECLARE_CUDA(attention_workspace_size_cuda, AttentionWorkspaceParams);

}  // namespace specops
