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
  VerifyStrategy strategy;
  ErrorCode fault;  // of a request that is not idle

  // All loads before all looks: they take as long as one.
  __device__ VerifyRequest(const VerifyParams& params, int64_t batch_idx) {
    int32_t begin = params.output_indptr[batch_idx], end = params.output_indptr[batch_idx + 1];
    int32_t rule = static_cast<int32_t>(VerifyStrategy::kTargetMatch);
    int32_t policy_value = static_cast<int32_t>(AcceptPolicy::kNormal);
    if (params.strategy) rule = params.strategy[batch_idx];
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
    } else if (!is_strategy(rule, params.parents != nullptr)) {
      fault = ErrorCode::kVerifyStrategy;
    } else if (!is_policy(policy_value, params.parents != nullptr)) {
      fault = ErrorCode::kVerifyPolicy;
    } else {
      fault = fault_of(filters, kVerifyFaults);
      if (fault == ErrorCode::kNone && has_processors(params.processors)) {
        fault = fault_of(
            params.processors, batch_idx, params.positions[batch_idx], kVerifyProcessorFaults);
      }
    }
    num_rows = fault == ErrorCode::kNone ? static_cast<int32_t>(rows) : 0;
    num_read = policy == AcceptPolicy::kRejectAll && num_rows > 0 ? 1 : num_rows;
    strategy = static_cast<VerifyStrategy>(rule);
    if (strategy == VerifyStrategy::kGreedy) filters = {};
  }
};

// The drafts before row `idx` of a request; none where a parent is not below its node, which the walk
// reports.
__device__ inline DraftPath draft_path(const VerifyParams& params, int64_t batch_idx, int32_t idx) {
  int64_t first = batch_idx * params.max_draft_tokens;
  DraftPath path{params.draft_token_ids + first, nullptr, idx - 1};
  if (params.parents == nullptr) return path;
  path.parents = params.parents + first;
#pragma unroll 1
  for (int32_t node = idx - 1; node >= 0;) {
    int32_t parent = path.parents[node];
    if (parent < -1 || parent >= node) {
      path.node = -1;
      break;
    }
    node = parent;
  }
  return path;
}

// A request that emits nothing.
__device__ inline void emit_nothing(const VerifyParams& params, int64_t batch_idx) {
  int64_t capacity = params.max_draft_tokens + 1;
  for (int64_t i = threadIdx.x; i < capacity; i += blockDim.x) {
    params.output_token_ids[batch_idx * capacity + i] = -1;
    if (params.logprobs) params.logprobs[batch_idx * capacity + i] = 0.0f;
    if (params.ranks) params.ranks[batch_idx * capacity + i] = 0;
    if (params.accepted_nodes && i + 1 < capacity) {
      params.accepted_nodes[batch_idx * params.max_draft_tokens + i] = -1;
    }
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
  ErrorCode fault = ErrorCode::kNone;
  for (int i = static_cast<int>(threadIdx.x); i < num_rows; i += blockDim.x) {
    int32_t draft = i + 1 < num_rows ? drafts[i] : -1;
    if (draft < -1 || draft >= params.vocab_size) fault = ErrorCode::kVerifyDraftTokenId;
    if (params.parents && i + 1 < num_rows) {
      int32_t parent = params.parents[batch_idx * params.max_draft_tokens + i];
      if (parent < -1 || parent >= i) fault = ErrorCode::kVerifyParents;
    }
    if (!is_mask_index(params.processors, shared.first_row + i)) {
      fault = ErrorCode::kVerifyMaskIndices;
    }
    if (!staged) continue;
    shared.list_id[capacity + i] = draft;
    if (i >= num_read) continue;
    shared.list_id[i] = tokens[i];
    if (logprobs) shared.list_x[i] = logprobs[i];
  }
  fault = static_cast<ErrorCode>(block_reduce<Max>(shared, static_cast<int32_t>(fault)));
  if (fault != ErrorCode::kNone) {
    if (threadIdx.x == 0) report_error(params.error, fault);
    return emit_nothing(params, batch_idx);
  }
  if (threadIdx.x == 0) {
    const int32_t* parents =
        params.parents ? params.parents + batch_idx * params.max_draft_tokens : nullptr;
    int32_t* ranks = params.ranks ? params.ranks + batch_idx * capacity : nullptr;
    int32_t* nodes = params.accepted_nodes
                         ? params.accepted_nodes + batch_idx * params.max_draft_tokens
                         : nullptr;
    params.num_accepted_tokens[batch_idx] = accept_walk({near_drafts, parents, num_rows - 1},
                                                        num_rows,
                                                        static_cast<int32_t>(capacity),
                                                        {near_tokens, near_logprobs, ranks, nodes});
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
// Smem:    sizeof(RowShared), 40 KB: the row's leaves and a list of 3,072 tokens; under processors
//          two bits a token more, 38 KB at 151,936.
// Cost:    one read of num_output_rows * vocab_size logits; filters as in sample.
// Assumes: rows contiguous.
// Order:   row.cuh; a row depends on its request's parameters and position alone.
// Source:  Leviathan et al. 2023 with a deterministic drafter; the row's own choice is the coin.
template <typename T, bool kProcessed>
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
    shared.first_row = request.first;
    shared.num_rows = request.num_rows;
    shared.num_read = request.num_read;
    shared.policy = static_cast<int32_t>(request.policy);
  }
  bool want_logprob = params.logprobs != nullptr;
  bool want_processed = want_logprob && params.processed_logprobs;
  const int32_t* drafts = params.draft_token_ids + int64_t{batch_idx} * (capacity - 1);
  bool given = request.policy == AcceptPolicy::kAcceptAll &&
               next_child({drafts, nullptr, request.num_rows - 1}, idx) >= 0;
  RowToken token{given ? drafts[idx] : -1, 0.0f};
  bool known = !given || token.id < params.vocab_size;  // else the walk reports it
  float logprob = 0.0f;
  int32_t rank = 0;
  if (known && (!given || want_logprob || params.ranks != nullptr)) {
    int32_t row_idx = request.first + idx;
    auto* counters = static_cast<int32_t*>(params.workspace);
    auto* workspace = static_cast<unsigned char*>(params.workspace);
    Row<T, kProcessed> row(params.logits, row_idx, params.logits_stride, params.vocab_size);
    if constexpr (kProcessed) {
      build_overlay(params.processors,
                    batch_idx,
                    row_idx,
                    params.positions[batch_idx],
                    draft_path(params, batch_idx, idx),
                    row.size,
                    plan.num_leaves * (Row<T>::kLeafSize / 32));
    }
    RowSlots slots(plan, shared, workspace + params.workspace_bytes, row_idx);
    WantedSums wanted(request.filters, row.size, want_logprob, params.processed_logprobs);
    if (!scan_row(plan,
                  shared,
                  row,
                  slots,
                  wanted.raw,
                  wanted.warm && (!given || want_processed),
                  inverse_temperature(request.filters.temperature) * kLog2e,
                  counters + params.batch + row_idx)) {
      return;
    }
    // read again, and not kept over the scan
    SamplingParams filters;
    if (request.strategy != VerifyStrategy::kGreedy) {
      filters = filters_of(params.filters, batch_idx);
    }
    RowBlock<T, kProcessed> block(shared, row, filters, slots.stats, slots.masses);
    block.fold(want_logprob && !want_processed);
    if (!given || want_processed) block.filter();
    if (given) {
      token.logit = block.logit(token.id);
    } else {
      int32_t depth = path_depth(draft_path(params, batch_idx, idx));
      int32_t position = params.positions[batch_idx] + depth;
      PhiloxSource uniform = uniform_source(params.filters, batch_idx, position);
      token = block.draw(block.one_hot() ? 0.0f : uniform(Purpose::kTarget, 0));
    }
    if (want_logprob && !want_processed && threadIdx.x == 0) logprob = block.logprob(token);
    if (want_processed) {
      block.fold_kept();
      logprob = block.processed_logprob(token);
    }
    if (params.ranks) rank = block.rank(block.broadcast(token), !params.processed_logprobs);
  } else if (!first_split) {
    return;
  }
  if (threadIdx.x == 0) {
    params.output_token_ids[item] =
        request.policy == AcceptPolicy::kRejectAll ? ends_with(token.id) : token.id;
    if (want_logprob) params.logprobs[item] = logprob;
    if (params.ranks) params.ranks[item] = rank;
  }
  __syncthreads();
  int num_read = shared.num_read;
  auto* counters = static_cast<int32_t*>(params.workspace);
  if (num_read > 1 && !last_to_arrive(shared, counters + batch_idx, num_read)) return;
  walk_request(params, shared, batch_idx);
}

}  // namespace specops
