// SPDX-License-Identifier: Apache-2.0
// compact_kv: the keys and values of an accepted path, moved to where a chain would have put them.
#pragma once

#include <cstdint>

#include "common/error_flag.h"
#include "common/isa.h"

namespace specops {

struct CompactKvParams {
  void* k_cache;                       // [num_pages, page_size, num_kv_heads, head_dim]
  void* v_cache;                       // as k_cache
  const int32_t* accepted_nodes;       // [batch, nodes], ascending, then -1
  const int32_t* num_accepted_tokens;  // [batch], valid entries of accepted_nodes
  const int32_t* qo_indptr;            // [batch + 1], rows of each request: its root and nodes
  const int32_t* kv_lens;              // [batch], including these rows
  const int32_t* kv_indptr;            // [batch + 1], in pages
  const int32_t* kv_indices;           // [num_indices], page ids
  int64_t batch;
  int64_t nodes;
  int64_t num_indices;
  int64_t num_pages;
  int64_t page_size;
  int64_t slot_bytes;  // of one token in one cache
  ErrorFlag error;
};

SPECOPS_DECLARE_CPU(compact_kv_cpu, CompactKvParams);
SPECOPS_DECLARE_CUDA(compact_kv_cuda, CompactKvParams);

}  // namespace specops
