// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/philox.h"
#include "sampling/filters.cuh"
#include "sampling/row_plan.cuh"
#include "sampling/sample.h"

namespace specops {

// token = inverse CDF of filtered softmax(logits / temperature) at the row's own uniform.
// Grid:    rows * splits, on x.
// Block:   32 to 512 threads; a warp takes leaves of 2 KB, the last block of a row ends it.
// Smem:    sizeof(RowShared), 40 KB: the row's leaves and a list of 3,072 tokens.
// Cost:    one read of rows * vocab_size logits from memory, 3 (6 with a sum) instructions a logit;
//          top-p reads the row once more, top-k and min-p the leaves that reach their bound.
// Assumes: rows contiguous, positions >= 0.
// Order:   row.cuh; a row depends on nothing but itself.
// Source:  inverse transform sampling; filters in the order of transformers' logits warpers.
template <typename T>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    sample_kernel(SampleParams params, RowPlan plan) {
  RowShared& shared = *reinterpret_cast<RowShared*>(shared_memory());
  int64_t idx = static_cast<int32_t>(blockIdx.x) / plan.splits;
  Row<T> row(params.logits, idx, params.logits_stride, params.vocab_size);
  SamplingParams filters = filters_of(params.filters, idx);
  ErrorCode fault = fault_of(filters, kSampleFaults);
  bool writes = threadIdx.x == 0;
  if (fault != ErrorCode::kNone) {
    if (!writes || static_cast<int32_t>(blockIdx.x) % plan.splits != 0) return;
    report_error(params.error, fault);
    params.token_ids[idx] = -1;
    if (params.logprobs) params.logprobs[idx] = 0.0f;
    return;
  }
  bool want_logprob = params.logprobs != nullptr;
  auto* workspace = static_cast<unsigned char*>(params.workspace);
  RowSlots slots(plan, shared, workspace + params.workspace_bytes, idx);
  if (!scan_row(plan,
                shared,
                row,
                slots,
                want_logprob,
                needs_warm(filters, row.size),
                inverse_temperature(filters.temperature) * kLog2e,
                static_cast<int32_t*>(params.workspace) + idx)) {
    return;
  }
  // read again, and not kept over the scan
  RowBlock<T> block(shared, row, filters_of(params.filters, idx), slots.stats, slots.masses);
  block.fold(want_logprob);
  RowToken token =
      block.choose([&] { return uniform_of(params.filters, idx, params.positions[idx]); });
  if (!writes) return;
  params.token_ids[idx] = token.id;
  if (want_logprob) params.logprobs[idx] = block.logprob(token.logit);
}

}  // namespace specops
