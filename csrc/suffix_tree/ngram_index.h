// SPDX-License-Identifier: Apache-2.0
// Code that the CPU and CUDA kernels of ngram_propose share: a request's text, and its index.
//
// The index of a row is one hash table per n-gram size, min_size .. max_size, each in an equal part
// of the row of `table`. A table maps an n-gram to the position of its last token (its "end"), for
// the youngest occurrence or, if the leftmost match is preferred, for the first one. An n-gram is
// stored in one of the kNgramProbes entries from its hash on: the first that already has it or is
// empty. Entries are never removed, so an empty entry ends a search.
//
// The index may be incomplete: `num_indexed` is the number of ends that it covers, and later ends
// are scanned. Therefore a row that is shorter than the scan has no index, a long prompt is indexed
// piecewise over several calls, and a row whose table is full stays correct but slower. A match
// found in the index is always compared with the text, because different n-grams may have the same
// hash.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "suffix_tree/ngram_propose.h"

namespace specops {

constexpr int32_t kNgramMaxSizes = 16;         // a request with more sizes is scanned
constexpr int32_t kNgramMaxMinSize = 1 << 20;  // a request with a larger min_size is scanned
constexpr int32_t kNgramProbes = 64;           // entries in which an n-gram may be stored
constexpr int64_t kNgramWorth = 4;             // shorter rows than this many scans have no index
constexpr uint32_t kNgramEndBits = 24;  // low bits of an entry: 1 + the end; the rest: hash bits
constexpr int32_t kNgramMaxEnds = (1 << 24) - 1;  // ends from this one on are scanned

// A request after validation. A request without capacity for drafts needs no validation.
struct NgramRequest {
  const int32_t* tokens;
  const int32_t* given;  // drafts already in the row, which follow its tokens
  int32_t len;
  int32_t num_given;
  int32_t room;  // capacity for drafts after those already in the row
  int32_t min_size;
  int32_t max_size;
  bool is_leftmost;
};

// An occurrence of a suffix of the text: its number of tokens, and the index of its last token.
// Size 0: none.
struct NgramMatch {
  int32_t size = 0;
  int32_t end = -1;
};

// Work that this call does on the index of a row.
struct NgramPlan {
  int32_t num_sizes = 0;    // 0: no index
  int32_t num_entries = 0;  // entries per size
  int32_t num_indexed = 0;  // ends that the index covers
  int32_t num_new = 0;      // ends to add; if num_indexed is 0, clear the table first
  int32_t key = 0;          // identifies the sizes, stored in the state
};

// Loads a request. An invalid request gets no drafts and has no capacity for any.
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

// Returns how many tokens up to `end` equal the last tokens of the text, at most `most`.
SPECOPS_HOST_DEVICE int32_t match_size(const NgramRequest& request, int32_t end, int32_t most) {
  int32_t last = text_len(request) - 1;
  int32_t size = 0;
  while (size < most && size <= end &&
         token_at(request, end - size) == token_at(request, last - size)) {
    ++size;
  }
  return size;
}

// Adds a token to the hash of an n-gram. Tokens are added from the last to the first.
SPECOPS_HOST_DEVICE uint32_t ngram_hash(uint32_t hash, int32_t token) {
  hash = (hash ^ static_cast<uint32_t>(token)) * 0x9e3779b1u;
  return hash ^ (hash >> 15);
}

SPECOPS_HOST_DEVICE uint32_t ngram_hash_at(const NgramRequest& request, int32_t end, int32_t size) {
  uint32_t hash = 0;
  for (int32_t i = 0; i < size; ++i) hash = ngram_hash(hash, token_at(request, end - i));
  return hash;
}

// Returns the first of the entries in which an n-gram may be stored.
SPECOPS_HOST_DEVICE int32_t first_entry(uint32_t hash, int32_t num_entries) {
  return static_cast<int32_t>((static_cast<uint64_t>(hash) * static_cast<uint32_t>(num_entries)) >>
                              32);
}

SPECOPS_HOST_DEVICE uint32_t make_entry(uint32_t hash, int32_t end) {
  return (hash << kNgramEndBits) | static_cast<uint32_t>(end + 1);
}

// Returns the end stored in an entry if the entry may belong to an n-gram with this hash; otherwise
// a negative number.
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

// Plans the index of a row. Its state has the number of ends in its tables (as -1 - ends if a table
// is full) and the key of its sizes; zeros: there is no index. If a row has become shorter or has
// other sizes, its index starts again.
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
  // A smaller index would cost more time than it saves.
  if (plan.num_indexed == 0 && request.len < kNgramWorth * params.scan_tokens) return plan;
  int64_t stop = int64_t{request.len} - 1 - params.scan_tokens;
  if (stop > kNgramMaxEnds) stop = kNgramMaxEnds;
  if (stop > plan.num_indexed + params.index_tokens) stop = plan.num_indexed + params.index_tokens;
  if (stop > plan.num_indexed) plan.num_new = static_cast<int32_t>(stop) - plan.num_indexed;
  return plan;
}

// Stores the progress of the index: it covers all ends before `num_indexed`, or fewer if a table is
// full.
SPECOPS_HOST_DEVICE void keep_state(const NgramPlan& plan, int32_t num_indexed, int32_t* state) {
  if (plan.num_new == 0) return;
  bool is_full = num_indexed < plan.num_indexed + plan.num_new;
  state[0] = is_full ? -1 - num_indexed : num_indexed;
  state[1] = plan.key;
}

}  // namespace specops
