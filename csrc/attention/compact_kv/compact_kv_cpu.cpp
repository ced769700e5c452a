// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "attention/compact_kv/compact_kv.h"
#include "common/parallel.h"

namespace specops::SPECOPS_ISA {

// Computes cache[base + 1 + i] = cache[base + 1 + accepted_nodes[i]], with base = kv_lens - rows.
// Cost:    2 * slot_bytes moved per cache and token that is not in place; memory-bound.
// Assumes: ops.cpp checked lengths, nodes and pages; no destination page belongs to another
//          request.
// Order:   copies only, in ascending order: no source lies at or before an earlier destination.
// Source:  the cache update of Miao et al. 2023 (SpecInfer).
// Threads: one item per request and cache.
void compact_kv_cpu(const CompactKvParams& params) {
  auto slot_bytes = static_cast<size_t>(params.slot_bytes);
  int caches = num_caches(params);
  parallel_for(caches * params.batch, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      int64_t batch_idx = item / caches;
      char* cache = static_cast<char*>(item % caches == 0 ? params.k_cache : params.v_cache);
      const int32_t* nodes = params.accepted_nodes + batch_idx * params.nodes;
      const int32_t* pages = params.kv_indices + params.kv_indptr[batch_idx];
      int64_t first = params.kv_lens[batch_idx] - num_rows(params, batch_idx) + 1;
      auto place = [&](int64_t token) {
        int64_t slot = pages[token / params.page_size] * params.page_size;
        return cache + (slot + token % params.page_size) * params.slot_bytes;
      };
      for (int32_t i = 0; i < params.num_accepted_tokens[batch_idx]; ++i) {
        if (nodes[i] != i) std::memcpy(place(first + i), place(first + nodes[i]), slot_bytes);
      }
    }
  });
}

}  // namespace specops::SPECOPS_ISA
