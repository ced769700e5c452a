// SPDX-License-Identifier: Apache-2.0
// An output row as the ops use it: processors, filters, the choice of a token, and the scores of
// any token. Without processors it is a Row over the caller's logits, with processors a Row over a
// copy.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/simd.h"
#include "sampling/row/cpu/draw.h"
#include "sampling/row/cpu/filtered_row.h"
#include "sampling/row/cpu/overlay.h"
#include "sampling/row/cpu/row.h"
#include "sampling/row/cpu/row_passes.h"
#include "sampling/row/cpu/scratch.h"

namespace specops::SPECOPS_ISA {
namespace {

// The scores requested for tokens of a row, in addition to the choice.
struct RowScores {
  bool logprob = false;
  bool rank = false;
  bool processed = false;  // after processors and filters, instead of from raw logits
  bool lse = false;        // log-sum-exp of the raw logits
};

// Writes target_probs for the whole vocabulary.
template <typename T>
inline void write_target_probs(const Row<T>& row, float* probs) {
  if (row.kept == Kept::kOne || row.kept == Kept::kListed) {
    std::memset(probs, 0, row.vocab_size * sizeof(float));
    for_each_kept(row,
                  [&](int32_t id, double w) { probs[id] = static_cast<float>(w / row.kept_mass); });
    return;
  }
  for (int32_t leaf = 0; leaf < row.num_leaves; ++leaf) {
    float* of_leaf = probs + static_cast<int64_t>(leaf) * kLeaf;
    int size = row.leaf_size(leaf);
    if (row.scratch->masses.data[leaf] <= 0.0) {
      std::memset(of_leaf, 0, size * sizeof(float));
      continue;
    }
    F32x16 unit = set1(static_cast<float>(row.weight_unit(leaf) / row.kept_mass));
    for_each_weighed(row, leaf, row.cut, row.leaf_origin(leaf), [&](int i, F32x16 w) {
      store_partial(of_leaf + i, mul(w, unit), size - i);
    });
  }
}

// Returns log target_probs of a token. At temperature 0, use the log-softmax instead, because the
// choice has no distribution.
template <typename T>
inline float target_logprob(const Row<T>& row, int32_t id) {
  if (row.max == -INFINITY || weight_of(row, id) <= 0.0) return -INFINITY;
  if (row.kept == Kept::kOne) return 0.0f;
  double distance = (static_cast<double>(row.logit(id)) - row.max) * row.inverse;
  return static_cast<float>(distance - std::log(row.kept_mass));
}

// An output row. There may be at most one per thread at a time, because it uses the thread's
// scratch memory.
template <typename T>
class TargetRow {
 public:
  // `processors` may be nullptr.
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
    bool of_softmax = filters.temperature == 0.0f;  // processed logprobs are then the log-softmax
    bool processed_sum = scores.logprob && scores.processed && of_softmax;
    bool raw_sum = (scores.logprob && !scores.processed) || scores.lse;
    bool warm = needs_warm(filters);
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
        copy_all(logits + begin, size, copy + begin);
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

  // Returns the processed logits; these are the caller's logits if the processors change nothing.
  const Row<T>& processed() const { return processed_; }

  // Returns the filtered row. The first call applies the filters. The methods below call it.
  Row<T>& kept() {
    if (!filtered_) filter(processed_, filters_);
    filtered_ = true;
    return processed_;
  }

  // Returns the token that `sample` chooses for the row.
  template <typename Source>
  int32_t choose(Purpose purpose, const Source& uniform) {
    const Row<T>& row = kept();
    return draw(row, row.is_certain() ? 0.0f : uniform(purpose, 0));
  }

  double target_prob(int32_t id) { return weight_of(kept(), id) / kept().kept_mass; }

  float logprob(int32_t id) {
    if (!scores_.processed) return untouched_.logprob(untouched_.logit(id));
    if (filters_.temperature == 0.0f) return processed_.logprob(processed_.logit(id));
    return target_logprob(kept(), id);
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
