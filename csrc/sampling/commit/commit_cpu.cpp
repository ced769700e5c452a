// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "sampling/commit/commit_walk.h"

namespace specops::SPECOPS_ISA {
namespace {

// Counts one more occurrence of a token: adds 2, because the lowest bit marks tokens of the prompt.
void count_token(int32_t* ids, int32_t* counts, int64_t capacity, int32_t token_id) {
  int64_t place = counted_place(ids, capacity, token_id);
  if (ids[place] != token_id) {
    int64_t used = counted_place(ids, capacity, -1);
    size_t num_bytes = (used - place) * sizeof(int32_t);
    std::memmove(ids + place + 1, ids + place, num_bytes);
    std::memmove(counts + place + 1, counts + place, num_bytes);
    ids[place] = token_id;
    counts[place] = 0;
  }
  counts[place] += 2;
}

}  // namespace

// For each request, truncates and changes emitted.token_ids by the rules of commit_walk.h, and then
// appends these tokens to the request's row.
// Cost:    batch * max_tokens ids read and written, the stop tables once per token; per new token,
//          the entries of its counted row that follow it.
// Assumes: ops.cpp has checked the capacity for every token; two requests never share a slot.
// Threads: the caller only, because a request needs only a few stores.
void commit_cpu(const CommitParams& params) {
  for (int64_t batch_idx = 0; batch_idx < params.batch; ++batch_idx) {
    int32_t slot = params.slots[batch_idx];
    if (slot < 0) {
      if (params.num_committed_tokens != nullptr) params.num_committed_tokens[batch_idx] = 0;
      continue;
    }
    CommitWalk walk = commit_walk(params, batch_idx, slot);
    CommitTokens tokens = committed_tokens(params, batch_idx, slot, walk);
    int32_t* row = params.token_ids + slot * params.token_ids_stride + tokens.len;
    int64_t table = slot * params.counts.num_counted;
    for (int64_t i = 0; i < walk.count; ++i) {
      row[i] = taken_token(tokens, i);
      if (params.counts.counted_token_ids == nullptr) continue;
      count_token(params.counts.counted_token_ids + table,
                  params.counts.token_counts + table,
                  params.counts.num_counted,
                  row[i]);
    }
    for (int64_t i = 0; i < params.max_tokens; ++i) store_output(params, batch_idx, walk, i);
    store_walk(params, batch_idx, slot, walk);
  }
}

}  // namespace specops::SPECOPS_ISA
