// SPDX-License-Identifier: Apache-2.0
// append_attention: causal attention of each request's last rows over its paged KV cache.
#pragma once

#include <cstdint>

#include "attention/latent.h"
#include "common/cuda_stream.h"
#include "common/dtype.h"
#include "common/error_flag.h"
#include "common/host_device.h"
#include "common/index_rule.h"
#include "common/isa.h"

namespace specops {

// Reduction over KV: leaves at fixed absolute positions are folded left into chunks of leaves, and
// the chunks into the result. Both sizes define the output bits: changing either changes bits. CUDA
// has its own sizes, in append_attention.cuh.
constexpr int64_t kAttentionLeaf = 64;
constexpr int64_t kAttentionChunk = 8 * kAttentionLeaf;
constexpr int64_t kAttentionTile = 64;  // rows of a tile: (query row, query head of one KV head)

// Phases of a CUDA block, for the optional time stamps.
enum class AttentionPhase {
  kPlan,    // divide the work, from the lengths
  kItem,    // find the next work item; also the end of the kernel
  kLoad,    // load queries and page table, until the first tile of K has arrived
  kStream,  // process tiles of K and V, and write the results
  kMerge,   // fold states of other blocks, and wait for the atomic that tells which block is last
};
constexpr int kAttentionPhases = 5;

// Words per block: begin and end in ns on a clock common to all blocks, SM cycles of each phase,
// and the SM's clock at the end.
constexpr int64_t kAttentionStampWords = 3 + kAttentionPhases;

struct AppendAttentionParams {
  const void* q;        // [rows, num_qo_heads, head_dim], rows q_stride apart
  const void* k_cache;  // [num_pages, page_size, num_kv_heads, head_dim]
  const void* v_cache;  // same shape as k_cache; k_cache itself if it holds latents
  // Scales of 8-bit caches, one per (token, head): [num_pages, page_size, num_kv_heads] each;
  // nullptr for other caches.
  const float* k_scales;
  const float* v_scales;
  const int32_t* qo_indptr;   // [batch + 1]
  const int32_t* kv_indptr;   // [batch + 1], offsets into kv_indices
  const int32_t* kv_indices;  // [pages]
  const int32_t* kv_lens;     // [batch], including the rows of this step
  // Attention sink per query head: an extra logit in the softmax denominator; -inf disables it.
  // [num_qo_heads]; may be nullptr.
  const float* sinks;
  // Visibility of tokens from mask_starts[b] on, one bit per token: [rows, mask_words]. Rows see
  // all tokens before the mask and none after it. Both may be nullptr; the mask then starts at the
  // position of the request's first row.
  const int32_t* mask;
  const int32_t* mask_starts;  // [batch]
  int64_t mask_words;
  // Requests that share the first tokens of their pages: first request of the group, and number of
  // shared tokens. [num_prefix_levels, batch] each, levels from the widest groups to the narrowest;
  // may be nullptr. They affect only the schedule: no bit of out or lse depends on them.
  const int32_t* prefix_leaders;
  const int32_t* prefix_lens;
  int64_t num_prefix_levels;
  void* out;               // [rows, num_qo_heads, value_dim_of(head_dim)], contiguous
  float* lse;              // [rows, num_qo_heads], natural log; may be nullptr
  float* workspace;        // partial states of split requests; may be nullptr. On CUDA its head
                           // counts arrivals, and is zero before and after each call
  int64_t workspace_size;  // in floats; if it is too small, less is split
  int64_t rows;
  int64_t batch;
  int64_t num_pages;    // pages in each cache
  int64_t num_indices;  // length of kv_indices
  int64_t num_qo_heads;
  int64_t num_kv_heads;  // latents: 1; on the CPU, groups of query heads
  int64_t head_dim;      // 64, 96, 128, 256 or 512; latents: kLatentKeyDim
  int64_t page_size;     // 16, 32 or 64
  int64_t q_stride;
  int64_t sliding_window;  // positions a row sees, including its own; 0: all
  bool is_causal;          // if false, a row also sees later tokens
  float sm_scale;
  DType dtype;        // dtype of q and out: float32, bfloat16 or float16
  DType cache_dtype;  // `dtype`, int8 or float8_e4m3fn
  ErrorFlag error;
  int64_t* stamps;         // CUDA: [stamped_blocks, kAttentionStampWords]; may be nullptr
  int64_t stamped_blocks;  // at least the blocks of the grid
};

// Returns the first KV position that the mask governs; `position` is that of the request's first
// row.
SPECOPS_HOST_DEVICE int64_t mask_begin(const AppendAttentionParams& params,
                                       int64_t batch_idx,
                                       int64_t position) {
  return params.mask_starts == nullptr ? position : params.mask_starts[batch_idx];
}

// Returns whether the mask lets a row see the token `place` positions after mask_begin.
SPECOPS_HOST_DEVICE bool mask_allows(const AppendAttentionParams& params,
                                     int64_t row,
                                     int64_t place) {
  if (place < 0 || place >= 32 * params.mask_words) return place < 0;
  uint32_t word = params.mask[row * params.mask_words + place / 32];
  return word >> place % 32 & 1;
}

SPECOPS_FAULT(2003, kAttentionQoIndptr) =
    "append_attention: batch.qo_indptr must be non-decreasing from 0, at least the entry before "
    "it{ = #} and at most the rows of q{ = #}";
SPECOPS_FAULT(2004, kAttentionKvIndptr) =
    "append_attention: batch.kv_indptr must be non-decreasing from 0, at least the entry before "
    "it{ = #} and at most the size of batch.kv_indices{ = #}";
SPECOPS_FAULT(2005, kAttentionKvLens) =
    "append_attention: batch.kv_lens must be at least the request's rows{=#} and at most the slots "
    "of its pages{=#}";
SPECOPS_FAULT(2006, kAttentionPage) =
    "append_attention: batch.kv_indices must be in [0, num_pages{=#}) where a row sees the page";
SPECOPS_FAULT(2012, kAttentionWorkspace) =
    "append_attention: workspace must begin with zeros, which every call leaves there, and serve "
    "one stream at a time, got a counter with too many arrivals";

// Returns the first fault in a request's rows and lengths. An idle request may hold any values.
// CUDA skips rows that do not exist (kAttentionQoIndptr) and writes zeros for rows whose KV is
// invalid.
SPECOPS_HOST_DEVICE Fault find_fault(const AppendAttentionParams& params, int64_t batch_idx) {
  int32_t first_row = params.qo_indptr[batch_idx], end_row = params.qo_indptr[batch_idx + 1];
  int32_t first_page = params.kv_indptr[batch_idx], end_page = params.kv_indptr[batch_idx + 1];
  int32_t kv_len = params.kv_lens[batch_idx];
  if (first_row == end_row) return {};
  Fault fault = find_range_fault(kAttentionQoIndptr, first_row, end_row, batch_idx, params.rows);
  if (fault.found()) return fault;
  fault = find_range_fault(kAttentionKvIndptr, first_page, end_page, batch_idx, params.num_indices);
  if (fault.found()) return fault;
  int64_t slots = int64_t{end_page - first_page} * params.page_size;
  return find_kv_len_fault(kAttentionKvLens, kv_len, batch_idx, end_row - first_row, slots);
}

// Returns the fault of the page id at kv_indices[place], for a page that a row sees.
SPECOPS_HOST_DEVICE Fault find_page_fault(const AppendAttentionParams& params,
                                          int64_t place,
                                          int32_t page) {
  if (is_page_of(params.num_pages, page)) return {};
  return fault_at(kAttentionPage, page, place).with(params.num_pages);
}

// One function per dtype of q, so that an instruction set only compiles the dtypes it speeds up.
SPECOPS_DECLARE_CPU(append_attention_bf16_cpu, AppendAttentionParams);
SPECOPS_DECLARE_CPU(append_attention_f16_cpu, AppendAttentionParams);
SPECOPS_DECLARE_CPU(append_attention_f32_cpu, AppendAttentionParams);
SPECOPS_DECLARE_CUDA(append_attention_cuda, AppendAttentionParams);

// The stamped kernel is compiled for one form only.
inline bool has_stamped_kernel(const AppendAttentionParams& params) {
  return params.cache_dtype == DType::kBFloat16 && params.head_dim == 128;
}

// Shape limits and outputs for the workspace size that never limits how append_attention splits.
struct AttentionWorkspaceParams {
  int64_t rows;
  int64_t batch;
  int64_t num_qo_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t tokens;   // capacity in tokens of the batch's pages
  int64_t* floats;  // out
  int64_t* zeros;   // out: number of leading floats that must be zero on first use
};

SPECOPS_DECLARE_CUDA(attention_workspace_size_cuda, AttentionWorkspaceParams);

}  // namespace specops
