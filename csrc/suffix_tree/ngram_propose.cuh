// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/device.cuh"
#include "suffix_tree/ngram_propose.h"

namespace specops {

constexpr int kNgramThreads = 1024;
constexpr int kNgramTokens = 8;  // a thread's loads in flight
constexpr int kNgramSmemBytes = kNgramThreads / kWarpSize * sizeof(uint64_t);

// A request after its checks; a wrong one wants no drafts.
struct NgramRequest {
  int32_t len = 0;
  int32_t limit = 0;
  int32_t min_size = 1;
  int32_t max_size = 1;
};

__device__ inline NgramRequest load_request(const NgramProposeParams& params, int64_t batch_idx) {
  NgramRequest out{
      .len = params.lens[batch_idx],
      .limit = params.max_draft_tokens[batch_idx],
      .min_size = params.min_sizes ? params.min_sizes[batch_idx] : params.min_size,
      .max_size = params.max_sizes ? params.max_sizes[batch_idx] : params.max_size,
  };
  ErrorCode code = ErrorCode::kNone;
  if (out.len < 0 || out.len > params.max_len) {
    code = ErrorCode::kNgramLens;
  } else if (out.limit < 0) {
    code = ErrorCode::kNgramMaxDraftTokens;
  } else if (out.min_size < 1) {
    code = ErrorCode::kNgramMinSize;
  } else if (out.max_size < out.min_size) {
    code = ErrorCode::kNgramMaxSize;
  }
  if (code != ErrorCode::kNone) {
    if (threadIdx.x == 0) report_error(params.error, code);
    return {};
  }
  if (out.limit > params.capacity) out.limit = static_cast<int32_t>(params.capacity);
  return out;
}

// drafts = the tokens behind the most recent earlier occurrence of the longest matching suffix.
// Grid:    x = requests (unbounded).
// Block:   1024 threads; a thread owns every 1024th end of a match, from the last one backwards.
// Smem:    the best match of each warp: 256 bytes.
// Cost:    one backward scan of a row in pieces of 8,192 tokens, 4 bytes read per token, ended by a
//          match of max_size; bound by the latency of a piece, then by one SM's share of bandwidth.
// Assumes: shapes checked by ops.cpp.
// Order:   integers only; the largest (size, end) of all matches, whoever finds it.
// Source:  Saxena 2023, prompt lookup decoding; FastDeploy's ngram_match.
__global__ void __launch_bounds__(kNgramThreads, 2)
    ngram_propose_kernel(NgramProposeParams params) {
  auto* warp_best = reinterpret_cast<uint64_t*>(shared_memory());
  int64_t batch_idx = blockIdx.x;
  int thread = static_cast<int>(threadIdx.x);
  NgramRequest request = load_request(params, batch_idx);
  const int32_t* tokens = params.token_ids + batch_idx * params.stride;
  const int32_t* tail = tokens + request.len - 1;

  // The best match of this thread: its size, and the index of its last token. Only longer ones are
  // of interest: the token `size` before the end of such a match is tail[-size].
  int32_t size = request.min_size - 1;
  int32_t best_end = -1;
  constexpr int32_t kPiece = kNgramThreads * kNgramTokens;
  int32_t last = request.limit > 0 ? request.len - 2 : -1;  // of the piece; no match ends later
  while (last >= request.min_size - 1) {
    int32_t ends[kNgramTokens];
    for (int i = 0; i < kNgramTokens; ++i) {
      int32_t end = last - i * kNgramThreads - thread;
      ends[i] = tokens[end > 0 ? end : 0];
    }
    uint32_t hits = 0;  // bit i: ends[i] is the last token of the row
    for (int i = 0; i < kNgramTokens; ++i) hits |= uint32_t{ends[i] == tail[0]} << i;
    for (; hits != 0 && size < request.max_size; hits &= hits - 1) {
      int32_t end = last - (__ffs(static_cast<int>(hits)) - 1) * kNgramThreads - thread;
      if (end < size || tokens[end - size] != tail[-size]) continue;
      int32_t match = 1;
      while (match < request.max_size && match <= end && tokens[end - match] == tail[-match]) {
        ++match;
      }
      if (match <= size) continue;
      size = match;
      best_end = end;
    }
    last -= kPiece;
    // The pieces before hold older matches, which are no longer either.
    if (__syncthreads_or(best_end >= 0 && size == request.max_size)) break;
  }

  // The longest match of the block, and among the longest the most recent.
  uint64_t best = 0;
  if (best_end >= 0) {
    best = (static_cast<uint64_t>(size) << 32) | static_cast<uint32_t>(best_end + 1);
  }
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    uint64_t other = __shfl_xor_sync(kFullMask, best, distance);
    if (other > best) best = other;
  }
  if (thread % kWarpSize == 0) warp_best[thread / kWarpSize] = best;
  __syncthreads();
  for (int warp = 0; warp < kNgramThreads / kWarpSize; ++warp) {
    if (warp_best[warp] > best) best = warp_best[warp];
  }

  auto match = static_cast<int32_t>(best & 0xffffffffu);
  int32_t count = match > 0 ? request.len - match : 0;
  if (count > request.limit) count = request.limit;
  int32_t* drafts = params.draft_token_ids + batch_idx * params.capacity;
  for (int64_t i = thread; i < params.capacity; i += kNgramThreads) {
    drafts[i] = i < count ? tokens[match + i] : -1;
  }
  if (thread == 0) params.num_draft_tokens[batch_idx] = static_cast<int32_t>(count);
}

}  // namespace specops
