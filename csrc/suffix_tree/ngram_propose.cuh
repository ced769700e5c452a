// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/device.cuh"
#include "suffix_tree/ngram_index.h"
#include "suffix_tree/ngram_propose.h"
#include "suffix_tree/ngram_share.h"

namespace specops {

// Two blocks per SM, so that one runs while the other one waits.
constexpr int kNgramThreads = 512;
constexpr int kNgramWarps = kNgramThreads / kWarpSize;
constexpr int kNgramTokens = 8;  // loads in flight per thread

struct NgramShared {
  uint64_t warp_best[kNgramWarps];     // best match found by the scan; see match_key
  uint64_t indexed_best[kNgramWarps];  // best match found in the index, by size
  int32_t num_indexed[kNgramWarps];    // ends that the table covers, by size
};

// Returns a match as a key. The match with the greater key is preferred; 0 is no match.
__device__ inline uint64_t match_key(const NgramRequest& request, int32_t size, int32_t end) {
  uint32_t place = static_cast<uint32_t>(end + 1);
  return (static_cast<uint64_t>(size) << 32) | (request.is_leftmost ? ~place : place);
}

// Returns the end of the match that a key stands for.
__device__ inline int32_t match_end(const NgramRequest& request, uint64_t key) {
  auto place = static_cast<uint32_t>(key);
  return static_cast<int32_t>(request.is_leftmost ? ~place : place) - 1;
}

__device__ inline int32_t nth_entry(int32_t first, int32_t n, int32_t num_entries) {
  int32_t idx = first + n;
  return idx < num_entries ? idx : idx - num_entries;
}

// Looks up the last tokens of the text in the table of a size, with a whole warp. Returns a key; 0
// if not found.
__device__ inline uint64_t find_indexed(const NgramRequest& request,
                                        const NgramPlan& plan,
                                        const uint32_t* table,
                                        int32_t size) {
  int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  int32_t last = text_len(request) - 1;
  if (plan.num_indexed == 0 || size > last) return 0;
  uint32_t hash = ngram_hash_at(request, last, size);
  int32_t first = first_entry(hash, plan.num_entries);
  int32_t probes = plan.num_entries < kNgramProbes ? plan.num_entries : kNgramProbes;
  for (int32_t begin = 0; begin < probes; begin += kWarpSize) {
    bool is_probe = begin + lane < probes;
    uint32_t entry = is_probe ? table[nth_entry(first, begin + lane, plan.num_entries)] : 0;
    unsigned empty = __ballot_sync(kFullMask, entry == 0);
    int32_t end = entry_end(entry, hash);
    bool is_found = entry != 0 && end >= size - 1 && end < plan.num_indexed &&
                    match_size(request, end, size) == size;
    unsigned found = __ballot_sync(kFullMask, is_found);
    if (found != 0) {
      end = __shfl_sync(kFullMask, end, __ffs(static_cast<int>(found)) - 1);
      return match_key(request, size, end);
    }
    if (empty != 0) return 0;
  }
  return 0;
}

// Adds the ends of the plan to the table of a size, 32 at a time. Returns how many ends the table
// then covers.
__device__ inline int32_t extend_index(const NgramRequest& request,
                                       const NgramPlan& plan,
                                       uint32_t* table,
                                       int32_t size) {
  int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  int32_t stop = plan.num_indexed + plan.num_new;
  int32_t probes = plan.num_entries < kNgramProbes ? plan.num_entries : kNgramProbes;
  for (int32_t begin = plan.num_indexed; begin < stop; begin += kWarpSize) {
    int32_t end = begin + lane;
    bool is_waiting = end < stop && end >= size - 1;
    uint32_t hash = is_waiting ? ngram_hash_at(request, end, size) : 0;
    int32_t first = first_entry(hash, plan.num_entries);
    int32_t probe = 0;
    bool is_refused = false;
    while (__any_sync(kFullMask, is_waiting)) {
      bool is_writing = false;
      int32_t idx = 0;
      for (; is_waiting && !is_writing && probe < probes;) {
        idx = nth_entry(first, probe, plan.num_entries);
        uint32_t entry = table[idx];
        int32_t other = entry_end(entry, hash);
        if (entry == 0) {
          is_writing = true;
        } else if (other >= size - 1 && other < stop &&
                   same_ngram(request.tokens, other, end, size)) {
          is_writing = request.is_leftmost ? end < other : end > other;
          is_waiting = is_writing;
        } else {
          ++probe;
        }
      }
      if (is_waiting && !is_writing) {
        is_refused = true;
        is_waiting = false;
      }
      // If several lanes would write the same entry, one lane writes and the others look again. Of
      // the lanes with the same n-gram, the lane with the preferred end writes, so the others are
      // done.
      unsigned place = is_writing ? static_cast<unsigned>(idx) : 0x80000000u | lane;
      unsigned rivals = __match_any_sync(kFullMask, place);
      int writer = request.is_leftmost ? __ffs(static_cast<int>(rivals)) - 1
                                       : 31 - __clz(static_cast<int>(rivals));
      __syncwarp(kFullMask);  // all lanes have read the entries
      if (is_writing && writer == lane) {
        table[idx] = make_entry(hash, end);
        is_waiting = false;
      }
      __syncwarp(kFullMask);
    }
    unsigned refused = __ballot_sync(kFullMask, is_refused);
    if (refused != 0) return begin + __ffs(static_cast<int>(refused)) - 1;
  }
  return stop;
}

// Scans this thread's ends from `low` on and returns its best match as a key. After each piece, the
// warps vote whether any thread has a match that no later match can beat.
__device__ inline uint64_t scan(const NgramRequest& request, int32_t low) {
  int thread = static_cast<int>(threadIdx.x);
  int32_t last = text_len(request) - 1;
  int32_t size = request.min_size - 1;
  uint64_t best = 0;
  if (low < size) low = size;
  if (request.room <= 0) low = last;
  int32_t count = last - low;  // ends to test, the most preferred first
  if (count <= 0) return 0;
  int32_t last_token = token_at(request, last);
  for (int32_t done = 0; done < count; done += kNgramThreads * kNgramTokens) {
    auto end_of = [&](int i) {
      int32_t nth = done + i * kNgramThreads + thread;
      return request.is_leftmost ? low + nth : last - 1 - nth;
    };
    int32_t ends[kNgramTokens];
    for (int i = 0; i < kNgramTokens; ++i) {
      bool is_there = done + i * kNgramThreads + thread < count;
      ends[i] = token_at(request, is_there ? end_of(i) : low);
    }
    uint32_t hits = 0;  // bit i: ends[i] has the last token of the text
    for (int i = 0; i < kNgramTokens; ++i) hits |= uint32_t{ends[i] == last_token} << i;
    for (; hits != 0 && size < request.max_size; hits &= hits - 1) {
      int i = __ffs(static_cast<int>(hits)) - 1;
      if (done + i * kNgramThreads + thread >= count) break;
      int32_t end = end_of(i);
      // Only a match that is longer than the best one so far matters.
      if (end < size || token_at(request, end - size) != token_at(request, last - size)) continue;
      int32_t match = match_size(request, end, request.max_size);
      if (match <= size) continue;
      size = match;
      best = match_key(request, size, end);
    }
    if (__syncthreads_or(best != 0 && size == request.max_size)) break;
  }
  return best;
}

// Copies drafts: the tokens after the best earlier occurrence of the longest suffix of the text
// that occurs earlier.
// Grid:    x = requests (unbounded).
// Block:   512 threads; a thread scans every 512th possible end of a match, in order of preference;
//          one warp per size searches and extends the index.
// Smem:    the best match of each warp and size, and the indexed length per size: 320 bytes.
// Cost:    without an index, a scan of a row in pieces of 4,096 tokens, 4 bytes read per token,
//          until a match of max_size; bound by the latency of a piece, then by one SM's share of
//          bandwidth. With an index, one piece, about five dependent reads for the search, and as
//          many per 32 new tokens.
// Assumes: shapes checked by ops.cpp.
// Order:   integers only; the greatest key of all matches, whichever thread finds it. Lanes that
//          compete for a table entry take turns in an order fixed by their indices.
// Source:  Saxena 2023, prompt lookup decoding; FastDeploy's ngram_match.
__global__ void __launch_bounds__(kNgramThreads, 2)
    ngram_propose_kernel(NgramProposeParams params) {
  wait_for_previous_kernel();
  auto* shared = reinterpret_cast<NgramShared*>(shared_memory());
  int64_t batch_idx = blockIdx.x;
  int thread = static_cast<int>(threadIdx.x);
  int lane = thread % kWarpSize, warp = thread / kWarpSize;
  ErrorCode fault;
  NgramRequest request = load_request(params, batch_idx, &fault);
  if (fault != ErrorCode::kNone && thread == 0) report_error(params.error, fault);
  int32_t* state = params.state + 2 * batch_idx;
  NgramPlan plan = plan_index(params, request, state);
  uint32_t* table = params.table + batch_idx * params.table_entries;
  if (plan.num_new > 0 && plan.num_indexed == 0) {
    int64_t used = int64_t{plan.num_sizes} * plan.num_entries;
    for (int64_t i = thread; i < used; i += kNgramThreads) table[i] = 0;
  }
  __syncthreads();  // the state has been read and the table is cleared

  if (warp < plan.num_sizes) {
    uint32_t* of_size = table + int64_t{warp} * plan.num_entries;
    int32_t size = request.min_size + warp;
    uint64_t indexed = find_indexed(request, plan, of_size, size);
    int32_t num_indexed = extend_index(request, plan, of_size, size);
    if (lane == 0) {
      shared->indexed_best[warp] = indexed;
      shared->num_indexed[warp] = num_indexed;
    }
  }
  uint64_t best = scan(request, plan.num_indexed);

  // Reduce to the best match of the block.
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    uint64_t other = __shfl_xor_sync(kFullMask, best, distance);
    if (other > best) best = other;
  }
  if (lane == 0) shared->warp_best[warp] = best;
  __syncthreads();
  for (int i = 0; i < kNgramWarps; ++i) {
    if (shared->warp_best[i] > best) best = shared->warp_best[i];
  }
  int32_t num_indexed = plan.num_indexed + plan.num_new;
  for (int i = 0; i < plan.num_sizes; ++i) {
    if (shared->indexed_best[i] > best) best = shared->indexed_best[i];
    if (shared->num_indexed[i] < num_indexed) num_indexed = shared->num_indexed[i];
  }

  int32_t end = best != 0 ? match_end(request, best) : text_len(request) - 1;
  int32_t count = text_len(request) - 1 - end;
  if (count > request.room) count = request.room;
  if (count < 0) count = 0;
  int32_t* drafts = params.draft_token_ids + batch_idx * params.capacity;
  for (int64_t i = request.num_given + thread; i < params.capacity; i += kNgramThreads) {
    int64_t nth = i - request.num_given;
    drafts[i] = nth < count ? token_at(request, end + 1 + static_cast<int32_t>(nth)) : -1;
  }
  if (thread == 0) {
    NgramShare share{request.num_given, request.num_given + count};
    bool shares = params.max_total_draft_tokens >= 0;
    params.num_draft_tokens[batch_idx] = shares ? pack_share(share, params.capacity) : share.count;
    auto match_len = static_cast<int32_t>(best >> 32);
    if (params.match_lens) params.match_lens[batch_idx] = count > 0 ? match_len : 0;
    keep_state(plan, num_indexed, state);
  }
}

// Returns the sum of a number over the block in every thread. `sums` has one entry per warp.
__device__ inline int64_t block_sum(int64_t value, int64_t* sums) {
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kFullMask, value, distance);
  }
  __syncthreads();  // all threads have read the previous sums
  if (threadIdx.x % kWarpSize == 0) sums[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  int64_t sum = 0;
  for (int warp = 0; warp < kNgramWarps; ++warp) sum += sums[warp];
  return sum;
}

// Reduces num_draft_tokens to each request's part of max_total_draft_tokens; see ngram_share.h.
// Grid:    one block.
// Block:   512 threads; each thread owns every 512th request.
// Smem:    one sum per warp: 128 bytes.
// Cost:    1 + log2(capacity) passes over 8 bytes per request, and a last one; latency-bound.
// Assumes: the output of ngram_propose_kernel, packed as in ngram_share.h.
// Order:   integers only; the remainder goes to requests in order.
// Source:  max-min fairness by water-filling.
__global__ void __launch_bounds__(kNgramThreads) ngram_share_kernel(NgramProposeParams params) {
  wait_for_previous_kernel();
  auto* sums = reinterpret_cast<int64_t*>(shared_memory());
  int thread = static_cast<int>(threadIdx.x);
  auto share_of = [&](int64_t idx) {
    return unpack_share(params.num_draft_tokens[idx], params.capacity);
  };
  auto total = [&](int32_t cap) {
    int64_t sum = 0;
    for (int64_t i = thread; i < params.batch; i += kNgramThreads) {
      sum += capped(share_of(i), cap);
    }
    return block_sum(sum, sums);
  };
  auto low = int32_t{0}, high = static_cast<int32_t>(params.capacity);
  if (total(high) <= params.max_total_draft_tokens) low = high;
  while (low + 1 < high) {  // the total exceeds the limit at `high`, and at `low` only if low is 0
    int32_t cap = low + (high - low) / 2;
    (total(cap) <= params.max_total_draft_tokens ? low : high) = cap;
  }
  int64_t rest = params.max_total_draft_tokens - total(low);
  for (int64_t begin = 0; begin < params.batch; begin += kNgramThreads) {
    int64_t idx = begin + thread;
    bool is_there = idx < params.batch;
    NgramShare share = is_there ? share_of(idx) : NgramShare{};
    bool wants = is_there && is_cut(share, low);
    unsigned wanting = __ballot_sync(kFullMask, wants);
    int lane = thread % kWarpSize, warp = thread / kWarpSize;
    __syncthreads();  // all threads have read the previous sums
    if (lane == 0) sums[warp] = __popc(wanting);
    __syncthreads();
    int64_t before = __popc(wanting & ((1u << lane) - 1)), all = 0;
    for (int i = 0; i < kNgramWarps; ++i) {
      if (i < warp) before += sums[i];
      all += sums[i];
    }
    if (is_there) {
      int32_t kept = capped(share, low) + (wants && before < rest ? 1 : 0);
      int32_t* drafts = params.draft_token_ids + idx * params.capacity;
      for (int32_t i = kept; i < share.count; ++i) drafts[i] = -1;
      params.num_draft_tokens[idx] = kept;
      if (params.match_lens && kept == share.num_given) params.match_lens[idx] = 0;
    }
    rest -= all;
  }
}

}  // namespace specops
