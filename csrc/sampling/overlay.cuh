// SPDX-License-Identifier: Apache-2.0
// A row's processors as an overlay on its logits in memory: two bits for every token, in shared
// memory, say which logits the tables change and which tokens are forbidden. A block builds it from
// the tables, and every read of a logit goes through it.
#pragma once

#include "common/device.cuh"
#include "sampling/logits_processors.h"

namespace specops {

constexpr int kRowSharedBytes = 41 << 10;  // where it begins: RowShared comes first

struct RowOverlay {
  RowProcessors processors;
};

constexpr int kOverlayBytes = (static_cast<int>(sizeof(RowOverlay)) + 15) / 16 * 16;

struct OverlayBits {
  uint32_t changed;    // by biases or penalties
  uint32_t forbidden;  // by the mask, a bad word, or the minimal length
};
static_assert(kOverlayBytes + kMaxProcessedVocab / 32 * int64_t{sizeof(OverlayBits)} <= 121 << 10,
              "the budget of tools/gates");

// Shared memory of a block whose row has that many leaves.
inline int64_t overlay_bytes(int64_t num_leaves, int64_t leaf_size) {
  return kOverlayBytes + num_leaves * leaf_size / 32 * static_cast<int64_t>(sizeof(OverlayBits));
}

__device__ inline RowOverlay& row_overlay() {
  return *reinterpret_cast<RowOverlay*>(shared_memory() + kRowSharedBytes);
}

// Word w is of tokens 32 w to 32 w + 31.
__device__ inline OverlayBits* overlay_bits() {
  return reinterpret_cast<OverlayBits*>(shared_memory() + kRowSharedBytes + kOverlayBytes);
}

__device__ inline bool is_mask_index(const LogitsProcessors& all, int64_t output_row) {
  if (all.mask_indices == nullptr) return true;
  int32_t index = all.mask_indices[output_row];
  return index >= -1 && index < all.num_masks;
}

// By a whole block. num_words: of the bits, up to the end of the row's last leaf. The other arguments
// are those of row_processors, in range but for the index of the mask; request -1
// has none of it.
__device__ inline void build_overlay(const LogitsProcessors& all,
                                     int64_t batch_idx,
                                     int64_t output_row,
                                     int32_t num_tokens,
                                     const DraftPath& path,
                                     int32_t vocab_size,
                                     int32_t num_words) {
  OverlayBits* bits = overlay_bits();
  const RowProcessors& row = row_overlay().processors;
  int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  if (thread == 0) {
    row_overlay().processors = {};
    if (batch_idx >= 0) {
      row_overlay().processors = row_processors(all, batch_idx, output_row, num_tokens, path);
    }
    if (!is_mask_index(all, output_row)) row_overlay().processors.mask = nullptr;
  }
  __syncthreads();
  int32_t mask_words = row.mask != nullptr ? (vocab_size + 31) / 32 : 0;
#pragma unroll 1
  for (int32_t word = thread; word < num_words; word += threads) {
    uint32_t allowed = word < mask_words ? static_cast<uint32_t>(row.mask[word]) : 0xffffffffu;
    bits[word] = {0u, ~allowed};
  }
  __syncthreads();
  auto mark = [&](uint32_t OverlayBits::* which, int32_t id) {
    if (id >= 0 && id < vocab_size) atomicOr(&(bits[id / 32].*which), 1u << id % 32);
  };
  auto mark_ascending = [&](const int32_t* ids, int32_t size) {
#pragma unroll 1
    for (int32_t i = thread; i < size && ids[i] >= 0; i += threads) {
      mark(&OverlayBits::changed, ids[i]);
    }
  };
  mark_ascending(row.counted_token_ids, row.max_counted);
  mark_ascending(row.bias_token_ids, row.max_biases);
  for_each_forbidden(row, thread, threads, [&](int32_t id) { mark(&OverlayBits::forbidden, id); });
  if (thread == 0 && row.penalizes) {
    for_each_in_flight(row, [&](int32_t id) { mark(&OverlayBits::changed, id); });
  }
  __syncthreads();
}

// The overlay of `count` tokens from `first` on, which lie in one word.
__device__ inline OverlayBits overlay_of(int32_t first, int count) {
  OverlayBits bits = overlay_bits()[first / 32];
  uint32_t mask = (1u << count) - 1;
  return {bits.changed >> first % 32 & mask, bits.forbidden >> first % 32 & mask};
}

// What becomes of a logit that the tables change, and that is not forbidden.
template <typename T>
__device__ inline T changed_logit(int32_t id, T x) {
  return from_float<T>(clean_logit(adjusted_logit(row_overlay().processors, id, to_float(x))));
}

}  // namespace specops
