// SPDX-License-Identifier: Apache-2.0
// Who computes what of append_attention on the CPU: the requests of a call cut into units of work.
// Nothing here reaches a bit of the result.
#pragma once

#include "attention/append_attention/append_attention.h"
#include "common/parallel.h"

namespace specops::SPECOPS_ISA {
namespace {

constexpr int kLeafTokens = static_cast<int>(kAttentionLeaf);
constexpr int64_t kChunkLeaves = kAttentionChunk / kAttentionLeaf;
constexpr int kPageBlock = 16;  // tokens that always lie in one page, at one stride
constexpr int kPlanned = 256;   // requests planned at once, on the stack
constexpr int kMaxTile = static_cast<int>(kAttentionTile);
constexpr int kMaxBundle = 256;           // rows of a unit, which tiles share its K and V in L2
constexpr int kStateFloats = 32768;       // output state of one unit: 128 KiB
constexpr int64_t kAheadBytes = 1 << 18;  // K and V of one leaf that a unit reads ahead into L2
constexpr int64_t kColdBytes = 1 << 20;   // more KV than this is taken to lie in memory
constexpr int64_t kSmallCost = 30000;     // cycles, below which threads are not woken

// Of keys of D elements: columns of V, and elements between the heads of a token. Heads that share
// latents begin at the same place.
template <int D>
constexpr int kValueDim = static_cast<int>(value_dim_of(D));
template <int D>
constexpr int kHeadStride = D == kLatentKeyDim ? 0 : D;

// A request as planned.
struct Request {
  int64_t batch_idx, qo_begin, qo_len, kv_len;
  int64_t rows;  // (query row, query head of one KV head)
  int64_t tile_rows, tiles;
  int64_t first_leaf, last_leaf;  // of its rows together
  int64_t own_leaf;    // from here on it reads alone; a bundle has reduced what lies before
  int64_t shared;      // leading leaves that are those of the bundle's request before
  int64_t partial;     // where its chunk states begin in the workspace, in floats; -1: none
  int64_t first_unit;  // of its own leaves
  int64_t heads_per_unit, head_groups;
  int64_t chunks;   // above 1: each chunk of its own leaves is a unit
  bool is_bundled;  // a member of a bundle
};

// Neighbours that begin with the same leaves, each with rows for no more than a tile: what they
// share is reduced first, for the rows of all of them, into the states of their chunks.
struct Bundle {
  int64_t first, members;  // the place of the first among the requests, and how many there are
  int64_t rows;            // of all members
  int64_t first_leaf, end_leaf;  // what any two of them share
  int64_t first_unit;
  int64_t heads_per_unit, head_groups;
};

inline int64_t chunks_of(const Request& r) {
  return r.last_leaf / kChunkLeaves - r.first_leaf / kChunkLeaves + 1;
}

// Floats of the state of one chunk of a request.
inline int64_t state_floats(const AppendAttentionParams& params, const Request& r) {
  return r.qo_len * params.num_qo_heads * (value_dim_of(params.head_dim) + 2);
}

// The first position that a row at this position sees.
inline int64_t window_begin(const AppendAttentionParams& params, int64_t position) {
  if (params.sliding_window == 0 || position < params.sliding_window) return 0;
  return position - params.sliding_window + 1;
}

// Behind the last position that it sees, of a request of so many tokens.
inline int64_t seen_end(const AppendAttentionParams& params, int64_t position, int64_t kv_len) {
  return params.is_causal ? position + 1 : kv_len;
}

// The requests of a call, at most kPlanned at a time, cut into units: those of bundles, and then
// those of requests.
struct Plan {
  Request requests[kPlanned];
  int64_t costs[kPlanned];  // of the request's own leaves, in cycles, about
  int64_t count;            // requests
  Bundle bundles[kPlanned / 2];
  int64_t num_bundles, bundle_units;
  int64_t units;
  int64_t bundle_cost, total_cost;  // of all bundles; of all requests' own leaves
  int64_t used_floats;              // of the workspace
  bool small;                       // not worth waking a thread
  bool cold;  // the KV does not fit a cache, so it pays to read it in memory order
};

// Fills one request, as if it shared nothing.
inline void load_request(const AppendAttentionParams& params, int64_t batch_idx, Request& r) {
  int64_t group = params.num_qo_heads / params.num_kv_heads;
  r.batch_idx = batch_idx;
  r.qo_begin = params.qo_indptr[batch_idx];
  r.qo_len = params.qo_indptr[batch_idx + 1] - r.qo_begin;
  r.kv_len = params.kv_lens[batch_idx];
  r.partial = -1;
  r.shared = r.chunks = 0;
  r.is_bundled = false;
  if (r.qo_len == 0) return;
  r.first_leaf = window_begin(params, r.kv_len - r.qo_len) / kLeafTokens;
  r.own_leaf = r.first_leaf;
  r.last_leaf = (r.kv_len - 1) / kLeafTokens;
  r.rows = r.qo_len * group;
  r.tile_rows = r.rows <= kMaxTile ? r.qo_len : group <= kMaxTile ? kMaxTile / group : 1;
  r.tiles = (r.qo_len + r.tile_rows - 1) / r.tile_rows;
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
