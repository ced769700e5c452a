// SPDX-License-Identifier: Apache-2.0
// Word size for copying whole slots of a cache.
#pragma once

#include "common/device.cuh"

namespace specops {

// Calls fn with the largest word type whose size divides every slot: 16 bytes, or less if head_dim
// is odd or the caches are views into other tensors. A missing cache is nullptr.
template <typename Params, typename Fn>
void with_slot_words(const Params& params, Fn&& fn) {
  uint64_t together = reinterpret_cast<uintptr_t>(params.k_cache) |
                      reinterpret_cast<uintptr_t>(params.v_cache) |
                      static_cast<uint64_t>(params.slot_bytes);
  if (together % sizeof(uint4) == 0) return fn(uint4{});
  if (together % sizeof(uint16_t) == 0) return fn(uint16_t{});
  fn(uint8_t{});
}

}  // namespace specops
