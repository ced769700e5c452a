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

// Writes a row's processed logits into a copy, in passes that keep what they touch near: `write` in
// ascending pieces, then `write_late`.
template <typename T>
class Overlay {
 public:
  Overlay(const RowProcessors& row, const T* logits, int64_t vocab_size, T* processed)
      : row_(row),
        logits_(logits),
        processed_(processed),
        vocab_size_(static_cast<uint32_t>(vocab_size)) {}

  // Ids from `begin`, a multiple of 32, on: allowed ones as they are, then those that the two
  // ascending lists name, which are walked side by side.
  void write(int64_t begin, int size) {
    if (row_.mask) {
      copy_allowed(logits_ + begin, row_.mask + begin / 32, size, processed_ + begin);
    } else {
      copy_all(logits_ + begin, size, processed_ + begin);
    }
    uint32_t end = static_cast<uint32_t>(begin) + static_cast<uint32_t>(size);
    while (true) {
      // -1, the end of a list, is the largest as unsigned.
      uint32_t count_id = at(row_.counted_token_ids, counted_, row_.max_counted);
      uint32_t bias_id = at(row_.bias_token_ids, biased_, row_.max_biases);
      uint32_t id = count_id < bias_id ? count_id : bias_id;
      if (id >= end) break;
      float x = clean_logit(to_float(logits_[id]));
      if (bias_id == id) x += row_.biases[biased_++];
      if (count_id == id) {
        int32_t counts = row_.token_counts[counted_++];
        x = penalized_logit(row_, x, counts >> 1, (counts & 1) != 0);
      }
      // No branch on the mask, which is hard to predict: what it forbids is -inf already.
      processed_[id] = from_float<T>(is_allowed(row_, id) ? clean_logit(x) : -INFINITY);
    }
  }

  // The few tokens that come in no order: the drafts on the way to the row, again with all their
  // counts, and what is forbidden. Calls visit(id) for each.
  template <typename Visit>
  void write_late(Visit&& visit) {
    if (row_.penalizes) {
      for_each_in_flight(row_, [&](int32_t id) {
        if (static_cast<uint32_t>(id) >= vocab_size_ || !is_allowed(row_, id)) return;
        float x = adjusted_logit(row_, id, to_float(logits_[id]));
        processed_[id] = from_float<T>(clean_logit(x));
        visit(id);
      });
    }
    for_each_forbidden(row_, 0, 1, [&](int32_t id) {
      if (static_cast<uint32_t>(id) >= vocab_size_) return;
      processed_[id] = from_float<T>(-INFINITY);
      visit(id);
    });
  }

 private:
  static uint32_t at(const int32_t* ids, int32_t index, int32_t size) {
    return index < size ? static_cast<uint32_t>(ids[index]) : 0xffffffffu;
  }

  const RowProcessors& row_;
  const T* logits_;
  T* processed_;
  uint32_t vocab_size_;
  int32_t counted_ = 0;  // places in the lists
  int32_t biased_ = 0;
};

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
