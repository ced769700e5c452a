// SPDX-License-Identifier: Apache-2.0
// One output row as the ops see it: processors, filters, a token, and the scores of any token. Without
// processors it is a Row over the caller's logits; with them a Row over a copy in which only the named
// and the masked tokens differ. Included by *_cpu.cpp files only; everything has internal linkage.
#pragma once

#include <cstdint>
#include <cstring>

#include "sampling/logits_processors.h"
#include "sampling/row_cpu.h"

namespace specops::SPECOPS_ISA {
namespace {

// Logits where the mask's bits are set, elsewhere -inf; `count` of them, from a multiple of 32.
inline void copy_allowed(const float* from, const int32_t* mask, int count, float* to) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    uint32_t bits = static_cast<uint32_t>(mask[i / 32]) >> (i % 32) & 0xffffu;
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

// What is asked about tokens of a row, besides the choice.
struct RowScores {
  bool logprob = false;
  bool rank = false;
  bool processed = false;  // after processors and filters, instead of the untouched logits'
  bool lse = false;        // of the untouched logits
};

// One at a time per thread: its memory is the thread's.
template <typename T>
class TargetRow {
 public:
  // processors: may be nullptr.
  TargetRow(const T* logits,
            int64_t vocab_size,
            const SamplingParams& filters,
            const RowProcessors* processors,
            const RowScores& scores)
      : filters_(filters),
        scores_(scores),
        copied_(processors != nullptr && changes(*processors)),
        untouched_(logits, vocab_size, copied_ ? 0.0f : filters.temperature),
        processed_(untouched_) {
    bool of_softmax = filters.temperature == 0.0f;  // what a processed logprob is of
    bool processed_sum = scores.logprob && scores.processed && of_softmax;
    bool raw_sum = (scores.logprob && !scores.processed) || scores.lse;
    bool warm = Row<T>::needs_warm(filters);
    if (!copied_) {
      untouched_.scan(raw_sum || processed_sum, warm);
      processed_ = untouched_;
      return;
    }
    T* copy = reinterpret_cast<T*>(tls_scratch.row.reserve(vocab_size * sizeof(T)));
    auto copy_leaf = [&](int64_t begin, int size) {
      if (processors->mask) {
        copy_allowed(logits + begin, processors->mask + begin / 32, size, copy + begin);
      } else {
        std::memcpy(copy + begin, logits + begin, size * sizeof(T));
      }
    };
    if (raw_sum || (scores.rank && !scores.processed)) {
      untouched_.scan_untouched(raw_sum, copy_leaf);
    } else {
      untouched_.for_each_leaf(copy_leaf);
    }
    patch_named(*processors, logits, static_cast<uint32_t>(vocab_size), copy);
    processed_ = Row<T>(copy, vocab_size, filters.temperature);
    processed_.scan(processed_sum, warm);
  }

  // The processed logits, whether the processors changed some or not.
  const Row<T>& processed() const { return processed_; }

  // The rest is about what the filters keep of them; the first call finds it.
  Row<T>& kept() {
    if (!filtered_) processed_.filter(filters_);
    filtered_ = true;
    return processed_;
  }

  // What sample chooses.
  template <typename Source>
  int32_t choose(Purpose purpose, const Source& uniform) {
    const Row<T>& row = kept();
    return row.draw(row.is_certain() ? 0.0f : uniform(purpose, 0));
  }

  double target_prob(int32_t id) { return kept().weight_of(id) / kept().kept_mass(); }

  float logprob(int32_t id) {
    if (!scores_.processed) return untouched_.logprob(untouched_.logit(id));
    if (filters_.temperature == 0.0f) return processed_.logprob(processed_.logit(id));
    return kept().target_logprob(id);
  }

  int32_t rank(int32_t id) const {
    const Row<T>& row = scores_.processed ? processed_ : untouched_;
    return row.rank(row.logit(id));
  }

  float lse() const { return untouched_.lse(); }

 private:
  SamplingParams filters_;
  RowScores scores_;
  bool copied_;
  bool filtered_ = false;
  Row<T> untouched_;
  Row<T> processed_;
};

}  // namespace
}  // namespace specops::SPECOPS_ISA
