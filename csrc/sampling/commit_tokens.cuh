// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/device.cuh"
#include "sampling/commit_tokens.h"

namespace specops {

constexpr int kCommitTokensThreads = 128;  // four requests

// token_ids[slots[b], lens[slots[b]] ..] = output_token_ids[b] up to its first -1; lens grows.
// Grid:    x = four requests, unbounded.
// Block:   128 threads; a warp owns a request, a lane every 32nd of its tokens.
// Smem:    none.
// Cost:    batch * (max_tokens + 2) ids read, at most as many written; a launch is all it takes.
// Assumes: two requests never share a slot.
// Order:   copies; a request without room for its tokens is left alone and reported.
template <typename = void>
__global__ void __launch_bounds__(kCommitTokensThreads)
    commit_tokens_kernel(CommitTokensParams params) {
  int lane_idx = threadIdx.x % kWarpSize;
  int64_t batch_idx =
      int64_t{blockIdx.x} * (kCommitTokensThreads / kWarpSize) + threadIdx.x / kWarpSize;
  if (batch_idx >= params.batch) return;
  int32_t slot = params.slots[batch_idx];
  if (slot == -1) return;
  if (slot < 0 || slot >= params.num_slots) {
    if (lane_idx == 0) report_error(params.error, ErrorCode::kCommitTokensSlot);
    return;
  }
  const int32_t* emitted = params.output_token_ids + batch_idx * params.max_tokens;
  int64_t count = 0;  // tokens before the first -1
  for (int64_t begin = 0; begin < params.max_tokens; begin += kWarpSize) {
    int64_t idx = begin + lane_idx;
    bool ends = idx >= params.max_tokens || emitted[idx] < 0;
    unsigned ended = __ballot_sync(kFullMask, ends);
    count += ended ? __ffs(static_cast<int>(ended)) - 1 : kWarpSize;
    if (ended) break;
  }
  int32_t len = params.lens[slot];
  if (len < 0 || len + count > params.max_len) {
    if (lane_idx == 0) report_error(params.error, ErrorCode::kCommitTokensRoom);
    return;
  }
  int32_t* row = params.token_ids + slot * params.token_ids_stride + len;
  for (int64_t idx = lane_idx; idx < count; idx += kWarpSize) row[idx] = emitted[idx];
  __syncwarp(kFullMask);  // every lane has read the length
  if (lane_idx == 0) params.lens[slot] = len + static_cast<int32_t>(count);
}

}  // namespace specops
