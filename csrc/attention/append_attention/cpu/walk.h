// SPDX-License-Identifier: Apache-2.0
// A thread's loop over the units of append_attention on the CPU, and the mapping from a unit's
// number to its work.
#pragma once

#include "attention/append_attention/cpu/cut.h"
#include "attention/append_attention/cpu/reduce.h"

namespace specops::SPECOPS_ISA {
namespace {

// Returns unit `local` of a request's own leaves. Unit numbers run over KV heads fastest, then
// chunks, then tiles.
inline Unit find_unit(const AppendAttentionParams& params,
                      const Request& r,
                      int64_t local,
                      bool cold) {
  int64_t head_group = local % r.head_groups;
  int64_t chunk = local / r.head_groups % r.chunks;
  int64_t tile = local / r.head_groups / r.chunks;
  int64_t rows_left = r.qo_len - tile * r.tile_rows;
  Unit unit;
  unit.request = &r;
  unit.members = 0;
  unit.first_row = tile * r.tile_rows;
  unit.num_rows = rows_left < r.tile_rows ? rows_left : r.tile_rows;
  unit.first_head = head_group * r.heads_per_unit;
  int64_t heads_left = params.num_kv_heads - unit.first_head;
  unit.num_heads = heads_left < r.heads_per_unit ? heads_left : r.heads_per_unit;
  unit.first_leaf = r.own_leaf;
  unit.last_leaf = r.last_leaf;
  if (r.tiles > 1) {
    int64_t first_position = r.kv_len - r.qo_len + unit.first_row;
    unit.first_leaf = window_begin(params, first_position) / kLeafTokens;
    int64_t last_position = first_position + unit.num_rows - 1;
    unit.last_leaf = (seen_end(params, last_position, r.kv_len) - 1) / kLeafTokens;
  }
  unit.cold = cold && r.tiles == 1;
  unit.partial = r.chunks > 1;
  if (unit.partial) {
    int64_t start = (r.own_leaf / kChunkLeaves + chunk) * kChunkLeaves;
    if (unit.first_leaf < start) unit.first_leaf = start;
    if (unit.last_leaf >= start + kChunkLeaves) unit.last_leaf = start + kChunkLeaves - 1;
  }
  return unit;
}

// Returns unit `local` of a bundle's shared leaves. Unit numbers run over KV heads fastest, then
// chunks.
inline Unit find_shared_unit(const AppendAttentionParams& params,
                             const Plan& plan,
                             const Bundle& bundle,
                             int64_t local) {
  int64_t start = (bundle.first_leaf / kChunkLeaves + local / bundle.head_groups) * kChunkLeaves;
  Unit unit;
  unit.request = plan.requests + bundle.first;
  unit.members = bundle.members;
  unit.first_row = unit.num_rows = 0;
  unit.first_head = local % bundle.head_groups * bundle.heads_per_unit;
  int64_t heads_left = params.num_kv_heads - unit.first_head;
  unit.num_heads = heads_left < bundle.heads_per_unit ? heads_left : bundle.heads_per_unit;
  int64_t end = start + kChunkLeaves;
  unit.first_leaf = bundle.first_leaf > start ? bundle.first_leaf : start;
  unit.last_leaf = (bundle.end_leaf < end ? bundle.end_leaf : end) - 1;
  unit.cold = plan.cold;
  unit.partial = true;
  return unit;
}

// Runs units [begin, end) of the requests of a plan.
template <typename T, int D, bool kScaled>
void run_units(const AppendAttentionParams& params, const Plan& plan, int64_t begin, int64_t end) {
  int64_t at = 0;
  for (int64_t index = begin; index < end; ++index) {
    while (at + 1 < plan.count && plan.requests[at + 1].first_unit <= index) ++at;
    const Request& r = plan.requests[at];
    attend<T, D, kScaled>(params, find_unit(params, r, index - r.first_unit, plan.cold));
  }
}

// Runs units [begin, end) of the bundles of a plan.
template <typename T, int D, bool kScaled>
void run_shared_units(const AppendAttentionParams& params,
                      const Plan& plan,
                      int64_t begin,
                      int64_t end) {
  int64_t at = 0;
  for (int64_t index = begin; index < end; ++index) {
    while (at + 1 < plan.num_bundles && plan.bundles[at + 1].first_unit <= index) ++at;
    const Bundle& bundle = plan.bundles[at];
    attend<T, D, kScaled>(params,
                          find_shared_unit(params, plan, bundle, index - bundle.first_unit));
  }
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
