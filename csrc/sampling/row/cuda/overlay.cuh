// SPDX-License-Identifier: Apache-2.0
// Logits processors of a row, as an overlay over its logits in memory. For each token, two bits say
// whether the processors' tables change its logit and whether the token is forbidden. A block
// builds these bits from the tables, and every read of a logit applies them. The bits are in shared
// memory. If a row is too wide for that, they are in the workspace, and each block that shares the
// row writes a part of them.
#pragma once

#include "common/device.cuh"
#include "sampling/row/logits_processors.h"
#include "sampling/row/value_rule.h"

namespace specops {

constexpr int kRowSharedBytes = 41 << 10;  // offset of the overlay, which follows RowShared

struct __align__(8) OverlayBits {
  uint32_t changed;    // bit set: a bias or a penalty changes the logit
  uint32_t forbidden;  // bit set: forbidden by the mask, a bad word or the minimum length
};

struct RowOverlay {
  RowProcessors processors;
  OverlayBits* bits;  // word w covers tokens 32 w to 32 w + 31
  int32_t stretch_log2;
  int32_t num_stretches;
};

// The index of an ascending table: it has the place where each stretch of 2^kStretchLog2 token ids
// begins. With it, a search waits for memory only a few times, instead of log2 of the length of a
// long history. Stretches are longer if a row would have more than kMostStretches of them.
constexpr int kStretchLog2 = 9;
constexpr int kMostStretches = 512;

// Limit on the bits in shared memory: what fits the smallest of the devices with large shared
// memory, so that all of these devices decide alike.
constexpr int64_t kMostOverlayBytes = 121 << 10;

constexpr int64_t to_16_bytes(int64_t bytes) { return (bytes + 15) / 16 * 16; }
constexpr int kOverlayBytes = static_cast<int>(to_16_bytes(sizeof(RowOverlay)));

// The memory layout of a row's overlay.
struct OverlayPlan {
  int32_t num_words = 0;  // words of the bits
  int32_t num_stretches = 0;
  int32_t stretch_log2 = kStretchLog2;
  bool is_shared = false;  // whether the bits are in shared memory; else in the workspace

  constexpr int64_t bits_bytes() const { return num_words * int64_t{sizeof(OverlayBits)}; }

  // Returns the size in bytes of the overlay in the shared memory of a block.
  constexpr int64_t smem_bytes() const {
    int64_t begins = 2 * (num_stretches + int64_t{1}) * int64_t{sizeof(int32_t)};
    return kOverlayBytes + to_16_bytes(begins) + (is_shared ? bits_bytes() : 0);
  }
};

// Plans the overlay of a row whose last leaf ends before token `end`, on a device with
// `shared_bytes` of shared memory per block.
constexpr OverlayPlan plan_overlay(int64_t end, int64_t shared_bytes) {
  OverlayPlan plan;
  while ((end - 1) >> plan.stretch_log2 >= kMostStretches) ++plan.stretch_log2;
  plan.num_stretches = static_cast<int32_t>((end - 1) >> plan.stretch_log2) + 1;
  plan.num_words = static_cast<int32_t>(end / 32);
  plan.is_shared = true;
  int64_t bytes = plan.smem_bytes();
  plan.is_shared = bytes <= kMostOverlayBytes && kRowSharedBytes + bytes <= shared_bytes;
  return plan;
}
static_assert(plan_overlay(448 << 10, 163 << 10).is_shared &&
              plan_overlay(215 << 10, 99 << 10).is_shared);
static_assert(kRowSharedBytes + plan_overlay(INT32_MAX, 0).smem_bytes() <= 48 << 10,
              "what a block of every device has");

// The bits of a row, and the range of words that one block writes.
struct OverlayPart {
  OverlayBits* bits;
  int32_t begin, end;
};

__device__ inline RowOverlay& row_overlay() {
  return *reinterpret_cast<RowOverlay*>(shared_memory() + kRowSharedBytes);
}

// Returns, in shared memory, the index of the counted tokens: the begin of each stretch, then the
// end of the last. The index of the biases follows it.
__device__ inline int32_t* stretch_begins() {
  return reinterpret_cast<int32_t*>(shared_memory() + kRowSharedBytes + kOverlayBytes);
}

// Returns the address of bits that lie in shared memory.
__device__ inline OverlayBits* shared_overlay_bits(const OverlayPlan& plan) {
  int32_t bytes = 2 * (plan.num_stretches + 1) * static_cast<int32_t>(sizeof(int32_t));
  return reinterpret_cast<OverlayBits*>(shared_memory() + kRowSharedBytes + kOverlayBytes +
                                        (bytes + 15) / 16 * 16);
}

// Returns what find_sorted returns for an ascending table, using the index of its stretches. On a
// table that is not sorted, it stays in bounds.
__device__ inline int32_t find_in_stretch(const int32_t* begins,
                                          const int32_t* ids,
                                          int32_t size,
                                          int32_t id) {
  int32_t stretch = id >> row_overlay().stretch_log2;
  int32_t end = min(max(begins[stretch + 1], 0), size);
  int32_t begin = min(max(begins[stretch], 0), end);
  int32_t at = find_sorted(ids + begin, end - begin, id);
  return at < 0 ? at : begin + at;
}

// Builds the overlay of a row. A whole block calls this; the block writes its part of the bits, and
// all stretches of the index. The arguments after `all` are those of row_processors and must be in
// range, except for the mask index. Request -1 has no processors.
__device__ inline void build_overlay(const LogitsProcessors& all,
                                     int64_t batch_idx,
                                     int64_t output_row,
                                     int32_t num_tokens,
                                     const DraftPath& path,
                                     int32_t vocab_size,
                                     const OverlayPlan& plan,
                                     const OverlayPart& part) {
  const RowProcessors& row = row_overlay().processors;
  int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  if (thread == 0) {
    row_overlay().processors = {};
    if (batch_idx >= 0) {
      row_overlay().processors = row_processors(all, batch_idx, output_row, num_tokens, path);
    }
    if (!is_mask_index(all, output_row)) row_overlay().processors.mask = nullptr;
    row_overlay().bits = part.bits;
    row_overlay().stretch_log2 = plan.stretch_log2;
    row_overlay().num_stretches = plan.num_stretches;
  }
  __syncthreads();
  int32_t mask_words = row.mask != nullptr ? (vocab_size + 31) / 32 : 0;
#pragma unroll 1
  for (int32_t word = part.begin + thread; word < part.end; word += threads) {
    uint32_t allowed = word < mask_words ? static_cast<uint32_t>(row.mask[word]) : 0xffffffffu;
    part.bits[word] = {0u, ~allowed};
  }
  __syncthreads();
  auto mark = [&](uint32_t OverlayBits::* which, int32_t id) {
    if (id < 0 || id >= vocab_size || id / 32 < part.begin || id / 32 >= part.end) return;
    atomicOr(&(part.bits[id / 32].*which), 1u << id % 32);
  };
  // Marks the tokens of a table as changed, and records where each stretch begins. The table ends
  // at -1; the stretches after it are empty and begin at its end.
  auto mark_ascending = [&](const int32_t* ids, int32_t size, int32_t* begins) {
    auto stretch_of = [&](int32_t i) {
      bool inside = i < size && ids[i] >= 0 && ids[i] < vocab_size;
      return inside ? ids[i] >> plan.stretch_log2 : plan.num_stretches;
    };
#pragma unroll 1
    for (int32_t i = thread; i <= size; i += threads) {
      int32_t stretch = stretch_of(i);
      int32_t before = i > 0 ? stretch_of(i - 1) : -1;
      if (i < size) mark(&OverlayBits::changed, ids[i]);
      for (int32_t j = before + 1; j <= stretch; ++j) begins[j] = i;
      if (stretch == plan.num_stretches) break;
    }
  };
  int32_t* begins = stretch_begins();
  mark_ascending(row.counted_token_ids, row.max_counted, begins);
  mark_ascending(row.bias_token_ids, row.max_biases, begins + plan.num_stretches + 1);
  for_each_forbidden(row, thread, threads, [&](int32_t id) { mark(&OverlayBits::forbidden, id); });
  if (thread == 0 && row.penalizes) {
    for_each_in_flight(row, [&](int32_t id) { mark(&OverlayBits::changed, id); });
  }
  __syncthreads();
}

// Returns the overlay bits of `count` tokens from `first` on, which must be in one word.
__device__ inline OverlayBits overlay_of(int32_t first, int count) {
  // Volatile, so that every read loads the pointer again: keeping it in a register would cost one
  // in every loop.
  OverlayBits* const volatile& all = row_overlay().bits;
  OverlayBits bits = all[first / 32];
  uint32_t mask = (1u << count) - 1;
  return {bits.changed >> first % 32 & mask, bits.forbidden >> first % 32 & mask};
}

// Returns the new value of a logit that is changed and not forbidden.
template <typename T>
__device__ inline T changed_logit(int32_t id, T x) {
  const RowProcessors& row = row_overlay().processors;
  auto find = [&](const int32_t* ids, int32_t size, int32_t token_id) {
    int32_t* begins = stretch_begins();
    if (ids != row.counted_token_ids) begins += row_overlay().num_stretches + 1;
    return find_in_stretch(begins, ids, size, token_id);
  };
  return from_float<T>(clean_logit(adjusted_logit(row, id, to_float(x), find)));
}

}  // namespace specops
