// SPDX-License-Identifier: Apache-2.0
// append_attention: the last rows of each request attend causally to its paged KV cache.
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

// The reduction over KV: leaves at fixed absolute positions, folded left into chunks of leaves, and
// those into the result. Part of what an output bit means: changing either changes bits. CUDA has
// its own, in append_attention.cuh.
constexpr int64_t kAttentionLeaf = 64;
constexpr int64_t kAttentionChunk = 8 * kAttentionLeaf;
constexpr int64_t kAttentionTile = 64;  // rows of a tile: (query row, query head of one KV head)

// Where a block on CUDA spends its time, when asked to keep it.
enum class AttentionPhase {
  kPlan,    // who does what, from the lengths
  kItem,    // which work item is next, and the ends of the kernel
  kLoad,    // queries and page table, until the first tile of K is there
  kStream,  // tiles of K and V, and what is written of them
  kMerge,   // states of others, and waiting for memory that tells who is last
};
constexpr int kAttentionPhases = 5;

// Of each block: begin and end in ns by one clock for all blocks, cycles of its SM in each phase, and
// its clock at the end.
constexpr int64_t kAttentionStampWords = 3 + kAttentionPhases;

struct AppendAttentionParams {
  const void* q;        // [rows, num_qo_heads, head_dim], rows q_stride apart
  const void* k_cache;  // [num_pages, page_size, num_kv_heads, head_dim]
  const void* v_cache;  // as k_cache; k_cache itself where it holds latents
  // What multiplies the elements of a token's head in 8-bit caches: [num_pages, page_size,
  // num_kv_heads] each; nullptr for others.
  const float* k_scales;
  const float* v_scales;
  const int32_t* qo_indptr;   // [batch + 1]
  const int32_t* kv_indptr;   // [batch + 1], in pages
  const int32_t* kv_indices;  // [pages]
  const int32_t* kv_lens;     // [batch], this step's rows included
  // Of each query head, a score that no token has: it is in the sum that weights are divided by, and
  // -inf is none. [num_qo_heads]; may be nullptr.
  const float* sinks;
  // Which tokens each row sees among those from mask_starts[b] on, a bit each: [rows, mask_words];
  // what lies before is seen, what lies behind is not. Both may be nullptr; the starts are then the
  // positions of the requests' first rows.
  const int32_t* mask;
  const int32_t* mask_starts;  // [batch]
  int64_t mask_words;
  // Which requests share the first tokens of their pages: the first request of the group, and how
  // many tokens, [num_prefix_levels, batch] each, levels from the widest groups to the narrowest;
  // may be nullptr. Only a schedule: no bit of out or lse depends on them.
  const int32_t* prefix_leaders;
  const int32_t* prefix_lens;
  int64_t num_prefix_levels;
  void* out;               // [rows, num_qo_heads, value_dim_of(head_dim)], contiguous
  float* lse;              // [rows, num_qo_heads], natural log; may be nullptr
  float* workspace;        // partial states of split requests; may be nullptr. On CUDA its head
                           // counts arrivals: zero before and after
  int64_t workspace_size;  // floats; too few: less is split
  int64_t rows;
  int64_t batch;
  int64_t num_pages;    // of the caches
  int64_t num_indices;  // of kv_indices
  int64_t num_qo_heads;
  int64_t num_kv_heads;  // of latents: 1; on the CPU groups of query heads
  int64_t head_dim;      // 64, 96, 128 or 256; of latents: kLatentKeyDim
  int64_t page_size;     // 16, 32 or 64
  int64_t q_stride;
  int64_t sliding_window;  // a row sees this many positions, its own included; 0: all
  bool is_causal;          // else a row sees what comes after it as well
  float sm_scale;
  DType dtype;        // float32, bfloat16 or float16; of q and out
  DType cache_dtype;  // `dtype`, int8 or float8_e4m3fn
  ErrorFlag error;
  int64_t* stamps;         // CUDA: [stamped_blocks, kAttentionStampWords]; may be nullptr
  int64_t stamped_blocks;  // at least those of the grid
};

// From where on the mask decides what rows of a request see; the position is its first row's.
SPECOPS_HOST_DEVICE int64_t mask_begin(const AppendAttentionParams& params,
                                       int64_t batch_idx,
                                       int64_t position) {
  return params.mask_starts == nullptr ? position : params.mask_starts[batch_idx];
}

// Whether the mask lets a row see the token so many places behind its begin.
SPECOPS_HOST_DEVICE bool mask_allows(const AppendAttentionParams& params,
                                     int64_t row,
                                     int64_t place) {
  if (place < 0 || place >= 32 * params.mask_words) return place < 0;
  uint32_t word = params.mask[row * params.mask_words + place / 32];
  return word >> place % 32 & 1;
}

// Of a request's rows and lengths; an idle one may hold anything. CUDA leaves out rows that are not
// there (kAttentionQoIndptr) and makes zeros of those whose KV is not.
SPECOPS_HOST_DEVICE Fault fault_of(const AppendAttentionParams& params, int64_t batch_idx) {
  int32_t first_row = params.qo_indptr[batch_idx], end_row = params.qo_indptr[batch_idx + 1];
  int32_t first_page = params.kv_indptr[batch_idx], end_page = params.kv_indptr[batch_idx + 1];
  int32_t kv_len = params.kv_lens[batch_idx];
  if (first_row == end_row) return {};
  ErrorCode code = ErrorCode::kAttentionQoIndptr;
  Fault fault = fault_of_range(code, first_row, end_row, batch_idx, params.rows);
  if (fault.found()) return fault;
  code = ErrorCode::kAttentionKvIndptr;
  fault = fault_of_range(code, first_page, end_page, batch_idx, params.num_indices);
  if (fault.found()) return fault;
  code = ErrorCode::kAttentionKvLens;
  int64_t slots = int64_t{end_page - first_page} * params.page_size;
  return fault_of_kv_len(code, kv_len, batch_idx, end_row - first_row, slots);
}

// Of the page that stands at a place of kv_indices, where a row sees it.
SPECOPS_HOST_DEVICE Fault fault_of_page(const AppendAttentionParams& params,
                                        int64_t place,
                                        int32_t page) {
  if (is_page_of(params.num_pages, page)) return {};
  return fault_at(ErrorCode::kAttentionPage, page, place).with(params.num_pages);
}

// By the dtype of q, so that an instruction set has variants of only those that it speeds up.
SPECOPS_DECLARE_CPU(append_attention_bf16_cpu, AppendAttentionParams);
SPECOPS_DECLARE_CPU(append_attention_f16_cpu, AppendAttentionParams);
SPECOPS_DECLARE_CPU(append_attention_f32_cpu, AppendAttentionParams);
SPECOPS_DECLARE_CUDA(append_attention_cuda, AppendAttentionParams);

// The stamped kernel has one form.
inline bool has_stamped_kernel(const AppendAttentionParams& params) {
  return params.cache_dtype == DType::kBFloat16 && params.head_dim == 128;
}

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
