// SPDX-License-Identifier: Apache-2.0
// One row of logits owned by one thread: its only full read from memory, the logprobs of its
// tokens, and the masses of its leaves. The functions of the other files take it as `row`.
//
// Order:   the vocabulary is divided into leaves of kLeaf ids. A sum over a leaf is sixteen fp32
//          lanes in id order and one fixed tree; leaves are folded left in fp64. NaN counts as -inf
//          and +inf as the largest finite float. Tokens are ordered by (logit descending, id
//          ascending).
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "common/simd.h"
#include "sampling/row/cpu/leaf.h"
#include "sampling/row/cpu/logit_lanes.h"
#include "sampling/row/cpu/ranking.h"
#include "sampling/row/cpu/scratch.h"
#include "sampling/row/cpu/token_list.h"

namespace specops::SPECOPS_ISA {
namespace {

// The place of the kept tokens' weights: a single token; the scan's sums per leaf; the list; or
// sums per leaf over the tokens that the cut keeps.
enum class Kept { kOne, kScanned, kListed, kByLeaf };

template <typename T>
struct Row {
  const T* logits;
  int32_t vocab_size;
  int32_t num_leaves;
  float inverse;  // 1 / temperature
  float scale;    // inverse * log2(e)
  Scratch* scratch = nullptr;
  LeafStats* leaves = nullptr;
  float max = -INFINITY;
  double log_sum = 0.0;
  // The tokens kept by filter().
  Kept kept = Kept::kOne;
  int32_t one = 0;
  TokenList* list = nullptr;
  Cut cut{};
  double kept_mass = 1.0;

  Row(const T* row_logits, int64_t size, float temperature)
      : logits(row_logits),
        vocab_size(static_cast<int32_t>(size)),
        num_leaves(static_cast<int32_t>((size + kLeaf - 1) / kLeaf)) {
    // Kept within the finite floats, so that 0 * inverse is 0 and -inf stays -inf.
    float own = temperature > 0.0f ? 1.0f / temperature : 1.0f;
    inverse = own > FLT_MAX / 2 ? FLT_MAX / 2 : own < FLT_MIN ? FLT_MIN : own;
    scale = inverse * kLog2e;
  }

  // Reads the row from memory once: maxima, and the two requested sums.
  void scan(bool want_raw, bool want_warm) {
    scan(want_raw, want_warm, /*untouched=*/false, [](int64_t, int) {});
  }

  // Scans the caller's row while a copy of it is made: calls visit(first id, size) for every leaf
  // while the leaf is in cache.
  template <typename Visit>
  void scan_untouched(bool want_raw, Visit&& visit) {
    scan(want_raw, false, /*untouched=*/true, visit);
  }

  template <typename Visit>
  void for_each_leaf(Visit&& visit) const {
    for (int32_t leaf = 0; leaf < num_leaves; ++leaf) {
      visit(static_cast<int64_t>(leaf) * kLeaf, leaf_size(leaf));
    }
  }

  float lse() const { return max == -INFINITY ? max : static_cast<float>(max + log_sum); }

  // Returns the raw log-softmax of a logit of this row.
  float logprob(float logit) const {
    if (max == -INFINITY) return max;
    return static_cast<float>((static_cast<double>(clean(logit)) - max) - log_sum);
  }

  float logit(int32_t id) const { return clean(to_float(logits[id])); }

  int32_t argmax() const {
    if (max == -INFINITY) return 0;
    for (int32_t leaf = 0; leaf < num_leaves; ++leaf) {
      if (leaves[leaf].max != max) continue;
      int32_t id = leaf * kLeaf;
      while (logit(id) != max) ++id;
      return id;
    }
    return 0;
  }

  // Returns 1 + the number of greater logits.
  int32_t rank(float logit) const {
    int32_t rank = 1;
    float above = next_above(logit);
    for (int32_t leaf = 0; leaf < num_leaves; ++leaf) {
      if (leaves[leaf].max <= logit) continue;
      int size = leaf_size(leaf);
      for (int i = 0; i < size; i += kLanes) {
        F32x16 values = load_clean(leaf_data(leaf), i, size);
        rank += __builtin_popcount(lanes_between(values, above, INFINITY));
      }
    }
    return rank;
  }

  Cut everything() const { return {-INFINITY, vocab_size - 1}; }

  const T* leaf_data(int32_t leaf) const { return logits + static_cast<int64_t>(leaf) * kLeaf; }

  int leaf_size(int32_t leaf) const {
    int32_t rest = vocab_size - leaf * kLeaf;
    return rest < kLeaf ? rest : kLeaf;
  }

  // ---- weights and masses ----

  double leaf_scale(int32_t leaf) const {
    return std::exp((static_cast<double>(leaves[leaf].max) - max) * inverse);
  }

  // Writes the mass of every leaf from the scan's sums; the row's largest logit weighs 1.
  void scanned_masses() const {
    for (int32_t leaf = 0; leaf < num_leaves; ++leaf) {
      bool some = leaves[leaf].max > -INFINITY;
      scratch->masses.data[leaf] = some ? leaves[leaf].warm * leaf_scale(leaf) : 0.0;
    }
  }

  double warm_mass() const {
    scanned_masses();
    return total_mass();
  }

  double total_mass() const {
    double total = 0.0;
    for (int32_t leaf = 0; leaf < num_leaves; ++leaf) total += scratch->masses.data[leaf];
    return total;
  }

  // ---- tokens that filter() has kept ----

  // Returns whether only one token is left, so that drawing needs no random number.
  bool is_certain() const { return kept == Kept::kOne; }

  // Returns the logit that weighs 1: the scan's sums are relative to their leaf's maximum.
  float leaf_origin(int32_t leaf) const { return kept == Kept::kScanned ? leaves[leaf].max : max; }

  double weight_unit(int32_t leaf) const { return kept == Kept::kScanned ? leaf_scale(leaf) : 1.0; }

 private:
  template <typename Visit>
  void scan(bool want_raw, bool want_warm, bool untouched, Visit&& visit) {
    scratch = &tls_scratch;
    scratch->reserve(num_leaves);
    leaves = (untouched ? scratch->untouched_stats : scratch->stats).data;
    max = -INFINITY;
    for (int32_t leaf = 0; leaf < num_leaves; ++leaf) {
      leaves[leaf] =
          scan_leaf(leaf_data(leaf), leaf_size(leaf), want_raw, want_warm, inverse, scale);
      if (leaves[leaf].max > max) max = leaves[leaf].max;
      visit(static_cast<int64_t>(leaf) * kLeaf, leaf_size(leaf));
    }
    if (!want_raw || max == -INFINITY) return;
    double sum = 0.0;
    for (int32_t leaf = 0; leaf < num_leaves; ++leaf) {
      if (leaves[leaf].max == -INFINITY) continue;
      sum += leaves[leaf].raw * std::exp(static_cast<double>(leaves[leaf].max) - max);
    }
    log_sum = std::log(sum);
  }
};

// Returns rows per chunk: enough logits to justify waking a thread.
[[maybe_unused]] int64_t row_grain(int64_t vocab_size) {
  return vocab_size < 32768 ? 32768 / vocab_size : 1;
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
