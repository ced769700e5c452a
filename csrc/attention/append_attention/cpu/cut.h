// SPDX-License-Identifier: Apache-2.0
// Division of the requests and bundles of append_attention on the CPU into units of work. The bits
// of the result do not depend on it.
#pragma once

#include "attention/append_attention/cpu/bundle.h"

namespace specops::SPECOPS_ISA {
namespace {

// Returns the bytes of K and V in one head's leaf, in the element size of q.
inline int64_t leaf_bytes(const AppendAttentionParams& params) {
  return 2 * kLeafTokens * params.head_dim * dtype_bytes(params.dtype);
}

// Loads the requests, finds bundles and estimates the costs.
inline void plan_requests(const AppendAttentionParams& params, int64_t first_request, Plan& plan) {
  plan.used_floats = plan.num_bundles = plan.bundle_cost = plan.total_cost = 0;
  for (int64_t i = 0; i < plan.count; ++i) {
    load_request(params, first_request + i, plan.requests[i]);
  }
  if (params.num_prefix_levels > 0) find_bundles(params, plan);
  int64_t kv_leaves = 0;
  for (int64_t i = 0; i < plan.num_bundles; ++i) {
    const Bundle& bundle = plan.bundles[i];
    int64_t leaves = bundle.end_leaf - bundle.first_leaf;
    plan.bundle_cost += params.num_kv_heads * leaves * leaf_cost(params, bundle.rows);
    kv_leaves += leaves;
  }
  for (int64_t i = 0; i < plan.count; ++i) {
    const Request& r = plan.requests[i];
    plan.costs[i] = 0;
    if (r.qo_len == 0) continue;
    int64_t leaves = r.last_leaf - r.own_leaf + 1;
    plan.costs[i] = params.num_kv_heads * leaves * leaf_cost(params, r.rows);
    plan.total_cost += plan.costs[i];
    kv_leaves += leaves;
  }
  plan.small = num_threads() == 1 || plan.bundle_cost + plan.total_cost < kSmallCost;
  plan.cold = kv_leaves * params.num_kv_heads * leaf_bytes(params) > kColdBytes;
}

// Splits expensive requests into chunks, so that several threads share a request. Returns the
// number of pieces; a piece is a tile or a chunk.
inline int64_t cut_chunks(const AppendAttentionParams& params, Plan& plan) {
  int64_t pieces = 0;
  for (int64_t i = 0; i < plan.count; ++i) {
    Request& r = plan.requests[i];
    if (r.qo_len == 0) continue;
    r.chunks = 1;
    int64_t chunks = r.last_leaf / kChunkLeaves - r.own_leaf / kChunkLeaves + 1;
    bool much = plan.costs[i] > plan.total_cost / (4 * num_threads());
    if (!plan.small && r.tiles == 1 && chunks > 1 && much) {
      int64_t floats = r.is_bundled ? 0 : chunks * state_floats(params, r);
      if (plan.used_floats + floats <= params.workspace_size) {
        if (!r.is_bundled) r.partial = plan.used_floats;
        plan.used_floats += floats;
        r.chunks = chunks;
      }
    }
    pieces += r.tiles * r.chunks;
  }
  return pieces;
}

// Returns how many KV heads a unit of `rows` rows processes, if the heads are divided into at least
// `groups` groups. The unit gets fewer heads if their leaves or states would exceed L2.
inline int64_t heads_of_unit(const AppendAttentionParams& params, int64_t rows, int64_t groups) {
  int64_t heads = kAheadBytes / leaf_bytes(params);
  int64_t share = (params.num_kv_heads + groups - 1) / groups;
  int64_t most = kStateFloats / (rows * params.head_dim);
  if (heads > most) heads = most;
  if (heads > share) heads = share;
  return heads < 1 ? 1 : heads;
}

// Returns the number of groups of heads that gives every thread about two units, for `pieces` tiles
// and chunks.
inline int64_t groups_for(const Plan& plan, int64_t pieces) {
  return plan.small || pieces == 0 ? 1 : (2 * num_threads() + pieces - 1) / pieces;
}

inline int64_t chunks_of(const Bundle& bundle) {
  return (bundle.end_leaf - 1) / kChunkLeaves - bundle.first_leaf / kChunkLeaves + 1;
}

// Divides the requests into units. This division is the only part that depends on the number of
// threads. It decides where states are stored, never the order in which they are folded.
inline void make_plan(const AppendAttentionParams& params, int64_t first_request, Plan& plan) {
  int64_t left = params.batch - first_request;
  plan.count = left < kPlanned ? left : kPlanned;
  plan_requests(params, first_request, plan);
  int64_t pieces = 0;
  for (int64_t i = 0; i < plan.num_bundles; ++i) pieces += chunks_of(plan.bundles[i]);
  int64_t groups = groups_for(plan, pieces);
  plan.bundle_units = 0;
  for (int64_t i = 0; i < plan.num_bundles; ++i) {
    Bundle& bundle = plan.bundles[i];
    bundle.first_unit = plan.bundle_units;
    bundle.heads_per_unit = heads_of_unit(params, bundle.rows, groups);
    bundle.head_groups = (params.num_kv_heads + bundle.heads_per_unit - 1) / bundle.heads_per_unit;
    plan.bundle_units += chunks_of(bundle) * bundle.head_groups;
  }
  groups = groups_for(plan, cut_chunks(params, plan));
  plan.units = 0;
  for (int64_t i = 0; i < plan.count; ++i) {
    Request& r = plan.requests[i];
    r.first_unit = plan.units;
    if (r.qo_len == 0) continue;
    int64_t group = params.num_qo_heads / params.num_kv_heads;
    r.heads_per_unit = r.tiles > 1 ? heads_of_unit(params, r.tile_rows * group, params.num_kv_heads)
                                   : heads_of_unit(params, r.rows, groups);
    r.head_groups = (params.num_kv_heads + r.heads_per_unit - 1) / r.heads_per_unit;
    plan.units += r.tiles * r.chunks * r.head_groups;
  }
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
