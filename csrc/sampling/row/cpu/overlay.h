// SPDX-License-Identifier: Apache-2.0
// Logits processors of a row. They are applied to a copy of its logits, which differs from the
// original only in the tokens that the processors' tables name and in masked tokens.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/simd.h"
#include "sampling/row/cpu/logit_lanes.h"
#include "sampling/row/logits_processors.h"

namespace specops::SPECOPS_ISA {
namespace {

// Distance by which a copy prefetches its source. The prefetch bypasses the L2 cache, which cannot
// hold both rows: the copy will be read again, the source will not.
constexpr int kCopyAhead = 4096;  // bytes

template <typename T>
inline void prefetch_source(const T* from) {
  __builtin_prefetch(reinterpret_cast<const char*>(from) + kCopyAhead, 0, 0);
}

template <typename T>
inline void copy_all(const T* from, int count, T* to) {
  constexpr int kLine = 64 / sizeof(T);
  int i = 0;
  for (; i + kLine <= count; i += kLine) {
    prefetch_source(from + i);
    std::memcpy(to + i, from + i, 64);
  }
  std::memcpy(to + i, from + i, (count - i) * sizeof(T));
}

// Copies `count` logits whose first id is a multiple of 32: the logit if its mask bit is set, else
// -inf.
inline void copy_allowed(const float* from, const int32_t* mask, int count, float* to) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    uint32_t bits = static_cast<uint32_t>(mask[i / 32]) >> (i % 32) & 0xffffu;
    prefetch_source(from + i);
#if defined(SPECOPS_AVX512)
    __m512 none = _mm512_set1_ps(-INFINITY);
    _mm512_storeu_ps(to + i, _mm512_mask_loadu_ps(none, static_cast<__mmask16>(bits), from + i));
#else
    for (int j = 0; j < kLanes; ++j) to[i + j] = bits >> j & 1u ? from[i + j] : -INFINITY;
#endif
  }
  for (; i < count; ++i) {
    bool allowed = static_cast<uint32_t>(mask[i / 32]) >> (i % 32) & 1u;
    to[i] = allowed ? from[i] : -INFINITY;
  }
}

inline void copy_allowed(const bfloat16* from, const int32_t* mask, int count, bfloat16* to) {
  constexpr uint16_t kNone = 0xff80;  // -inf
  int i = 0;
  for (; i + 32 <= count; i += 32) {
    uint32_t bits = static_cast<uint32_t>(mask[i / 32]);
    prefetch_source(from + i);
#if defined(SPECOPS_AVX512)
    __m512i none = _mm512_set1_epi16(static_cast<int16_t>(kNone));
    _mm512_storeu_si512(to + i, _mm512_mask_loadu_epi16(none, bits, from + i));
#else
    for (int j = 0; j < 32; ++j) to[i + j].bits = bits >> j & 1u ? from[i + j].bits : kNone;
#endif
  }
  for (; i < count; ++i) {
    bool allowed = static_cast<uint32_t>(mask[i / 32]) >> (i % 32) & 1u;
    to[i].bits = allowed ? from[i].bits : kNone;
  }
}

// Applies penalized_logit to sixteen clean logits, given the entries of token_counts for their
// tokens. It has no branches, because signs and counts are unpredictable.
inline F32x16 penalized_lanes(const RowProcessors& row, F32x16 x, const int32_t* counts) {
  float repetition[kLanes], outputs[kLanes], presence[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    repetition[i] = counts[i] > 0 ? row.repetition : 1.0f;
    outputs[i] = static_cast<float>(counts[i] >> 1);
    presence[i] = counts[i] > 1 ? row.presence : 0.0f;
  }
  F32x16 factor = load(repetition);
  x = add(div(max(x, zero()), factor), mul(min(x, zero()), factor));
  x = sub(x, mul(set1(row.frequency), load(outputs)));
  return sub(x, load(presence));
}

// Writes the penalized logits of the counted tokens. Biases are not applied here.
template <typename T>
inline void patch_counted(const RowProcessors& row,
                          const T* logits,
                          uint32_t vocab_size,
                          T* processed) {
  for (int32_t begin = 0; begin < row.max_counted; begin += kLanes) {
    const int32_t* ids = row.counted_token_ids + begin;
    int32_t most = row.max_counted - begin < kLanes ? row.max_counted - begin : kLanes;
    float x[kLanes] = {};
    int32_t counts[kLanes] = {};
    int32_t count = 0;
    // The list ends at -1, which is the largest id when read as unsigned.
    for (; count < most && static_cast<uint32_t>(ids[count]) < vocab_size; ++count) {
      x[count] = to_float(logits[ids[count]]);
      counts[count] = row.token_counts[begin + count];
    }
    store(x, clean(penalized_lanes(row, clean(load(x)), counts)));
    for (int32_t i = 0; i < count; ++i) {
      processed[ids[i]] = from_float<T>(is_allowed(row, ids[i]) ? x[i] : -INFINITY);
    }
    if (count < most) return;
  }
}

// Writes the processed logits of all tokens that the tables name: first the counted tokens; then,
// again and completely, the tokens with a bias and the few drafts before the row; last the
// forbidden tokens.
template <typename T>
[[maybe_unused]] void patch_named(const RowProcessors& row,
                                  const T* logits,
                                  uint32_t vocab_size,
                                  T* processed) {
  patch_counted(row, logits, vocab_size, processed);
  auto patch = [&](int32_t id, const auto& find) {
    if (!is_allowed(row, id)) return;
    processed[id] = from_float<T>(clean_logit(adjusted_logit(row, id, to_float(logits[id]), find)));
  };
  int32_t counted = 0;
  for (int32_t i = 0; i < row.max_biases; ++i) {
    int32_t id = row.bias_token_ids[i];
    if (static_cast<uint32_t>(id) >= vocab_size) break;
    // Walks both ascending lists (ids to patch and biases) together.
    patch(id, [&](const int32_t* ids, int32_t size, int32_t wanted) {
      if (ids == row.bias_token_ids) return i;
      auto at = [&] { return static_cast<uint32_t>(ids[counted]); };
      while (counted < size && at() < static_cast<uint32_t>(wanted)) ++counted;
      return counted < size && ids[counted] == wanted ? counted : -1;
    });
  }
  if (row.penalizes) {
    for_each_in_flight(row, [&](int32_t id) {
      if (static_cast<uint32_t>(id) < vocab_size) patch(id, find_sorted);
    });
  }
  for_each_forbidden(row, 0, 1, [&](int32_t id) {
    if (static_cast<uint32_t>(id) < vocab_size) processed[id] = from_float<T>(-INFINITY);
  });
}

// Returns whether the processors of a row change anything.
inline bool changes(const RowProcessors& row) {
  if (row.mask) return true;
  if (row.max_counted > 0 && row.counted_token_ids[0] >= 0) return true;
  if (row.max_biases > 0 && row.bias_token_ids[0] >= 0) return true;
  bool found = false;
  auto visit = [&](int32_t id) { found |= id >= 0; };
  if (row.penalizes) for_each_in_flight(row, visit);
  for_each_forbidden(row, 0, 1, visit);
  return found;
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
