// SPDX-License-Identifier: Apache-2.0
// Code shared by the CPU and CUDA kernels of ngram_propose: a request's text, and its index.
//
// The index of a row is one hash table per size, min_size .. max_size, with equal parts of the row
// of `table`. It maps an n-gram to the end of its youngest occurrence or, for the leftmost match,
// of its first one. An n-gram's entry is one of the kProbes entries after its hash: its own, or the
// first empty one. Entries are never removed, so an empty entry ends a search.
//
// The index may be incomplete. `num_indexed` is the number of ends that it covers; later ends are
// scanned. So a row shorter than the scan has no index, a long prompt is indexed piecewise over
// several calls, and a row with a full table stays correct but slower. Every entry is verified
// against the text.
// the text says so too.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "suffix_tree/ngram_propose.h"

namespace specops {

constexpr int32_t kNgramMaxSizes = 16;         // a request with more sizes is scanned
constexpr int32_t kNgramMaxMinSize = 1 << 20;  // a request with a larger min_size is scanned
constexpr int32_t kNgramProbes = 64;           // entries that an n-gram may occupy
constexpr int64_t kNgramWorth = 4;             // a row is indexed from this many scans' length on
constexpr uint32_t kNgramEndBits = 24;  // low bits of an entry: 1 + the end; the rest: hash bits
constexpr int32_t kNgramMaxEnds = (1 << 24) - 1;  // later ends are scanned

// A request after its checks; one without capacity for drafts needs none.
struct NgramRequest {
  const int32_t* tokens;
  const int32_t* given;  // drafts already in the row, which follow the tokens
  int32_t len;
  int32_t num_given;
  int32_t room;  // capacity for drafts behind the given ones
  int32_t min_size;
  int32_t max_size;
  bool is_leftmost;
};

// An occurrence of a suffix: its number of tokens, and the index of the last one. Size 0: none.
struct NgramMatch {
  int32_t size = 0;
  int32_t end = -1;
};

// The work on a row's index in this call.
struct NgramPlan {
  int32_t num_sizes = 0;    // 0: no index
  int32_t num_entries = 0;  // entries per size
  int32_t num_indexed = 0;  // ends that it covers
  int32_t num_new = 0;      // ends to add; if num_indexed is 0, clear the table first
  int32_t key = 0;          // identifies the sizes, for the state
};

// Loads a request; an invalid one has no drafts and needs none.
SPECOPS_HOST_DEVICE NgramRequest load_request(const NgramProposeParams& params,
                                              int64_t batch_idx,
                                              ErrorCode* fault) {
  int32_t limit = params.max_draft_tokens[batch_idx];
  int32_t num_given = params.num_given_drafts ? params.num_given_drafts[batch_idx] : 0;
  NgramRequest out{
      .tokens = params.token_ids + batch_idx * params.stride,
      .given = params.draft_token_ids + batch_idx * params.capacity,
      .len = params.lens[batch_idx],
      .num_given = num_given,
      .room = (limit < params.capacity ? limit : static_cast<int32_t>(params.capacity)) - num_given,
      .min_size = params.min_sizes[batch_idx],
      .max_size = params.max_sizes[batch_idx],
      .is_leftmost = params.leftmost[batch_idx] != 0,
  };
  *fault = find_fault(params, batch_idx).code;
  if (*fault != ErrorCode::kNone) out.len = out.num_given = out.room = 0;
  return out;
}

SPECOPS_HOST_DEVICE int32_t text_len(const NgramRequest& request) {
  return request.len + request.num_given;
}

SPECOPS_HOST_DEVICE int32_t token_at(const NgramRequest& request, int32_t idx) {
  return idx < request.len ? request.tokens[idx] : request.given[idx - request.len];
}

// Returns how many tokens up to `end` equal the text's last ones, at most `most`.
SPECOPS_HOST_DEVICE int32_t match_size(const NgramRequest& request, int32_t end, int32_t most) {
  int32_t last = text_len(request) - 1;
  int32_t size = 0;
  while (size < most && size <= end &&
         token_at(request, end - size) == token_at(request, last - size)) {
    ++size;
  }
  return size;
}

// Adds a token to an n-gram's hash, in the order from its last token to its first.
SPECOPS_HOST_DEVICE uint32_t ngram_hash(uint32_t hash, int32_t token) {
  hash = (hash ^ static_cast<uint32_t>(token)) * 0x9e3779b1u;
  return hash ^ (hash >> 15);
}

SPECOPS_HOST_DEVICE uint32_t ngram_hash_at(const NgramRequest& request, int32_t end, int32_t size) {
  uint32_t hash = 0;
  for (int32_t i = 0; i < size; ++i) hash = ngram_hash(hash, token_at(request, end - i));
  return hash;
}

// Returns the first of the entries that an n-gram may occupy.
SPECOPS_HOST_DEVICE int32_t first_entry(uint32_t hash, int32_t num_entries) {
  return static_cast<int32_t>((static_cast<uint64_t>(hash) * static_cast<uint32_t>(num_entries)) >>
                              32);
}

SPECOPS_HOST_DEVICE uint32_t make_entry(uint32_t hash, int32_t end) {
  return (hash << kNgramEndBits) | static_cast<uint32_t>(end + 1);
}

// Returns the end in an entry if the entry may belong to an n-gram with this hash, else a negative
// number.
SPECOPS_HOST_DEVICE int32_t entry_end(uint32_t entry, uint32_t hash) {
  constexpr uint32_t kMask = (1u << kNgramEndBits) - 1;
  if (((entry ^ (hash << kNgramEndBits)) & ~kMask) != 0) return -1;
  return static_cast<int32_t>(entry & kMask) - 1;
}

SPECOPS_HOST_DEVICE bool same_ngram(const int32_t* tokens, int32_t a, int32_t b, int32_t size) {
  for (int32_t i = 0; i < size; ++i) {
    if (tokens[a - i] != tokens[b - i]) return false;
  }
  return true;
}

// Plans the index of a row. A row's state is the number of ends in its table, as -1 - ends once the
// table is full, and the key of its sizes; zeros: no table. A row that became shorter, or has other
// sizes, starts again.
SPECOPS_HOST_DEVICE NgramPlan plan_index(const NgramProposeParams& params,
                                         const NgramRequest& request,
                                         const int32_t* state) {
  NgramPlan plan;
  if (params.table == nullptr || request.room <= 0) return plan;
  int32_t num_sizes = request.max_size - request.min_size + 1;
  if (num_sizes > kNgramMaxSizes || request.min_size > kNgramMaxMinSize) return plan;
  int64_t num_entries = params.table_entries / num_sizes;
  if (num_entries == 0) return plan;
  if (num_entries > kNgramMaxEnds * 4) num_entries = kNgramMaxEnds * 4;
  plan.num_sizes = num_sizes;
  plan.num_entries = static_cast<int32_t>(num_entries);
  plan.key = 1 + ((request.min_size * kNgramMaxSizes + num_sizes - 1) * 2 + request.is_leftmost);
  bool is_full = state[0] < 0;
  plan.num_indexed = is_full ? -1 - state[0] : state[0];
  if (state[1] != plan.key || plan.num_indexed >= request.len) {
    is_full = false;
    plan.num_indexed = 0;
  }
  if (is_full) return plan;
  // A smaller index would cost more than it saves.
  if (plan.num_indexed == 0 && request.len < kNgramWorth * params.scan_tokens) return plan;
  int64_t stop = int64_t{request.len} - 1 - params.scan_tokens;
  if (stop > kNgramMaxEnds) stop = kNgramMaxEnds;
  if (stop > plan.num_indexed + params.index_tokens) stop = plan.num_indexed + params.index_tokens;
  if (stop > plan.num_indexed) plan.num_new = static_cast<int32_t>(stop) - plan.num_indexed;
  return plan;
}

// Stores the progress: all ends before `num_indexed`, or fewer if the table is full.
SPECOPS_HOST_DEVICE void keep_state(const NgramPlan& plan, int32_t num_indexed, int32_t* state) {
  if (plan.num_new == 0) return;
  bool is_full = num_indexed < plan.num_indexed + plan.num_new;
  state[0] = is_full ? -1 - num_indexed : num_indexed;
  state[1] = plan.key;
}

}  // namespace specops
