// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "attention/compact_kv/compact_kv.h"
#include "common/device.cuh"

namespace specops {

constexpr int kCompactKvThreads = 128;
constexpr int kCompactKvTile = 128;  // moves per tile, staged in shared memory
constexpr int kCompactKvAhead = 4;   // loads in flight per thread

struct CompactKvMoves {
  int64_t source[kCompactKvTile];  // slots of the caches
  int64_t destination[kCompactKvTile];
};

// The values of one request that its moves depend on.
struct CompactKvRequest {
  int32_t count;        // moves; 0 if the request is idle or invalid
  int32_t num_nodes;    // nodes in the tree
  int64_t first;        // token index of node 0
  const int32_t* path;  // node of each accepted token
  const int32_t* pages;
  ErrorCode fault;

  __device__ CompactKvRequest(const CompactKvParams& params, int64_t batch_idx)
      : count(params.num_accepted_tokens[batch_idx]),
        path(params.accepted_nodes + batch_idx * params.nodes),
        pages(params.kv_indices + params.kv_indptr[batch_idx]),
        fault(find_fault(params, batch_idx).code) {
    int64_t rows = num_rows(params, batch_idx);
    first = params.kv_lens[batch_idx] - rows + 1;
    num_nodes = static_cast<int32_t>(rows) - 1;
    if (fault != ErrorCode::kNone) count = 0;
  }

  __device__ int32_t page_of(const CompactKvParams& params, int64_t token) const {
    return pages[static_cast<uint32_t>(token) / static_cast<uint32_t>(params.page_size)];
  }

  __device__ int64_t slot_of(const CompactKvParams& params, int64_t token) const {
    uint32_t offset = static_cast<uint32_t>(token) % static_cast<uint32_t>(params.page_size);
    return page_of(params, token) * params.page_size + offset;
  }
};

// Computes cache[base + 1 + i] = cache[base + 1 + accepted_nodes[i]], with base = kv_lens - rows.
// Grid:    x = requests * caches * pieces of a slot (unbounded).
// Block:   128 threads; a thread owns one word (16 bytes) of a slot and does all its moves in
//          order.
// Smem:    sizeof(CompactKvMoves), 2 KB.
// Cost:    2 * slot_bytes moved per cache and token that is not in place; every block reads the
//          path. Bound by latency for a few requests, by memory for many.
// Assumes: slots are whole words; no destination page belongs to another request.
// Order:   copies only. A path ascends, so its node i is at least i: no source lies at or before an
//          earlier destination, and loads may run ahead of stores. An invalid request moves
//          nothing.
// Source:  the cache update of Miao et al. 2023 (SpecInfer).
template <typename Word>
__global__ void __launch_bounds__(kCompactKvThreads) compact_kv_kernel(CompactKvParams params) {
  wait_for_previous_kernel();
  auto& moves = *reinterpret_cast<CompactKvMoves*>(shared_memory());
  int thread = static_cast<int>(threadIdx.x);
  auto slot_words = static_cast<uint32_t>(params.slot_bytes / sizeof(Word));
  uint32_t pieces = (slot_words + kCompactKvThreads - 1) / kCompactKvThreads;
  uint32_t parts = num_caches(params) * pieces;
  uint32_t batch_idx = blockIdx.x / parts, part = blockIdx.x % parts;
  CompactKvRequest request(params, batch_idx);
  bool reports = part == 0;
  if (request.fault != ErrorCode::kNone && reports && thread == 0) {
    report_error(params.error, request.fault);
  }
  if (request.count == 0) return;

  // Validate the whole path before anything is moved.
  int wrong = 0;
  for (int i = thread; i < request.count; i += kCompactKvThreads) {
    int32_t node = request.path[i], before = i == 0 ? -1 : request.path[i - 1];
    wrong |= !is_next_node(before, node, request.num_nodes);
  }
  if (__syncthreads_or(wrong)) {
    if (reports && thread == 0) report_error(params.error, kCompactKvAcceptedNodes);
    return;
  }
  for (int i = thread; i < request.count; i += kCompactKvThreads) {
    if (request.path[i] == i) continue;
    int32_t from = request.page_of(params, request.first + request.path[i]);
    int32_t to = request.page_of(params, request.first + i);
    wrong |= !is_page_of(params.num_pages, from) || !is_page_of(params.num_pages, to);
  }
  if (__syncthreads_or(wrong)) {
    if (reports && thread == 0) report_error(params.error, kCompactKvPage);
    return;
  }

  auto* cache = static_cast<Word*>(part < pieces ? params.k_cache : params.v_cache);
  uint32_t word = (part < pieces ? part : part - pieces) * kCompactKvThreads + threadIdx.x;
  for (int begin = 0; begin < request.count; begin += kCompactKvTile) {
    int number = min(request.count - begin, kCompactKvTile);
    for (int i = thread; i < number; i += kCompactKvThreads) {
      int32_t node = request.path[begin + i];
      bool in_place = node == begin + i;
      moves.source[i] = in_place ? -1 : request.slot_of(params, request.first + node);
      moves.destination[i] = in_place ? -1 : request.slot_of(params, request.first + begin + i);
    }
    __syncthreads();
    for (int i = 0; i < number && word < slot_words; i += kCompactKvAhead) {
      Word words[kCompactKvAhead] = {};
#pragma unroll
      for (int j = 0; j < kCompactKvAhead; ++j) {
        if (i + j >= number || moves.source[i + j] < 0) continue;
        words[j] = cache[moves.source[i + j] * slot_words + word];
      }
#pragma unroll
      for (int j = 0; j < kCompactKvAhead; ++j) {
        if (i + j >= number || moves.source[i + j] < 0) continue;
        cache[moves.destination[i + j] * slot_words + word] = words[j];
      }
    }
    __syncthreads();  // all threads have used this tile; the next one overwrites it
  }
}

}  // namespace specops
