// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "sampling/row/cuda/filters.cuh"
#include "sampling/row/cuda/row_plan.cuh"
#include "sampling/row/cuda/target_row.cuh"
#include "sampling/sample/sample.h"

namespace specops {

// Computes token = inverse CDF of filtered softmax(processed logits / temperature), at a uniform
// that depends only on the row's request and position.
// Grid:    rows * splits, on x.
// Block:   32 to 512 threads; each warp scans leaves of 2 KB, the last block of a row finishes it.
// Smem:    sizeof(RowShared), 40 KB: the row's leaves and a list of 3,072 tokens. During the scan,
//          leaves in flight use the same memory: up to 137 KB on devices that have it. Processors
//          need 41 KB more at 151,936 tokens, a quarter byte per token, or use the workspace if
//          that exceeds a block's limit.
// Cost:    one read of rows * vocab_size logits from memory, 3 (6 with a sum) instructions per
//          logit; top-p reads the row once more, top-k and min-p the leaves that reach their bound,
//          typical-p three times what the others keep. Processors: the tables' entries of the
//          request.
// Assumes: rows contiguous, positions >= 0.
// Order:   row.cuh; a row depends only on its own inputs.
// Source:  inverse transform sampling; filters in the order of transformers' logits warpers.
template <typename T, bool kProcessed>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    sample_kernel(SampleParams params, RowPlan plan) {
  wait_for_previous_kernel();
  RowShared& shared = *reinterpret_cast<RowShared*>(shared_memory());
  int64_t idx = static_cast<int32_t>(blockIdx.x) / plan.splits;
  RowLogits<T, kProcessed> row(params.logits, idx, params.logits_stride, params.vocab_size);
  SamplingParams filters = filters_of(params.sampling, idx);
  ErrorCode fault = find_fault<kProcessed>(params, idx).code;
  bool writes = threadIdx.x == 0;
  if (fault != ErrorCode::kNone) {
    if (static_cast<int32_t>(blockIdx.x) % plan.splits != 0) return;
    if (params.outputs.probs) {
      float* probs = params.outputs.probs + idx * params.outputs.probs_stride;
      for (int64_t id = threadIdx.x; id < params.vocab_size; id += blockDim.x) probs[id] = 0.0f;
    }
    if (!writes) return;
    report_error(params.error, fault);
    params.outputs.token_ids[idx] = -1;
    if (params.outputs.logprobs) params.outputs.logprobs[idx] = 0.0f;
    if (params.outputs.ranks) params.outputs.ranks[idx] = 0;
    return;
  }
  auto* workspace_end = static_cast<unsigned char*>(params.workspace) + params.workspace_bytes;
  if constexpr (kProcessed) {
    build_overlay(params.processors,
                  idx,
                  idx,
                  params.positions[idx],
                  {},
                  row.size,
                  plan.overlay,
                  overlay_part(plan, workspace_end, idx));
  }
  WantedSums wanted(
      filters, row.size, params.outputs.logprobs != nullptr, params.processed_logprobs);
  RowSlots slots(plan, shared, workspace_end, idx);
  if (!scan_row(plan,
                shared,
                row,
                slots,
                false,
                wanted.raw,
                wanted.warm,
                inverse_temperature(filters.temperature) * kLog2e,
                [&] { return static_cast<int32_t*>(params.workspace) + idx; })) {
    return;
  }
  // Created again here, so that its registers are free during the scan.
  Row<T, kProcessed> block(
      shared, row, filters_of(params.sampling, idx), slots.stats, slots.masses);
  block.fold(params.outputs.logprobs != nullptr && !params.processed_logprobs);
  RowToken token = choose(block, [&] {
    uint32_t anchor = params.anchors ? static_cast<uint32_t>(params.anchors[idx]) : 0u;
    return uniform_source(params.sampling, idx, params.positions[idx], anchor)(params.purpose, 0);
  });
  if (writes) {
    params.outputs.token_ids[idx] = token.id;
    if (params.outputs.logprobs && !params.processed_logprobs)
      params.outputs.logprobs[idx] = block.logprob(token);
  }
  if (params.outputs.logprobs && params.processed_logprobs) {
    fold_kept(block);
    if (writes) params.outputs.logprobs[idx] = processed_logprob(block, token);
  }
  if (params.outputs.ranks) {
    int32_t rank = block.rank(block.broadcast(token), !params.processed_logprobs);
    if (writes) params.outputs.ranks[idx] = rank;
  }
  if (params.outputs.probs)
    write_target_probs(block, params.outputs.probs + idx * params.outputs.probs_stride);
}

}  // namespace specops
