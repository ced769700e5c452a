// SPDX-License-Identifier: Apache-2.0
// Typical-p: of the tokens that the other filters keep, keeps those whose surprise is nearest to
// the mean surprise. The surprise of a token is -log of its probability.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/simd.h"
#include "sampling/row/cpu/bracket.h"
#include "sampling/row/cpu/row.h"
#include "sampling/row/cpu/row_passes.h"
#include "sampling/row/cpu/token_list.h"

namespace specops::SPECOPS_ISA {
namespace {

// Drops the tokens outside the typical set from the list. Overwrites x, which then no longer holds
// logits.
inline void keep_typical(TokenList& list, float origin, float inverse, float typical_p) {
  list.pad();
  double total = list.mass(), moment = 0.0;
  for (int begin = 0; begin < list.count; begin += kLeaf) {
    int end = begin + kLeaf < list.count ? begin + kLeaf : list.count;
    F32x16 sum = zero();
    for (int i = begin; i < end; i += kLanes) {
      F32x16 distance = mul(sub(load(list.x + i), set1(origin)), set1(inverse));
      distance = max(distance, set1(-200.0f));  // a weight of e^-200 does not matter
      store(list.x + i, distance);
      sum = fma(distance, load(list.w + i), sum);
    }
    moment += reduce_add(sum);
  }
  F32x16 mean = set1(static_cast<float>(moment / total));
  for (int i = 0; i < list.count; i += kLanes) {
    F32x16 above = sub(load(list.x + i), mean), below = sub(mean, load(list.x + i));
    store(list.x + i, min(above, below));  // -|distance - mean|
  }
  list.pad();
  Bracket bracket{ordered_bits(-256.0f), ordered_bits(0.0f) + 1, 0.0};
  list.keep(list.select(bracket, typical_p * total));
}

// Keeps the tokens whose surprise is closest to the entropy H of the distribution: in the order
// |-log p - H| ascending, then id ascending, until they have typical_p of the mass. With d =
// log(weight), the distance is |d - mean of d|.
template <typename T>
inline void keep_typical(Row<T>& row, float typical_p, bool weighed) {
  if (!weighed || row.kept != Kept::kListed) {
    if (!gather(row, row.cut, INFINITY, *row.list)) {
      row.list = &row.scratch->all;
      row.list->reserve((row.num_leaves + 1) * kLeaf);
      gather(row, row.cut, INFINITY, *row.list);
    }
    row.list->weigh(row.max, row.scale);
  }
  row.kept = Kept::kListed;
  keep_typical(*row.list, row.max, row.inverse, typical_p);
  row.kept_mass = row.list->mass();
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
