// SPDX-License-Identifier: Apache-2.0
// A row's processors laid over a copy of its logits, in which only the named and the masked tokens
// differ.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/simd.h"
#include "sampling/row/logits_processors.h"

namespace specops::SPECOPS_ISA {
namespace {

// So far ahead of a copy its source is asked for, past the L2 cache: that is the copy's, which is
// read again, where the source is not.
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

// Logits where the mask's bits are set, elsewhere -inf; `count` of them, from a multiple of 32.
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

// Writes the processed logits of the tokens that the tables name. The two ascending lists are walked
// side by side; the few drafts on the way to the row are done again, with all their counts, and what
// is forbidden comes last.
template <typename T>
[[maybe_unused]] void patch_named(const RowProcessors& row,
                                  const T* logits,
                                  uint32_t vocab_size,
                                  T* processed) {
  int32_t counted = 0, biased = 0;
  while (true) {
    // -1, the end of a list, is the largest as unsigned.
    uint32_t count_id = counted < row.max_counted ? row.counted_token_ids[counted] : 0xffffffffu;
    uint32_t bias_id = biased < row.max_biases ? row.bias_token_ids[biased] : 0xffffffffu;
    uint32_t id = count_id < bias_id ? count_id : bias_id;
    if (id >= vocab_size) break;
    float x = clean_logit(to_float(logits[id]));
    if (bias_id == id) x += row.biases[biased++];
    if (count_id == id) {
      int32_t counts = row.token_counts[counted++];
      x = penalized_logit(row, x, counts >> 1, (counts & 1) != 0);
    }
    if (is_allowed(row, id)) processed[id] = from_float<T>(clean_logit(x));
  }
  if (row.penalizes) {
    for_each_in_flight(row, [&](int32_t id) {
      if (static_cast<uint32_t>(id) >= vocab_size || !is_allowed(row, id)) return;
      float x = adjusted_logit(row, id, to_float(logits[id]));
      processed[id] = from_float<T>(clean_logit(x));
    });
  }
  for_each_forbidden(row, 0, 1, [&](int32_t id) {
    if (static_cast<uint32_t>(id) < vocab_size) processed[id] = from_float<T>(-INFINITY);
  });
}

// Whether a row's processors change anything.
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
