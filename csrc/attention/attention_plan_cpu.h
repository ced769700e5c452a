// SPDX-License-Identifier: Apache-2.0
// Who computes what of append_attention on the CPU: the requests of a call cut into units of work.
// Nothing here reaches a bit of the result.
#pragma once

#include "attention/append_attention.h"
#include "common/parallel.h"

namespace specops::SPECOPS_ISA {
namespace {

constexpr int kLeafTokens = static_cast<int>(kAttentionLeaf);
constexpr int64_t kChunkLeaves = kAttentionChunk / kAttentionLeaf;
constexpr int kPageBlock = 16;  // tokens that always lie in one page, at one stride
constexpr int kPlanned = 256;   // requests planned at once, on the stack
constexpr int kMaxTile = static_cast<int>(kAttentionTile);
constexpr int kWholeTile = 60;            // rows of all tiles but the last: whole vectors of rows
constexpr int kMaxBundle = 256;           // rows of a unit, which tiles share its K and V in L2
constexpr int kStateFloats = 32768;       // output state of one unit: 128 KiB
constexpr int64_t kAheadBytes = 1 << 18;  // K and V of one leaf that a unit reads ahead into L2
constexpr int64_t kColdBytes = 1 << 20;   // more KV than this is taken to lie in memory
constexpr int64_t kSmallCost = 30000;     // cycles, below which threads are not woken

// A request as planned. Neighbours of one prefix, each with rows for no more than a tile, may form a
// bundle; any other request is a bundle of its own.
struct Request {
  int64_t batch_idx, qo_begin, qo_len, kv_len;
  int64_t tile_rows, tiles;
  int64_t first_leaf, last_leaf;  // of its rows together
  int64_t shared;                 // leading leaves that are those of the bundle's request before
  int64_t partial;                // where its chunk states begin in the workspace, in floats
  int64_t first_unit;             // of the bundle; in a bundle, past its units
  // Of the bundle, in its first request.
  int64_t members;  // 0: the request is a later one of a bundle, or has no rows
  int64_t rows;     // (query row, query head of one KV head)
  int64_t bundle_first_leaf, bundle_last_leaf;
  int64_t heads_per_unit, head_groups;
  int64_t chunks;  // above 1: each chunk is a unit of its own, for the whole bundle
};

inline int64_t chunks_of(const Request& r) {
  return r.last_leaf / kChunkLeaves - r.first_leaf / kChunkLeaves + 1;
}

// The first position that a row at this position sees.
inline int64_t window_begin(const AppendAttentionParams& params, int64_t position) {
  if (params.sliding_window == 0 || position < params.sliding_window) return 0;
  return position - params.sliding_window + 1;
}

// Leading leaves that two requests have in common: those of the narrowest group with both.
inline int64_t shared_leaves(const AppendAttentionParams& params, int64_t a, int64_t b) {
  int64_t tokens = 0;
  for (int64_t level = 0; level < params.num_prefix_levels; ++level) {
    const int32_t* leaders = params.prefix_leaders + level * params.batch;
    if (leaders[a] != leaders[b]) break;
    tokens = params.prefix_lens[level * params.batch + b];
  }
  return tokens / kLeafTokens;
}

// The requests of a call, at most kPlanned at a time, cut into units.
struct Plan {
  Request requests[kPlanned];
  int64_t costs[kPlanned];  // of the bundle that begins there, in cycles, about
  int64_t count;            // requests
  int64_t total_cost, units;
  bool small;  // not worth waking a thread
  bool cold;   // the KV does not fit a cache, so it pays to read it in memory order
};

// Fills one request but for its bundle.
inline void load_request(const AppendAttentionParams& params, int64_t batch_idx, Request& r) {
  int64_t group = params.num_qo_heads / params.num_kv_heads;
  r.batch_idx = batch_idx;
  r.qo_begin = params.qo_indptr[batch_idx];
  r.qo_len = params.qo_indptr[batch_idx + 1] - r.qo_begin;
  r.kv_len = params.kv_lens[batch_idx];
  r.partial = -1;
  r.shared = r.members = r.chunks = 0;
  if (r.qo_len == 0) return;
  r.first_leaf = window_begin(params, r.kv_len - r.qo_len) / kLeafTokens;
  r.last_leaf = (r.kv_len - 1) / kLeafTokens;
  // Whole vectors of rows where there are many.
  r.rows = r.qo_len * group;
  r.tile_rows = r.rows <= kMaxTile ? r.qo_len : group <= kWholeTile ? kWholeTile / group : 1;
  r.tiles = (r.qo_len + r.tile_rows - 1) / r.tile_rows;
}

// Loads the requests, joins neighbours to bundles, and says what each bundle costs.
template <typename T, int D>
void plan_bundles(const AppendAttentionParams& params, int64_t first_request, Plan& plan) {
  int64_t group = params.num_qo_heads / params.num_kv_heads;
  int64_t threads = num_threads();
  int64_t all_rows =
      (params.qo_indptr[first_request + plan.count] - params.qo_indptr[first_request]) * group;
  // A bundle is cut into KV heads and chunks; where these are too few for the threads, it gets no
  // more than its share of the rows.
  auto bundle_rows = [&](const Request& first) {
    int64_t pieces = params.num_kv_heads * (params.workspace_size > 0 ? chunks_of(first) : 1);
    int64_t share = all_rows / ((threads + pieces - 1) / pieces);
    int64_t most = kStateFloats / D < kMaxBundle ? kStateFloats / D : kMaxBundle;
    return share < most ? share : most;
  };
  int64_t kv_bytes = 0;
  plan.total_cost = 0;
  int64_t head = -1, before = -1;  // of the bundle that may go on, and its last request
  for (int64_t i = 0; i < plan.count; ++i) {
    Request& r = plan.requests[i];
    load_request(params, first_request + i, r);
    plan.costs[i] = 0;
    if (r.qo_len == 0) continue;
    int64_t leaves = r.last_leaf - r.first_leaf + 1, read = leaves;
    if (params.num_prefix_levels > 0 && r.tiles == 1) {
      if (head >= 0 && plan.requests[head].rows + r.rows <= bundle_rows(plan.requests[head])) {
        r.shared = shared_leaves(params, plan.requests[before].batch_idx, r.batch_idx);
        if (r.shared <= r.first_leaf) r.shared = 0;
      }
      before = i;
    }
    if (r.shared > 0) {
      Request& first = plan.requests[head];
      ++first.members;
      first.rows += r.rows;
      if (r.first_leaf < first.bundle_first_leaf) first.bundle_first_leaf = r.first_leaf;
      if (r.last_leaf > first.bundle_last_leaf) first.bundle_last_leaf = r.last_leaf;
      read -= r.shared - r.first_leaf;
    } else {
      head = r.tiles == 1 ? i : -1;
      r.members = 1;
      r.bundle_first_leaf = r.first_leaf;
      r.bundle_last_leaf = r.last_leaf;
    }
    // About a cycle each: 8 bytes of KV, and a quarter of a multiplied vector.
    int64_t size = static_cast<int64_t>(sizeof(T));
    int64_t cost = params.num_kv_heads * D * (16 * size * read + 4 * r.rows * leaves);
    plan.costs[r.shared > 0 ? head : i] += cost;
    plan.total_cost += cost;
    kv_bytes += read * kLeafTokens * 2 * params.num_kv_heads * D * size;
  }
  plan.small = threads == 1 || plan.total_cost < kSmallCost;
  plan.cold = kv_bytes > kColdBytes;
}

// Gives each member of the bundle that begins with `first` its place in the workspace, from `used`
// floats on, and returns how many they take in all; -1, and no places, where these do not fit.
inline int64_t place_partials(const AppendAttentionParams& params, Request* first, int64_t used) {
  int64_t floats = 0, left = first->members;
  for (Request* member = first; left > 0; ++member) {
    if (member->qo_len == 0) continue;
    member->partial = used + floats;
    floats += chunks_of(*member) * member->qo_len * params.num_qo_heads * (params.head_dim + 2);
    --left;
  }
  if (used + floats <= params.workspace_size) return floats;
  left = first->members;
  for (Request* member = first; left > 0; ++member) {
    if (member->qo_len == 0) continue;
    member->partial = -1;
    --left;
  }
  return -1;
}

// Cuts bundles of much work into their chunks, and returns how many pieces there are then.
inline int64_t cut_chunks(const AppendAttentionParams& params, Plan& plan) {
  int64_t used = 0, pieces = 0;
  for (int64_t i = 0; i < plan.count; ++i) {
    Request& r = plan.requests[i];
    if (r.members == 0) continue;
    r.chunks = 1;
    int64_t chunks = r.bundle_last_leaf / kChunkLeaves - r.bundle_first_leaf / kChunkLeaves + 1;
    bool much = plan.costs[i] > plan.total_cost / (4 * num_threads());
    if (!plan.small && r.tiles == 1 && chunks > 1 && much) {
      int64_t floats = place_partials(params, &r, used);
      if (floats >= 0) {
        r.chunks = chunks;
        used += floats;
      }
    }
    pieces += r.tiles * r.chunks;
  }
  return pieces;
}

// Cuts the requests into units. Only the cutting knows of threads: it decides where states live,
// never the order in which they are folded.
template <typename T, int D>
void make_plan(const AppendAttentionParams& params, int64_t first_request, Plan& plan) {
  int64_t left = params.batch - first_request;
  plan.count = left < kPlanned ? left : kPlanned;
  plan_bundles<T, D>(params, first_request, plan);
  int64_t pieces = cut_chunks(params, plan);
  int64_t groups = plan.small || pieces == 0 ? 1 : (2 * num_threads() + pieces - 1) / pieces;
  plan.units = 0;
  for (int64_t i = 0; i < plan.count; ++i) {
    Request& r = plan.requests[i];
    r.first_unit = plan.units;
    if (r.members == 0) continue;
    int64_t rows = r.tiles > 1 ? r.tile_rows * params.num_qo_heads / params.num_kv_heads : r.rows;
    int64_t leaf_bytes = 2 * kLeafTokens * D * static_cast<int64_t>(sizeof(T));
    int64_t heads = r.tiles > 1 ? 1 : kAheadBytes / leaf_bytes;
    if (heads > kStateFloats / (rows * D)) heads = kStateFloats / (rows * D);
    int64_t share = (params.num_kv_heads + groups - 1) / groups;
    if (heads > share) heads = share;
    r.heads_per_unit = heads < 1 ? 1 : heads;
    r.head_groups = (params.num_kv_heads + r.heads_per_unit - 1) / r.heads_per_unit;
    plan.units += r.tiles * r.chunks * r.head_groups;
  }
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
