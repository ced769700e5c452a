// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "sampling/accept_walk.h"
#include "sampling/filters.cuh"
#include "sampling/row_plan.cuh"
#include "sampling/verify.h"

namespace specops {

// One request's part of a step.
struct VerifyRequest {
  int32_t first;     // of its rows
  int32_t num_rows;  // 0: idle, or at fault
  int32_t num_read;  // rows that are chosen from
  AcceptPolicy policy;
  SamplingParams filters;  // as the strategy has them
  bool greedy;
  ErrorCode fault;  // of a request that is not idle

  // All loads before all looks: they take as long as one.
  __device__ VerifyRequest(const VerifyParams& params, int64_t batch_idx) {
    int32_t begin = params.output_indptr[batch_idx], end = params.output_indptr[batch_idx + 1];
    int32_t strategy = static_cast<int32_t>(VerifyStrategy::kTargetMatch);
    int32_t policy_value = static_cast<int32_t>(AcceptPolicy::kNormal);
    if (params.strategy) strategy = params.strategy[batch_idx];
    if (params.policy) policy_value = params.policy[batch_idx];
    filters = filters_of(params.filters, batch_idx);
    first = begin;
    policy = static_cast<AcceptPolicy>(policy_value);
    int64_t rows = int64_t{end} - begin;
    bool starts = begin >= 0 && (batch_idx > 0 || begin == 0);
    if (!starts || rows < 0 || rows > params.max_draft_tokens + 1 || end > params.rows) {
      fault = ErrorCode::kVerifyOutputIndptr;
    } else if (rows == 0) {
      fault = ErrorCode::kNone;  // an idle slot may hold anything
    } else if (!is_strategy(strategy, params.parents != nullptr)) {
      fault = ErrorCode::kVerifyStrategy;
    } else if (!is_policy(policy_value, params.parents != nullptr)) {
      fault = ErrorCode::kVerifyPolicy;
    } else {
      fault = fault_of(filters, kVerifyFaults);
    }
    num_rows = fault == ErrorCode::kNone ? static_cast<int32_t>(rows) : 0;
    num_read = policy == AcceptPolicy::kRejectAll && num_rows > 0 ? 1 : num_rows;
    greedy = strategy == static_cast<int32_t>(VerifyStrategy::kGreedy);
    if (greedy) filters.temperature = 0.0f;
  }
};

// A request that emits nothing.
__device__ inline void emit_nothing(const VerifyParams& params, int64_t batch_idx) {
  int64_t capacity = params.max_draft_tokens + 1;
  for (int64_t i = threadIdx.x; i < capacity; i += blockDim.x) {
    params.output_token_ids[batch_idx * capacity + i] = -1;
    if (params.logprobs) params.logprobs[batch_idx * capacity + i] = 0.0f;
  }
  if (threadIdx.x == 0) params.num_accepted_tokens[batch_idx] = 0;
}

// The walk of a request whose choices are in the outputs. One thread walks; in shared memory where
// the rows fit, so that it does not wait for every token in turn.
__device__ inline void walk_request(const VerifyParams& params,
                                    RowShared& shared,
                                    int64_t batch_idx) {
  int num_rows = shared.num_rows, num_read = shared.num_read;
  int64_t capacity = params.max_draft_tokens + 1;
  const int32_t* drafts = params.draft_token_ids + batch_idx * params.max_draft_tokens;
  int32_t* tokens = params.output_token_ids + batch_idx * capacity;
  float* logprobs = params.logprobs ? params.logprobs + batch_idx * capacity : nullptr;
  bool staged = 2 * capacity <= kListCapacity;
  int32_t* near_tokens = staged ? shared.list_id : tokens;
  float* near_logprobs = staged && logprobs ? shared.list_x : logprobs;
  const int32_t* near_drafts = staged ? shared.list_id + capacity : drafts;
  int outside = 0;
  for (int i = static_cast<int>(threadIdx.x); i < num_rows; i += blockDim.x) {
    int32_t draft = i + 1 < num_rows ? drafts[i] : -1;
    if (draft < -1 || draft >= params.vocab_size) outside = 1;
    if (!staged) continue;
    shared.list_id[capacity + i] = draft;
    if (i >= num_read) continue;
    shared.list_id[i] = tokens[i];
    if (logprobs) shared.list_x[i] = logprobs[i];
  }
  if (__syncthreads_or(outside)) {
    if (threadIdx.x == 0) report_error(params.error, ErrorCode::kVerifyDraftTokenId);
    return emit_nothing(params, batch_idx);
  }
  if (threadIdx.x == 0) {
    params.num_accepted_tokens[batch_idx] =
        accept_walk({near_drafts, nullptr, num_rows - 1},
                    num_rows,
                    static_cast<int32_t>(capacity),
                    {near_tokens, near_logprobs, nullptr, nullptr});
  }
  if (!staged) return;
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < capacity; i += blockDim.x) {
    tokens[i] = shared.list_id[i];
    if (logprobs) logprobs[i] = shared.list_x[i];
  }
}

// Each output row's own choice, exactly as sample makes it, then the walk along the drafts.
// Grid:    batch * (k + 1) * splits, on x; blocks without a row end at once.
// Block:   32 to 512 threads; a warp takes leaves of 2 KB, the last block of a row ends the row, the
//          last row of a request walks.
// Smem:    sizeof(RowShared), 40 KB: the row's leaves and a list of 3,072 tokens.
// Cost:    one read of num_output_rows * vocab_size logits; filters as in sample.
// Assumes: rows contiguous.
// Order:   row.cuh; a row depends on its request's parameters and position alone.
// Source:  Leviathan et al. 2023 with a deterministic drafter; the row's own choice is the coin.
template <typename T>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    verify_kernel(VerifyParams params, RowPlan plan) {
  RowShared& shared = *reinterpret_cast<RowShared*>(shared_memory());
  int32_t capacity = static_cast<int32_t>(params.max_draft_tokens) + 1;
  int32_t item = static_cast<int32_t>(blockIdx.x) / plan.splits;
  int32_t batch_idx = item / capacity, idx = item % capacity;
  bool first_split = static_cast<int32_t>(blockIdx.x) % plan.splits == 0;
  VerifyRequest request(params, batch_idx);
  if (request.num_rows == 0 && idx == 0 && first_split) {
    if (request.fault != ErrorCode::kNone && threadIdx.x == 0) {
      report_error(params.error, request.fault);
    }
    emit_nothing(params, batch_idx);
  }
  if (idx >= request.num_read) return;

  if (threadIdx.x == 0) {
    shared.num_rows = request.num_rows;
    shared.num_read = request.num_read;
    shared.policy = static_cast<int32_t>(request.policy);
  }
  bool want_logprob = params.logprobs != nullptr;
  const int32_t* drafts = params.draft_token_ids + int64_t{batch_idx} * (capacity - 1);
  bool given = request.policy == AcceptPolicy::kAcceptAll &&
               next_child({drafts, nullptr, request.num_rows - 1}, idx) >= 0;
  RowToken token{given ? drafts[idx] : -1, 0.0f};
  float logprob = 0.0f;
  int32_t row_idx = request.first + idx;
  if (!given || want_logprob) {
    auto* counters = static_cast<int32_t*>(params.workspace);
    auto* workspace = static_cast<unsigned char*>(params.workspace);
    Row<T> row(params.logits, row_idx, params.logits_stride, params.vocab_size);
    RowSlots slots(plan, shared, workspace + params.workspace_bytes, row_idx);
    if (!scan_row(plan,
                  shared,
                  row,
                  slots,
                  want_logprob,
                  !given && needs_warm(request.filters, row.size),
                  inverse_temperature(request.filters.temperature) * kLog2e,
                  counters + params.batch + row_idx)) {
      return;
    }
    // read again, and not kept over the scan
    SamplingParams filters = filters_of(params.filters, batch_idx);
    if (request.greedy) filters.temperature = 0.0f;
    RowBlock<T> block(shared, row, filters, slots.stats, slots.masses);
    block.fold(want_logprob);
    if (!given) {
      token = block.choose(
          [&] { return uniform_of(params.filters, batch_idx, params.positions[batch_idx] + idx); });
    } else if (token.id < params.vocab_size) {
      token.logit = block.logit(token.id);
    }
    logprob = want_logprob ? block.logprob(token.logit) : 0.0f;
  } else if (!first_split) {
    return;
  }
  if (threadIdx.x == 0) {
    params.output_token_ids[item] =
        request.policy == AcceptPolicy::kRejectAll ? ends_with(token.id) : token.id;
    if (want_logprob) params.logprobs[item] = logprob;
  }
  __syncthreads();
  int num_read = shared.num_read;
  auto* counters = static_cast<int32_t*>(params.workspace);
  if (num_read > 1 && !last_to_arrive(shared, counters + batch_idx, num_read)) return;
  walk_request(params, shared, batch_idx);
}

}  // namespace specops
