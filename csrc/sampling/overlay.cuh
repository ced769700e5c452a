// SPDX-License-Identifier: Apache-2.0
// A row's processors as an overlay on its logits in memory: two bits for every token, in shared
// memory, say which logits the tables change and which tokens are forbidden. A block builds it from
// the tables, and every read of a logit goes through it.
#pragma once

#include "common/device.cuh"
#include "sampling/logits_processors.h"
#include "sampling/value_rule.h"

namespace specops {

constexpr int kRowSharedBytes = 41 << 10;  // where it begins: RowShared comes first

struct RowOverlay {
  RowProcessors processors;
  int32_t num_words;  // of the bits
};

constexpr int kOverlayBytes = (static_cast<int>(sizeof(RowOverlay)) + 15) / 16 * 16;

struct OverlayBits {
  uint32_t changed;    // by biases or penalties
  uint32_t forbidden;  // by the mask, a bad word, or the minimal length
};

// An ascending table is found in by where each stretch of so many tokens begins in it: a search then
// waits for memory a few times, and not for the logarithm of a long history.
constexpr int kStretchTokens = 512;
constexpr int kStretchWords = kStretchTokens / 32;
// A row's last leaf has its bits whole: one of bf16 is the longer.
constexpr int kOverlayTokens = 1024;

// Shared memory of a block whose row ends with the leaf before token `end`.
constexpr int64_t overlay_bytes(int64_t end) {
  return kOverlayBytes + end / 32 * static_cast<int64_t>(sizeof(OverlayBits)) +
         2 * (end / kStretchTokens + 1) * static_cast<int64_t>(sizeof(int32_t));
}
static_assert(overlay_bytes(kMaxProcessedVocab) <= 121 << 10, "the budget of tools/gates");

// The widest row under processors on a device whose blocks have so much shared memory.
constexpr int64_t max_processed_vocab(int64_t shared_bytes) {
  int64_t vocab = kMaxProcessedVocab;
  while (vocab > 0 && kRowSharedBytes + overlay_bytes(vocab) > shared_bytes) {
    vocab -= kStretchTokens;
  }
  return vocab / kOverlayTokens * kOverlayTokens;
}
static_assert(max_processed_vocab(163 << 10) == kMaxProcessedVocab);
static_assert(max_processed_vocab(99 << 10) >= 220'000, "what the docs say");

__device__ inline RowOverlay& row_overlay() {
  return *reinterpret_cast<RowOverlay*>(shared_memory() + kRowSharedBytes);
}

// Word w is of tokens 32 w to 32 w + 31.
__device__ inline OverlayBits* overlay_bits() {
  return reinterpret_cast<OverlayBits*>(shared_memory() + kRowSharedBytes + kOverlayBytes);
}

// Where a table's entries of each stretch begin, and at last their number; then the same of another.
__device__ inline int32_t* stretch_begins() {
  return reinterpret_cast<int32_t*>(overlay_bits() + row_overlay().num_words);
}

__device__ inline int32_t num_stretches() { return row_overlay().num_words / kStretchWords; }

// find_sorted of an ascending table whose stretches begin there; of any other it stays inside, too.
__device__ inline int32_t find_in_stretch(const int32_t* begins,
                                          const int32_t* ids,
                                          int32_t size,
                                          int32_t id) {
  int32_t end = min(max(begins[id / kStretchTokens + 1], 0), size);
  int32_t begin = min(max(begins[id / kStretchTokens], 0), end);
  int32_t at = find_sorted(ids + begin, end - begin, id);
  return at < 0 ? at : begin + at;
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
    row_overlay().num_words = num_words;
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
  // Marks the tokens of a table, and says where each stretch begins. Past its end, which is at -1, all
  // begin with the end.
  auto mark_ascending = [&](const int32_t* ids, int32_t size, int32_t* begins) {
    auto stretch_of = [&](int32_t i) {
      bool inside = i < size && ids[i] >= 0 && ids[i] < vocab_size;
      return inside ? ids[i] / kStretchTokens : num_words / kStretchWords;
    };
#pragma unroll 1
    for (int32_t i = thread; i <= size; i += threads) {
      int32_t stretch = stretch_of(i);
      int32_t before = i > 0 ? stretch_of(i - 1) : -1;
      if (i < size) mark(&OverlayBits::changed, ids[i]);
      for (int32_t j = before + 1; j <= stretch; ++j) begins[j] = i;
      if (stretch == num_words / kStretchWords) break;
    }
  };
  int32_t* begins = stretch_begins();
  mark_ascending(row.counted_token_ids, row.max_counted, begins);
  mark_ascending(row.bias_token_ids, row.max_biases, begins + num_stretches() + 1);
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
  const RowProcessors& row = row_overlay().processors;
  auto find = [&](const int32_t* ids, int32_t size, int32_t token_id) {
    int32_t* begins = stretch_begins();
    if (ids != row.counted_token_ids) begins += num_stretches() + 1;
    return find_in_stretch(begins, ids, size, token_id);
  };
  return from_float<T>(clean_logit(adjusted_logit(row, id, to_float(x), find)));
}

}  // namespace specops
