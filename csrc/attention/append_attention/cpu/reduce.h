// SPDX-License-Identifier: Apache-2.0
// Reduces one unit of work of append_attention on the CPU: the loop over its leaves.
#pragma once

#include "attention/append_attention/cpu/leaf.h"
#include "attention/append_attention/cpu/results.h"
#include "attention/append_attention/cpu/split.h"

namespace specops::SPECOPS_ISA {
namespace {

// Processes the unit's leaves in order and, within a leaf, one head after another. Writes the rows
// of out, or the states of the chunk. A leaf that the members of a bundle share is computed for all
// of their rows at once. Rows do not affect each other, so each row gets the same bits as when it
// runs alone.
template <typename T, int D, bool kScaled>
void attend(const AppendAttentionParams& params, const Unit& unit) {
  Scratch<T, D>& own = scratch<T, D>();
  UnitRows<T> rows;
  load_queries<T, D>(params, unit, rows);
  int64_t unit_rows = rows.count * unit.num_heads;
  [[maybe_unused]] int64_t group = params.num_qo_heads / params.num_kv_heads;
  LaneQueries queries;
  if constexpr (kHasLanes<T>) {
    queries = turn_queries<T, D>(rows, unit.num_heads, group, own.lane_q);
  }
  own.prefetch.clear();
  int chunk = 0, result = 1;  // indices of the scratch states
  for (int64_t i = 0; i < unit_rows; ++i) own.l[0][i] = own.l[1][i] = 0.0f;
  bool has_result = load_states<T, D>(params, unit, rows, result, chunk, own);
  for (int64_t leaf = unit.first_leaf; leaf <= unit.last_leaf; ++leaf) {
    int64_t base = leaf * kLeafTokens;
    for (int at = 0; at < rows.num_members;) {
      const Member& member = rows.members[at++];
      int last = member.first_row + member.rows;
      // A sliding window may begin inside the leaf; then some rows do not see all of it.
      bool all = base >= member.all_see;
      for (; all && at < rows.num_members && rows.members[at].request->shared > leaf; ++at) {
        all = base >= rows.members[at].all_see;
        if (!all) break;
        last += rows.members[at].rows;
      }
      if (leaf >= member.end_leaf || base + kLeafTokens <= member.first_seen) continue;
      fold_leaf<T, D, kScaled>(
          params, unit, rows, queries, member, base, member.first_row, last, chunk, own);
    }
    bool chunk_ends = (leaf + 1) * kLeafTokens % kAttentionChunk == 0;
    if (!chunk_ends && leaf != unit.last_leaf) continue;
    if (has_result) {
      fold_chunk<T, D>(unit_rows, result, chunk, own);
    } else {
      has_result = true;
      chunk = 1 - chunk;
      result = 1 - result;
    }
    for (int64_t row = 0; row < unit_rows; ++row) own.l[chunk][row] = 0.0f;
  }
  if (unit.partial) {
    write_part<T, D>(params, unit, rows, result, own);
  } else {
    write_rows<T, D>(params, unit, rows, result, own);
  }
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
