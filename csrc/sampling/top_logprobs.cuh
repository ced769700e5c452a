// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "sampling/row_plan.cuh"
#include "sampling/top_logprobs.h"

namespace specops {

// Sorts by (logit descending, id ascending): a bitonic network that compares only upwards, so that
// any count will do. One block; the arrays may be global.
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

// The first n tokens of softmax(logits) by (logit descending, id ascending).
// Grid:    rows * splits, on x.
// Block:   32 to 512 threads; a warp takes leaves of 2 KB, the last block of a row ends it.
// Smem:    sizeof(RowShared), 40 KB: the row's leaves and a list of 3,072 tokens.
// Cost:    one read of rows * vocab_size logits from memory, then the leaves that reach the n-th
//          largest of the leaves' maxima once more.
// Assumes: rows contiguous, n <= vocab_size.
// Order:   row.cuh; ties to the lower id.
// Source:  threshold selection without a sort of the row.
template <typename T>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    top_logprobs_kernel(TopLogprobsParams params, RowPlan plan) {
  RowShared& shared = *reinterpret_cast<RowShared*>(shared_memory());
  int64_t idx = static_cast<int32_t>(blockIdx.x) / plan.splits;
  Row<T> row(params.logits, idx, params.logits_stride, params.vocab_size);
  auto* workspace = static_cast<unsigned char*>(params.workspace);
  RowSlots slots(plan, shared, workspace + params.workspace_bytes, idx);
  auto* counter = static_cast<int32_t*>(params.workspace) + idx;
  if (!scan_row(plan, shared, row, slots, true, false, kLog2e, counter)) return;
  SamplingParams plain;
  RowBlock<T> block(shared, row, plain, slots.stats, slots.masses);
  block.fold(true);
  if (threadIdx.x == 0) params.lse[idx] = block.lse();
  if (params.n == 0) return;
  int32_t* ids = params.token_ids + idx * params.n;
  float* values = params.logprobs + idx * params.n;
  Cut cut = block.everything();
  bool listed = false;
  if (params.n < row.size) cut = block.select_count(static_cast<int32_t>(params.n), &listed);
  if (listed) {
    // A token's place is the number of those before it.
    block.for_each_listed(cut, [&](float logit, int32_t id) {
      Mass key = rank_key(logit, id);
      int place = 0;
      for (int i = 0; i < block.list_count(); ++i) {
        place += rank_key(shared.list_x[i], shared.list_id[i]) > key;
      }
      ids[place] = id;
      values[place] = block.logprob(logit);
    });
    return;
  }
  __syncthreads();
  if (threadIdx.x == 0) shared.list_count = 0;
  __syncthreads();
  block.for_each_kept(cut, [&](float logit, int32_t id) {
    int place = atomicAdd(&shared.list_count, 1);
    ids[place] = id;
    values[place] = logit;
  });
  sort_ranking(values, ids, params.n);
  for (int64_t i = threadIdx.x; i < params.n; i += blockDim.x) {
    values[i] = block.logprob(values[i]);
  }
}

}  // namespace specops
