// SPDX-License-Identifier: Apache-2.0
// Division of the work of append_attention on the CPU: the requests of a call are divided into
// units of work. The bits of the result do not depend on it.
#pragma once

#include "attention/append_attention/append_attention.h"
#include "common/parallel.h"

namespace specops::SPECOPS_ISA {
namespace {

constexpr int kLeafTokens = static_cast<int>(kAttentionLeaf);
constexpr int64_t kChunkLeaves = kAttentionChunk / kAttentionLeaf;
constexpr int kPageBlock = 16;  // tokens that always lie in one page, at one stride
constexpr int kPlanned = 256;   // requests planned at once; the plan is on the stack
constexpr int kMaxTile = static_cast<int>(kAttentionTile);
constexpr int kMaxBundle = 256;           // most rows of a unit; its tiles share K and V in L2
constexpr int kStateFloats = 32768;       // output state of one unit: 128 KiB
constexpr int64_t kAheadBytes = 1 << 18;  // K and V of one leaf that a unit reads ahead into L2
constexpr int64_t kColdBytes = 1 << 20;   // a larger KV is assumed to be in memory, not in a cache
constexpr int64_t kSmallCost = 30000;     // cycles; less work does not wake other threads

// Number of columns of V, and distance in elements between the heads of a token, if keys have D
// elements. All heads that share latents start at the same address.
template <int D>
constexpr int kValueDim = static_cast<int>(value_dim_of(D));
template <int D>
constexpr int kHeadStride = D == kLatentKeyDim ? 0 : D;

// A request of the plan.
struct Request {
  int64_t batch_idx, qo_begin, qo_len, kv_len;
  int64_t rows;  // packed rows (query row, query head of one KV head)
  int64_t tile_rows, tiles;
  int64_t first_leaf, last_leaf;  // leaves that any row of the request sees
  int64_t own_leaf;               // first own leaf; its bundle reduces the leaves before
  int64_t shared;                 // leading leaves shared with the previous request of the bundle
  int64_t partial;                // chunk states' offset in the workspace, in floats; -1: none
  int64_t first_unit;             // first unit for the request's own leaves
  int64_t heads_per_unit, head_groups;
  int64_t chunks;   // if above 1, each chunk of the request's own leaves is a unit
  bool is_bundled;  // member of a bundle
};

// Bundle of neighboring requests that begin with the same leaves; each has at most one tile of
// rows. The shared leaves are reduced first, for the rows of all members, and their chunk states
// are stored. Each member then continues from these states.
struct Bundle {
  int64_t first, members;        // index of the first request, and number of members
  int64_t rows;                  // rows of all members
  int64_t first_leaf, end_leaf;  // leaves that any two members share
  int64_t first_unit;
  int64_t heads_per_unit, head_groups;
};

inline int64_t chunks_of(const Request& r) {
  return r.last_leaf / kChunkLeaves - r.first_leaf / kChunkLeaves + 1;
}

// Returns the size, in floats, of the state of one chunk of a request.
inline int64_t state_floats(const AppendAttentionParams& params, const Request& r) {
  return r.qo_len * params.num_qo_heads * (value_dim_of(params.head_dim) + 2);
}

// Returns the first position that a row at `position` sees.
inline int64_t window_begin(const AppendAttentionParams& params, int64_t position) {
  if (params.sliding_window == 0 || position < params.sliding_window) return 0;
  return position - params.sliding_window + 1;
}

// Returns the end of the positions that a row at `position` sees, in a request of kv_len tokens.
inline int64_t seen_end(const AppendAttentionParams& params, int64_t position, int64_t kv_len) {
  return params.is_causal ? position + 1 : kv_len;
}

// The requests of a call, at most kPlanned at a time, divided into units. The units of bundles run
// first, then those of requests.
struct Plan {
  Request requests[kPlanned];
  int64_t costs[kPlanned];  // approximate cycles for the request's own leaves
  int64_t count;            // number of requests
  Bundle bundles[kPlanned / 2];
  int64_t num_bundles, bundle_units;
  int64_t units;
  int64_t bundle_cost, total_cost;  // costs of all bundles; costs of all requests' own leaves
  int64_t used_floats;              // floats used in the workspace
  bool small;                       // too little work to wake other threads
  bool cold;  // the KV exceeds the caches, so reading it in memory order pays off
};

// Sets up one request without any shared leaves.
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
