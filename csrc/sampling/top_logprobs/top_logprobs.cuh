// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "sampling/row/cuda/filters.cuh"
#include "sampling/row/cuda/row_passes.cuh"
#include "sampling/row/cuda/row_plan.cuh"
#include "sampling/row/cuda/select.cuh"
#include "sampling/row/cuda/target_row.cuh"
#include "sampling/row/cuda/token_list.cuh"
#include "sampling/top_logprobs/top_logprobs.h"

namespace specops {

// Sorts tokens by logit (descending), then id (ascending), with a bitonic network in which every
// comparison has the same direction, so that it works for any count. Called by one block; the
// arrays may be in global memory.
__device__ inline void sort_ranking(float* logits, int32_t* ids, int64_t count) {
  auto step = [&](int64_t i, int64_t j) {
    if (j >= count || rank_key(logits[i], ids[i]) > rank_key(logits[j], ids[j])) return;
    float logit = logits[i];
    int32_t id = ids[i];
    logits[i] = logits[j];
    ids[i] = ids[j];
    logits[j] = logit;
    ids[j] = id;
  };
  for (int64_t size = 2; size / 2 < count; size *= 2) {
    for (int64_t half = size / 2; half > 0; half /= 2) {
      __syncthreads();
      for (int64_t pair = threadIdx.x; pair < (count + 1) / 2 + half; pair += blockDim.x) {
        int64_t low = pair / half * 2 * half + pair % half;
        int64_t partner =
            half == size / 2 ? pair / half * 2 * half + 2 * half - 1 - pair % half : low + half;
        if (low < count) step(low, partner);
      }
    }
  }
  __syncthreads();
}

// The request to which a row belongs, and the index of the row in it.
struct RowOwner {
  int32_t batch_idx, idx;
  int32_t first;  // first row of the request

  // Rows from output_indptr[batch] on belong to no request; their batch_idx is -1.
  __device__ RowOwner(const TopLogprobsParams& params, int32_t row)
      : batch_idx(row), idx(0), first(row) {
    if (params.drafts.output_indptr == nullptr) return;
    int32_t low = 0, high = static_cast<int32_t>(params.batch);  // first request ending past row
#pragma unroll 1
    while (low < high) {
      int32_t middle = (low + high) / 2;
      if (params.drafts.output_indptr[middle + 1] > row) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    batch_idx = low < static_cast<int32_t>(params.batch) ? low : -1;
    if (batch_idx < 0) return;
    first = params.drafts.output_indptr[batch_idx];
    idx = row - first;
  }
};

// Checks the values of the request to which a row of processed logprobs belongs.
__device__ inline ErrorCode find_fault(const TopLogprobsParams& params, RowOwner owner) {
  constexpr SamplingOp kOp = SamplingOp::kTopLogprobs;
  int64_t batch_idx = owner.batch_idx;
  // A row index below zero results from a fault in output_indptr.
  if (owner.idx < 0) return code_of(kOp, kOutputIndptrRule);
  TopLogprobsValues values = values_of(params, batch_idx, owner.first);
  Fault fault = find_fault(params, values, batch_idx);
#pragma unroll 1
  for (int32_t i = 0; has_processors(params.processors) && i < values.end - values.begin; ++i) {
    if (fault.found()) break;
    fault = find_row_fault(params, values, batch_idx, i);
  }
  return fault.code;
}

// Finds the first n tokens of softmax(logits), ranked by logit (descending), then id (ascending).
// Grid:    rows * splits, on x.
// Block:   32 to 512 threads; each warp scans leaves of 2 KB, the last block of a row finishes it.
// Smem:    sizeof(RowShared), 40 KB: the row's leaves and a list of 3,072 tokens. During the scan,
//          leaves in flight use the same memory: up to 137 KB on devices that have it. Processors
//          need 41 KB more at 151,936 tokens, a quarter byte per token, or use the workspace if
//          that exceeds a block's limit.
// Cost:    one read of rows * vocab_size logits from memory, then once more the leaves that reach
//          the n-th largest leaf maximum; processed logprobs also cost sample's filters.
// Assumes: rows contiguous, n <= vocab_size.
// Order:   row.cuh; ties to the lower id.
// Source:  threshold selection without a sort of the row.
template <typename T, bool kProcessed>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    top_logprobs_kernel(TopLogprobsParams params, RowPlan plan) {
  wait_for_previous_kernel();
  RowShared& shared = *reinterpret_cast<RowShared*>(shared_memory());
  int32_t idx = static_cast<int32_t>(blockIdx.x) / plan.splits;
  bool processed = params.processed_logprobs;
  SamplingParams filters;
  int32_t* ids = params.outputs.token_ids + idx * params.n;
  float* values = params.outputs.logprobs + idx * params.n;
  int32_t* ranks = params.outputs.ranks ? params.outputs.ranks + idx * params.n : nullptr;
  RowLogits<T, kProcessed> row(params.logits, idx, params.logits_stride, params.vocab_size);
  auto* workspace_end = static_cast<unsigned char*>(params.workspace) + params.workspace_bytes;
  if (processed) {
    RowOwner owner(params, idx);
    bool owned = owner.batch_idx >= 0;
    ErrorCode fault = owned ? find_fault(params, owner) : ErrorCode::kNone;
    if (fault != ErrorCode::kNone) {
      if (static_cast<int32_t>(blockIdx.x) % plan.splits != 0) return;
      for (int64_t i = threadIdx.x; i < params.n; i += blockDim.x) {
        ids[i] = -1;
        values[i] = -INFINITY;
        if (ranks) ranks[i] = 0;
      }
      if (threadIdx.x != 0) return;
      params.outputs.lse[idx] = -INFINITY;
      report_error(params.error, fault);
      return;
    }
    if (owned) filters = filters_of(params.sampling, owner.batch_idx);
    if constexpr (kProcessed) {
      int64_t first = owned ? owner.batch_idx * params.drafts.max_draft_tokens : 0;
      build_overlay(params.processors,
                    owner.batch_idx,
                    idx,
                    owned ? params.positions[owner.batch_idx] : 0,
                    {params.drafts.token_ids + first,
                     params.drafts.parents ? params.drafts.parents + first : nullptr,
                     owner.idx - 1},
                    row.size,
                    plan.overlay,
                    overlay_part(plan, workspace_end, idx));
    }
  }
  RowSlots slots(plan, shared, workspace_end, idx);
  WantedSums wanted(filters, row.size, true, processed);
  if (!scan_row(plan,
                shared,
                row,
                slots,
                false,
                true,
                processed && wanted.warm,
                inverse_temperature(filters.temperature) * kLog2e,
                [&] { return static_cast<int32_t*>(params.workspace) + idx; })) {
    return;
  }
  Row<T, kProcessed> block(shared, row, filters, slots.stats, slots.masses);
  block.fold(true);
  if (threadIdx.x == 0) params.outputs.lse[idx] = block.lse();
  if (params.n == 0) return;
  if (processed) {
    filter(block);
    fold_kept(block);
  }
  auto logprob = [&](RowToken token) {
    return processed ? processed_logprob(block, token) : block.logprob(token);
  };
  Cut cut = everything();
  bool listed = false;
  if (params.n < row.size) cut = select_count(block, static_cast<int32_t>(params.n), &listed);
  if (listed) {
    // The place of a token is the number of tokens before it. The list has all tokens with greater
    // logits.
    for_each_listed(block, cut, [&](float logit, int32_t id) {
      RankKey key = rank_key(logit, id);
      int place = 0, greater = 0;
      for (int i = 0; i < shared.list_count; ++i) {
        place += rank_key(shared.list_x[i], shared.list_id[i]) > key;
        greater += shared.list_x[i] > logit;
      }
      ids[place] = id;
      values[place] = logprob({id, logit});
      if (ranks) ranks[place] = 1 + greater;
    });
    return;
  }
  __syncthreads();
  if (threadIdx.x == 0) shared.list_count = 0;
  __syncthreads();
  for_each_of(block, cut, [&](float logit, int32_t id) {
    int place = atomicAdd(&shared.list_count, 1);
    ids[place] = id;
    values[place] = logit;
  });
  sort_ranking(values, ids, params.n);
  if (ranks) {
    for (int64_t i = threadIdx.x; i < params.n; i += blockDim.x) {
      int64_t low = 0, high = i;  // search for the first token with the same logit
      while (low < high) {
        int64_t middle = (low + high) / 2;
        if (values[middle] > values[i]) {
          low = middle + 1;
        } else {
          high = middle;
        }
      }
      ranks[i] = static_cast<int32_t>(low) + 1;
    }
    __syncthreads();
  }
  for (int64_t i = threadIdx.x; i < params.n; i += blockDim.x) {
    values[i] = logprob({ids[i], values[i]});
  }
}

}  // namespace specops
