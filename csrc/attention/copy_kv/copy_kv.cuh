// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "attention/copy_kv/copy_kv.h"
#include "common/device.cuh"

namespace specops {

constexpr int kCopyKvThreads = 128;

// Computes cache[to_slots[i]] = cache[from_slots[i]], in both caches.
// Grid:    x = copies * caches * pieces of a slot (unbounded).
// Block:   128 threads; a thread copies one word (16 bytes).
// Cost:    2 * slot_bytes moved per cache and copy; latency-bound, because copies are few.
// Assumes: slots are whole words; a destination is neither a source nor another copy's destination.
// Order:   copies only. An invalid copy is skipped.
template <typename Word>
__global__ void __launch_bounds__(kCopyKvThreads) copy_kv_kernel(CopyKvParams params) {
  wait_for_previous_kernel();
  auto slot_words = static_cast<uint32_t>(params.slot_bytes / sizeof(Word));
  uint32_t pieces = (slot_words + kCopyKvThreads - 1) / kCopyKvThreads;
  uint32_t parts = num_caches(params) * pieces;
  uint32_t copy_idx = blockIdx.x / parts, part = blockIdx.x % parts;
  int64_t to = params.to_slots[copy_idx];
  if (to == -1) return;
  ErrorCode code = find_fault(params, copy_idx).code;
  if (code != ErrorCode::kNone) {
    if (part == 0 && threadIdx.x == 0) report_error(params.error, code);
    return;
  }
  auto* cache = static_cast<Word*>(part < pieces ? params.k_cache : params.v_cache);
  uint32_t word = (part < pieces ? part : part - pieces) * kCopyKvThreads + threadIdx.x;
  if (word >= slot_words) return;
  cache[to * slot_words + word] = cache[params.from_slots[copy_idx] * slot_words + word];
}

}  // namespace specops
