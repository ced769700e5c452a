// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/device.cuh"
#include "sampling/commit/commit_walk.h"

namespace specops {

constexpr int kCommitThreads = 128;

struct CommitShared {
  CommitWalk walk;      // written by thread 0
  CommitTokens tokens;  // written by thread 0
  int64_t num_counted;  // number of ids in the request's row of counted_token_ids
  bool is_fault;
  int32_t new_ids[kCommitThreads];  // ids that the row does not have yet; -1 if a thread has none
};

// Adds the tokens of a step to a row of `used` counted ids, one token per thread at a time. To
// insert new ids, entries move up, starting from the end, one block of entries after another; an
// entry moves by the number of new ids below it.
__device__ inline void count_tokens(const CommitTokens& tokens,
                                    int32_t* ids,
                                    int32_t* counts,
                                    int64_t capacity,
                                    int64_t used,
                                    int32_t* new_ids) {
  int thread_idx = threadIdx.x;
  for (int64_t begin = 0; begin < tokens.count; begin += kCommitThreads) {
    int64_t rest = tokens.count - begin;
    int num_tokens = rest < kCommitThreads ? static_cast<int>(rest) : kCommitThreads;
    int32_t token_id = -1, occurrences = 0;
    bool is_first = thread_idx < num_tokens;  // the first thread with an id handles it
    if (is_first) {
      token_id = taken_token(tokens, begin + thread_idx);
      for (int i = 0; i < num_tokens; ++i) {
        if (taken_token(tokens, begin + i) != token_id) continue;
        if (i < thread_idx) is_first = false;
        ++occurrences;
      }
    }
    int64_t place = is_first ? counted_place(ids, capacity, token_id) : 0;
    bool is_new = is_first && (place == capacity || ids[place] != token_id);
    if (is_first && !is_new) counts[place] += 2 * occurrences;
    new_ids[thread_idx] = is_new ? token_id : -1;
    int num_new = __syncthreads_count(is_new);  // all threads have searched the row
    auto new_below = [&](int32_t id) {
      int below = 0;
      for (int i = 0; i < num_tokens; ++i) {
        below += static_cast<uint32_t>(new_ids[i]) < static_cast<uint32_t>(id);
      }
      return below;
    };
    for (int64_t end = num_new > 0 ? used : 0; end > 0; end -= kCommitThreads) {
      int64_t idx = end - 1 - thread_idx;
      int32_t id = idx >= 0 ? ids[idx] : 0, count = idx >= 0 ? counts[idx] : 0;
      int distance = idx >= 0 ? new_below(id) : 0;
      if (!__syncthreads_or(distance > 0)) break;  // then all earlier entries stay in place, too
      if (distance > 0) {
        ids[idx + distance] = id;
        counts[idx + distance] = count;
      }
    }
    if (is_new) {
      place += new_below(token_id);
      ids[place] = token_id;
      counts[place] = 2 * occurrences;
    }
    used += num_new;
    __syncthreads();  // the row is consistent again
  }
}

// For each request, truncates and changes emitted.token_ids by the rules of commit_walk.h, and then
// appends these tokens to the request's row.
// Grid:    x = request, unbounded.
// Block:   128 threads; the first walks, all of them copy, truncate and count.
// Smem:    the walk and an id per thread, 0.6 KB.
// Cost:    batch * max_tokens ids read and written, the stop tables once per token, the counted row
//          up to where new tokens go; bound by the latency of the walk.
// Assumes: two requests never share a slot.
// Order:   the walk is serial, the rest are copies. A request without capacity for its tokens, or
//          with an invalid slot, is left unchanged and reported.
template <typename = void>
__global__ void __launch_bounds__(kCommitThreads, 1) commit_kernel(CommitParams params) {
  wait_for_previous_kernel();
  auto* shared = reinterpret_cast<CommitShared*>(shared_memory());
  int64_t batch_idx = blockIdx.x;
  int thread_idx = threadIdx.x;
  int32_t slot = params.slots[batch_idx];
  if (thread_idx == 0 && params.num_committed_tokens != nullptr) {
    params.num_committed_tokens[batch_idx] = 0;
  }
  if (slot == -1) return;
  if (Fault fault = find_fault(params, batch_idx); fault.found()) {
    if (thread_idx == 0) report_error(params.error, fault.code);
    return;
  }
  int32_t* ids = nullptr;
  int32_t* counts = nullptr;
  if (params.counts.counted_token_ids != nullptr) {
    ids = params.counts.counted_token_ids + slot * params.counts.num_counted;
    counts = params.counts.token_counts + slot * params.counts.num_counted;
  }

  if (thread_idx == 0) {
    Fault fault = find_room_fault(params, slot, 0);
    if (!fault.found()) {
      shared->walk = commit_walk(params, batch_idx, slot);
      shared->tokens = committed_tokens(params, batch_idx, slot, shared->walk);
      fault = find_room_fault(params, slot, shared->walk.count);
    }
    shared->is_fault = fault.found();
    if (fault.found()) report_error(params.error, fault.code);
  }
  if (thread_idx == kWarpSize && ids != nullptr) {
    shared->num_counted = counted_place(ids, params.counts.num_counted, -1);
  }
  __syncthreads();
  if (shared->is_fault) return;
  CommitWalk walk = shared->walk;
  CommitTokens tokens = shared->tokens;

  if (ids != nullptr) {
    int64_t used = shared->num_counted, num_new = 0;
    for (int64_t begin = 0; begin < tokens.count; begin += kCommitThreads) {
      int64_t idx = begin + thread_idx;
      num_new += __syncthreads_count(idx < tokens.count &&
                                     is_new_token(ids, params.counts.num_counted, tokens, idx));
    }
    if (Fault fault = find_counted_fault(params, slot, used, num_new); fault.found()) {
      if (thread_idx == 0) report_error(params.error, fault.code);
      return;
    }
    count_tokens(tokens, ids, counts, params.counts.num_counted, used, shared->new_ids);
  }

  int32_t* end = params.token_ids + slot * params.token_ids_stride + tokens.len;
  for (int64_t idx = thread_idx; idx < params.max_tokens; idx += kCommitThreads) {
    if (idx < tokens.count) end[idx] = taken_token(tokens, idx);
    store_output(params, batch_idx, walk, idx);
  }
  if (thread_idx == 0) store_walk(params, batch_idx, slot, walk);
}

}  // namespace specops
