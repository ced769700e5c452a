// SPDX-License-Identifier: Apache-2.0
// compact_kv: move the keys and values of an accepted path to the slots that a chain would use.
#pragma once

#include <cstdint>

#include "common/error_flag.h"
#include "common/host_device.h"
#include "common/index_rule.h"
#include "common/isa.h"

namespace specops {

struct CompactKvParams {
  void* k_cache;                       // [num_pages, page_size, num_kv_heads, head_dim]
  void* v_cache;                       // same shape as k_cache; nullptr if there is none
  const int32_t* accepted_nodes;       // [batch, nodes], ascending, then -1
  const int32_t* num_accepted_tokens;  // [batch], valid entries of accepted_nodes
  const int32_t* qo_indptr;            // [batch + 1], rows of each request: its root and nodes
  const int32_t* kv_lens;              // [batch], including the rows of this step
  const int32_t* kv_indptr;            // [batch + 1], offsets into kv_indices
  const int32_t* kv_indices;           // [num_indices], page ids
  int64_t batch;
  int64_t nodes;
  int64_t num_indices;
  int64_t num_pages;
  int64_t page_size;
  int64_t slot_bytes;  // bytes of one token in one cache
  ErrorFlag error;
};

SPECOPS_HOST_DEVICE int num_caches(const CompactKvParams& params) {
  return params.v_cache == nullptr ? 1 : 2;
}

SPECOPS_HOST_DEVICE int64_t num_rows(const CompactKvParams& params, int64_t batch_idx) {
  return int64_t{params.qo_indptr[batch_idx + 1]} - params.qo_indptr[batch_idx];
}

SPECOPS_FAULT(2007, kCompactKvNumAcceptedTokens) =
    "compact_kv: num_accepted_tokens must be at least 0, below the request's rows{=#} and at most "
    "the width of accepted_nodes{=#}";
SPECOPS_FAULT(2008, kCompactKvKvIndptr) =
    "compact_kv: kv_indptr must be non-decreasing from 0, at least the entry before it{ = #} and "
    "at most the size of kv_indices{=#}";
SPECOPS_FAULT(2009, kCompactKvKvLens) =
    "compact_kv: kv_lens must be at least the request's rows{=#} and at most the slots of its "
    "pages{=#}";
SPECOPS_FAULT(2010, kCompactKvAcceptedNodes) =
    "compact_kv: accepted_nodes must be ascending in [0, rows - 1){, here in [#}{, #)}";
SPECOPS_FAULT(2011, kCompactKvPage) =
    "compact_kv: kv_indices must be in [0, num_pages{=#}) where a token moves";

// Returns the first fault in a request's counts and lengths. An idle request may hold any values.
// is_next_node checks the nodes of its path and is_page_of the pages of its moves.
SPECOPS_HOST_DEVICE Fault find_fault(const CompactKvParams& params, int64_t batch_idx) {
  int32_t count = params.num_accepted_tokens[batch_idx];
  int64_t rows = num_rows(params, batch_idx);
  int32_t kv_len = params.kv_lens[batch_idx];
  int32_t first_page = params.kv_indptr[batch_idx], end_page = params.kv_indptr[batch_idx + 1];
  if (count == 0) return {};
  if (count < 0 || count > params.nodes || count >= rows) {
    return fault_at(kCompactKvNumAcceptedTokens, count, batch_idx).with(rows, params.nodes);
  }
  Fault fault =
      find_range_fault(kCompactKvKvIndptr, first_page, end_page, batch_idx, params.num_indices);
  if (fault.found()) return fault;
  int64_t slots = int64_t{end_page - first_page} * params.page_size;
  return find_kv_len_fault(kCompactKvKvLens, kv_len, batch_idx, rows, slots);
}

// Returns whether `node` may follow `before` on a path; `before` is -1 for the first node.
SPECOPS_HOST_DEVICE bool is_next_node(int32_t before, int32_t node, int64_t num_nodes) {
  return node > before && node < num_nodes;
}

SPECOPS_HOST_DEVICE Fault find_node_fault(const CompactKvParams& params,
                                          int64_t batch_idx,
                                          int64_t i) {
  const int32_t* path = params.accepted_nodes + batch_idx * params.nodes;
  int32_t before = i == 0 ? -1 : path[i - 1];
  int64_t num_nodes = num_rows(params, batch_idx) - 1;
  if (is_next_node(before, path[i], num_nodes)) return {};
  return fault_at(kCompactKvAcceptedNodes, path[i], batch_idx, i)
      .with(int64_t{before} + 1, num_nodes);
}

// Returns the fault of the page id at kv_indices[place], which a move reads or writes.
SPECOPS_HOST_DEVICE Fault find_page_fault(const CompactKvParams& params, int64_t place) {
  int32_t page = params.kv_indices[place];
  if (is_page_of(params.num_pages, page)) return {};
  return fault_at(kCompactKvPage, page, place).with(params.num_pages);
}

SPECOPS_DECLARE_CPU(compact_kv_cpu, CompactKvParams);
SPECOPS_DECLARE_CUDA(compact_kv_cuda, CompactKvParams);

}  // namespace specops
