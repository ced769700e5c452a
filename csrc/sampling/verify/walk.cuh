// SPDX-License-Identifier: Apache-2.0
// The end of a request's verification on CUDA: reporting of errors, and the walk along its drafts
// after every row has stored its choice.
#pragma once

#include "sampling/row/cuda/block_reduce.cuh"
#include "sampling/verify/accept_walk.h"
#include "sampling/verify/request.cuh"

namespace specops {

// Writes the outputs of a request that emits no token.
__device__ inline void emit_nothing(const VerifyParams& params, int64_t batch_idx) {
  int64_t capacity = params.drafts.max_draft_tokens + 1;
  for (int64_t i = threadIdx.x; i < capacity; i += blockDim.x) {
    params.outputs.token_ids[batch_idx * capacity + i] = -1;
    if (params.outputs.logprobs) params.outputs.logprobs[batch_idx * capacity + i] = 0.0f;
    if (params.outputs.ranks) params.outputs.ranks[batch_idx * capacity + i] = 0;
    if (params.outputs.accepted_nodes && i + 1 < capacity) {
      params.outputs.accepted_nodes[batch_idx * (capacity - 1) + i] = -1;
    }
  }
  if (threadIdx.x == 0) params.outputs.num_accepted_tokens[batch_idx] = 0;
}

// Returns whether drafts, parents, masks and the choices of the rows are valid; if not, the request
// must emit nothing. If there are several errors, the reported one does not depend on timing.
__device__ inline bool drafts_in_order(const VerifyParams& params,
                                       RowShared& shared,
                                       int64_t batch_idx) {
  int num_rows = shared.num_rows, num_read = shared.num_read;
  RequestDrafts drafts = drafts_of(params.drafts, batch_idx, num_rows - 1);
  const int32_t* choices = slots_of(params, batch_idx);
  ErrorCode fault = ErrorCode::kNone;
  for (int i = static_cast<int>(threadIdx.x); i < num_rows; i += blockDim.x) {
    if (i < num_read && choices[i] == kNoChoice) fault = kVerifyDraftProbTokenIds;
    Fault mask = find_mask_fault(SamplingOp::kVerify, params.processors, shared.first_row + i);
    if (mask.found()) fault = mask.code;
    if (i == drafts.num_nodes) continue;
    Fault parent = find_parent_fault(
        SamplingOp::kVerify, params.drafts.parents, params.drafts.max_draft_tokens, batch_idx, i);
    if (parent.found()) fault = parent.code;
  }
  fault = static_cast<ErrorCode>(block_reduce<Max>(shared, static_cast<int32_t>(fault)));
  if (fault == ErrorCode::kNone) return true;
  if (threadIdx.x == 0) report_error(params.error, fault);
  emit_nothing(params, batch_idx);
  return false;
}

// Walks a request whose choices are in the outputs. One thread walks, in shared memory if the rows
// fit, so that it does not wait for global memory at every token.
__device__ inline void walk_request(const VerifyParams& params,
                                    RowShared& shared,
                                    int64_t batch_idx) {
  int num_rows = shared.num_rows, num_read = shared.num_read;
  int32_t capacity = static_cast<int32_t>(params.drafts.max_draft_tokens) + 1;
  int64_t first = batch_idx * capacity, first_node = batch_idx * (capacity - 1);
  RequestDrafts drafts = drafts_of(params.drafts, batch_idx, num_rows - 1);
  Emitted emitted{
      params.outputs.token_ids + first,
      params.outputs.logprobs ? params.outputs.logprobs + first : nullptr,
      params.outputs.ranks ? params.outputs.ranks + first : nullptr,
      params.outputs.accepted_nodes ? params.outputs.accepted_nodes + first_node : nullptr};
  bool staged = 3 * capacity <= kListCapacity;
  RequestDrafts near_drafts = drafts;
  Emitted near = emitted;
  if (staged) {
    int32_t* words = reinterpret_cast<int32_t*>(shared.list_x);
    near_drafts.token_ids = shared.list_id + capacity;
    if (drafts.parents) near_drafts.parents = shared.list_id + 2 * capacity;
    near.token_ids = shared.list_id;
    if (emitted.logprobs) near.logprobs = shared.list_x;
    if (emitted.ranks) near.ranks = words + capacity;
    if (emitted.accepted_nodes) near.accepted_nodes = words + 2 * capacity;
    for (int i = static_cast<int>(threadIdx.x); i < num_rows; i += blockDim.x) {
      if (i < drafts.num_nodes) shared.list_id[capacity + i] = drafts.token_ids[i];
      if (i < drafts.num_nodes && drafts.parents) {
        shared.list_id[2 * capacity + i] = drafts.parents[i];
      }
      if (i >= num_read) continue;
      near.token_ids[i] = emitted.token_ids[i];
      if (near.logprobs) near.logprobs[i] = emitted.logprobs[i];
      if (near.ranks) near.ranks[i] = emitted.ranks[i];
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    params.outputs.num_accepted_tokens[batch_idx] =
        accept_walk(near_drafts, num_rows, capacity, near);
  }
  if (!staged) return;
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < capacity; i += blockDim.x) {
    emitted.token_ids[i] = near.token_ids[i];
    if (near.logprobs) emitted.logprobs[i] = near.logprobs[i];
    if (near.ranks) emitted.ranks[i] = near.ranks[i];
    if (near.accepted_nodes && i + 1 < capacity) emitted.accepted_nodes[i] = near.accepted_nodes[i];
  }
}

}  // namespace specops
