// SPDX-License-Identifier: Apache-2.0
// A thread's walk over the units of append_attention on the CPU: what a unit consists of.
#pragma once

#include "attention/attention_reduce_cpu.h"

namespace specops::SPECOPS_ISA {
namespace {

// Unit `local` of a bundle: KV heads fastest, then chunks, then tiles.
inline Unit find_unit(const AppendAttentionParams& params,
                      const Request& r,
                      int64_t local,
                      bool cold) {
  int64_t head_group = local % r.head_groups;
  int64_t chunk = local / r.head_groups % r.chunks;
  int64_t tile = local / r.head_groups / r.chunks;
  int64_t rows_left = r.qo_len - tile * r.tile_rows;
  Unit unit;
  unit.bundle = &r;
  unit.first_row = tile * r.tile_rows;
  unit.num_rows = rows_left < r.tile_rows ? rows_left : r.tile_rows;
  unit.first_head = head_group * r.heads_per_unit;
  int64_t heads_left = params.num_kv_heads - unit.first_head;
  unit.num_heads = heads_left < r.heads_per_unit ? heads_left : r.heads_per_unit;
  unit.first_leaf = r.bundle_first_leaf;
  unit.last_leaf = r.bundle_last_leaf;
  if (r.tiles > 1) {
    int64_t first_position = r.kv_len - r.qo_len + unit.first_row;
    unit.first_leaf = window_begin(params, first_position) / kLeafTokens;
    unit.last_leaf = (first_position + unit.num_rows - 1) / kLeafTokens;
  }
  unit.cold = cold && r.tiles == 1;
  unit.partial = r.chunks > 1;
  if (unit.partial) {
    int64_t start = (r.bundle_first_leaf / kChunkLeaves + chunk) * kChunkLeaves;
    if (unit.first_leaf < start) unit.first_leaf = start;
    if (unit.last_leaf >= start + kChunkLeaves) unit.last_leaf = start + kChunkLeaves - 1;
  }
  return unit;
}

// Units begin .. end of a plan.
template <typename T, int D>
void run_units(const AppendAttentionParams& params, const Plan& plan, int64_t begin, int64_t end) {
  int64_t at = 0;
  for (int64_t index = begin; index < end; ++index) {
    while (at + 1 < plan.count && plan.requests[at + 1].first_unit <= index) ++at;
    const Request& bundle = plan.requests[at];
    attend<T, D>(params, find_unit(params, bundle, index - bundle.first_unit, plan.cold));
  }
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
