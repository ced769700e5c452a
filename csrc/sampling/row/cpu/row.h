// SPDX-License-Identifier: Apache-2.0
// One row of logits that one thread processes: its only full read from memory, the logprobs of its
// tokens, and the masses of its leaves. (The mass of some tokens is the sum of their weights.) The
// functions of the other files take this object as the argument `row`.
//
// Order:   the vocabulary is divided into leaves of kLeaf ids. A sum over a leaf is sixteen fp32
//          lanes in id order, then one fixed tree; leaves are folded left in fp64. NaN counts as
//          -inf, and +inf as the largest finite float. Tokens are ranked by logit (descending),
//          then id (ascending).
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

// Location of the weights of the kept tokens. kOne: there is only one token; kScanned: in the
// scan's sums per leaf; kListed: in the list; kByLeaf: in sums per leaf over the tokens that the
// cut keeps.
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
  // The tokens that filter() keeps.
  Kept kept = Kept::kOne;
  int32_t one = 0;
  TokenList* list = nullptr;
  Cut cut{};
  double kept_mass = 1.0;

  Row(const T* row_logits, int64_t size, float temperature)
      : logits(row_logits),
        vocab_size(static_cast<int32_t>(size)),
        num_leaves(static_cast<int32_t>((size + kLeaf - 1) / kLeaf)) {
    // Clamped to finite, normal floats, so that 0 * inverse is 0 and -inf * inverse is -inf.
    float own = temperature > 0.0f ? 1.0f / temperature : 1.0f;
    inverse = own > FLT_MAX / 2 ? FLT_MAX / 2 : own < FLT_MIN ? FLT_MIN : own;
    scale = inverse * kLog2e;
  }

  // Reads the row from memory once: computes the maxima and the requested sums, at temperature 1
  // (raw) and at the row's temperature (warm).
  void scan(bool want_raw, bool want_warm) {
    scan(want_raw, want_warm, /*untouched=*/false, [](int64_t, int) {});
  }

  // Scans the caller's row while a copy of it is made. Calls visit(first id, size) for every leaf
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

  // Returns the log-softmax of a logit of this row, at temperature 1.
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

  // Returns 1 + the number of greater logits in the row.
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

  // Computes the mass of every leaf from the scan's sums. The weight of the row's largest logit is
  // 1.
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

  // ---- kept tokens (those that filter() does not drop) ----

  // Returns whether only one token is kept, so that drawing needs no random number.
  bool is_certain() const { return kept == Kept::kOne; }

  // Returns the logit whose weight is 1: in the scan's sums, that is the maximum of the leaf
  // instead of the maximum of the row.
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

// Returns the number of rows per chunk: enough logits to be worth waking a thread for.
[[maybe_unused]] int64_t row_grain(int64_t vocab_size) {
  return vocab_size < 32768 ? 32768 / vocab_size : 1;
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
