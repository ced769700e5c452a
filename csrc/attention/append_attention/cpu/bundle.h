// SPDX-License-Identifier: Apache-2.0
// Bundling of requests in append_attention on the CPU: leaves that requests share are read once for
// all of them, where that saves more than it costs. The bits of the result do not depend on it.
#pragma once

#include "attention/append_attention/cpu/plan.h"

namespace specops::SPECOPS_ISA {
namespace {

// Returns the number of leading leaves that two requests share, according to the narrowest prefix
// group that contains both.
inline int64_t shared_leaves(const AppendAttentionParams& params, int64_t a, int64_t b) {
  int64_t tokens = 0;
  for (int64_t level = 0; level < params.num_prefix_levels; ++level) {
    const int32_t* leaders = params.prefix_leaders + level * params.batch;
    if (leaders[a] != leaders[b]) break;
    tokens = params.prefix_lens[level * params.batch + b];
  }
  return tokens / kLeafTokens;
}

// Return approximate cycles per KV head: leaf_saving is saved for each leaf that is not read again
// (usually from a cache); state_cost is spent on storing and reloading the state of a row.
inline int64_t leaf_saving(const AppendAttentionParams& params) {
  return 8 * params.head_dim * dtype_bytes(params.dtype);
}
inline int64_t state_cost(const AppendAttentionParams& params) { return 2 * params.head_dim; }
// Returns the approximate cycles to process one leaf of a request: reading 8 bytes per cycle, and a
// quarter of a cycle per multiplied vector.
inline int64_t leaf_cost(const AppendAttentionParams& params, int64_t rows) {
  return params.head_dim * (16 * dtype_bytes(params.dtype) + 4 * rows);
}
// Requests wait until the units of bundles are done. Bundling must save at least 1 / kLeastPart of
// all work to justify that wait.
constexpr int64_t kLeastPart = 32;

// Returns the cost of bundling a request that shares `shared` leading leaves: storing and reloading
// the states of the chunks that contain these leaves.
inline int64_t bundling_cost(const AppendAttentionParams& params,
                             const Request& r,
                             int64_t shared) {
  int64_t slots = (shared - 1) / kChunkLeaves - r.first_leaf / kChunkLeaves + 1;
  return r.rows * slots * state_cost(params);
}

// Dissolves a bundle: its members then read all of their leaves alone.
inline void dissolve(Plan& plan, const Bundle& bundle) {
  int64_t left = bundle.members;
  for (int64_t i = bundle.first; left > 0; ++i) {
    Request& r = plan.requests[i];
    if (!r.is_bundled) continue;
    r.is_bundled = false;
    r.own_leaf = r.first_leaf;
    r.shared = 0;
    r.partial = -1;
    --left;
  }
}

// Assigns workspace to the states of a bundle's members; returns false if they do not fit.
inline bool place_states(const AppendAttentionParams& params, Plan& plan, const Bundle& bundle) {
  int64_t used = plan.used_floats, left = bundle.members;
  for (int64_t i = bundle.first; left > 0; ++i) {
    Request& r = plan.requests[i];
    if (!r.is_bundled) continue;
    r.partial = used;
    used += chunks_of(r) * state_floats(params, r);
    --left;
  }
  if (used > params.workspace_size) return false;
  plan.used_floats = used;
  return true;
}

// Bundles neighboring requests where that pays off.
inline void find_bundles(const AppendAttentionParams& params, Plan& plan) {
  int64_t most_rows = kStateFloats / params.head_dim;
  if (most_rows > kMaxBundle) most_rows = kMaxBundle;
  Bundle* bundle = nullptr;  // bundle that the next request may join
  Request* before = nullptr;
  int64_t saved = 0, whole = 0;
  for (int64_t i = 0; i < plan.count; ++i) {
    Request& r = plan.requests[i];
    if (r.qo_len == 0) continue;
    whole += (r.last_leaf - r.first_leaf + 1) * leaf_cost(params, r.rows);
    if (r.tiles > 1) continue;
    int64_t gain = 0, shared = 0;
    int64_t rows = before == nullptr ? 0 : bundle == nullptr ? before->rows : bundle->rows;
    if (before != nullptr && rows + r.rows <= most_rows) {
      shared = shared_leaves(params, before->batch_idx, r.batch_idx);
      if (shared > r.first_leaf && shared > before->first_leaf) {
        gain = (shared - r.first_leaf) * leaf_saving(params) - bundling_cost(params, r, shared);
        if (bundle == nullptr) gain -= bundling_cost(params, *before, shared);
      }
    }
    if (gain > 0) {
      saved += gain;
      if (bundle == nullptr) {
        bundle = &plan.bundles[plan.num_bundles++];
        *bundle = {before - plan.requests, 1, before->rows, before->first_leaf, 0, 0, 0, 0};
        before->is_bundled = true;
      }
      r.is_bundled = true;
      r.shared = shared;
      ++bundle->members;
      bundle->rows += r.rows;
      if (r.first_leaf < bundle->first_leaf) bundle->first_leaf = r.first_leaf;
      if (shared > bundle->end_leaf) bundle->end_leaf = shared;
      if (shared > before->own_leaf) before->own_leaf = shared;
      r.own_leaf = shared;
    } else {
      bundle = nullptr;
    }
    before = &r;
  }
  bool pays = saved * kLeastPart > whole &&
              (num_threads() == 1 || saved * params.num_kv_heads > kSmallCost);
  int64_t kept = 0;
  for (int64_t i = 0; i < plan.num_bundles; ++i) {
    if (pays && place_states(params, plan, plan.bundles[i])) {
      plan.bundles[kept++] = plan.bundles[i];
    } else {
      dissolve(plan, plan.bundles[i]);
    }
  }
  plan.num_bundles = kept;
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
