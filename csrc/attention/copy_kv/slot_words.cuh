// SPDX-License-Identifier: Apache-2.0
// In which words whole slots of a cache are copied.
#pragma once

#include "common/device.cuh"

namespace specops {

// Calls fn with a word that slots are made of: 16 bytes, or fewer where head_dim is odd or the
// caches are views into other tensors. A cache that is not there is nullptr.
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
