// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "attention/copy_kv/copy_kv.h"
#include "common/parallel.h"

namespace specops::SPECOPS_ISA {

// Computes cache[to_slots[i]] = cache[from_slots[i]], in both caches.
// Cost:    2 * slot_bytes moved per cache and copy; memory-bound.
// Assumes: ops.cpp checked the slots; a destination is neither a source nor another copy's
//          destination.
// Order:   copies only.
// Threads: one item per copy and cache.
void copy_kv_cpu(const CopyKvParams& params) {
  constexpr int64_t kGrain = 16;  // copies per thread; they take about 2 us
  auto slot_bytes = static_cast<size_t>(params.slot_bytes);
  int caches = num_caches(params);
  parallel_for(caches * params.copies, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      int64_t from = params.from_slots[item / caches], to = params.to_slots[item / caches];
      if (to < 0) continue;
      char* cache = static_cast<char*>(item % caches == 0 ? params.k_cache : params.v_cache);
      std::memcpy(cache + to * params.slot_bytes, cache + from * params.slot_bytes, slot_bytes);
    }
  });
}

}  // namespace specops::SPECOPS_ISA
