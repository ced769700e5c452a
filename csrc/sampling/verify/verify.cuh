// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "sampling/row/cuda/drafted_row.cuh"
#include "sampling/row/cuda/filters.cuh"
#include "sampling/row/cuda/row_plan.cuh"
#include "sampling/row/cuda/target_row.cuh"
#include "sampling/verify/accept_walk.h"
#include "sampling/verify/choice.cuh"
#include "sampling/verify/request.cuh"
#include "sampling/verify/walk.cuh"

namespace specops {

// Processes a row, or a part of one, in one block. The last block of a row to arrive also finishes
// the row, and the last one of a request also finishes the request.
template <typename T, bool kProcessed, bool kStrategies, bool kStamped>
__device__ __forceinline__ void verify_row(const VerifyParams& params, const RowPlan& plan) {
  RowShared& shared = *reinterpret_cast<RowShared*>(shared_memory());
  int32_t capacity = static_cast<int32_t>(params.drafts.max_draft_tokens) + 1;
  int32_t item = static_cast<int32_t>(blockIdx.x) / plan.splits;
  int32_t batch_idx = item / capacity;
  int32_t row_of_request = item % capacity;  // the row that the block works on
  bool first_split = static_cast<int32_t>(blockIdx.x) % plan.splits == 0;
  VerifyRequest request(params, batch_idx);
  if (request.num_rows == 0 && row_of_request == 0 && first_split) {
    if (request.fault != ErrorCode::kNone && threadIdx.x == 0) {
      report_error(params.error, request.fault);
    }
    emit_nothing(params, batch_idx);
  }
  if (row_of_request >= request.num_read) return;

  if (threadIdx.x == 0) enter_request(params, shared, request, batch_idx, row_of_request);
  __syncthreads();  // from here on, all values of the row are in shared memory
  bool want_logprob = params.outputs.logprobs != nullptr;
  bool want_processed = want_logprob && params.processed_logprobs;

#pragma unroll 1
  while (true) {
    int32_t choice = shared.given_id;
    float logprob = 0.0f;
    int32_t rank = 0;
    if (choice < 0 || want_logprob || params.outputs.ranks != nullptr) {
      int32_t row_idx = shared.first_row + shared.row_of_request;
      auto* counters = static_cast<int32_t*>(params.workspace);
      auto* workspace = static_cast<unsigned char*>(params.workspace);
      RowLogits<T, kProcessed> row(params.logits, row_idx, params.logits_stride, params.vocab_size);
      if constexpr (kProcessed) {
        build_overlay(params.processors,
                      shared.batch_idx,
                      row_idx,
                      params.positions[shared.batch_idx],
                      draft_path(params, shared.batch_idx, shared.row_of_request),
                      row.size,
                      plan.overlay,
                      overlay_part(plan,
                                   workspace + params.workspace_bytes,
                                   row_idx,
                                   kStrategies && shared.again != 0));
      }
      // A function, so that these values take no registers during the scan.
      auto slots = [&] {
        int64_t item = shared.first_row + shared.row_of_request;
        return RowSlots(plan, shared, workspace + params.workspace_bytes, item);
      };
      WantedSums wanted(shared.filters, row.size, want_logprob, params.processed_logprobs);
      bool warm = wanted.warm && (choice < 0 || want_processed);
      float scale = inverse_temperature(shared.filters.temperature) * kLog2e;
      bool ends_row = scan_row(
          plan,
          shared,
          row,
          slots(),
          kStrategies && shared.again != 0,
          wanted.raw,
          warm,
          scale,
          [&] { return counters + params.batch + shared.first_row + shared.row_of_request; });
      if constexpr (kStamped) shared.stamps.mark(VerifyPhase::kScan);
      if (!ends_row) return;
      RowSlots leaves = slots();
      DraftedRow<T, kProcessed> block(shared, row, shared.filters, leaves.stats, leaves.masses);
      block.fold(want_logprob && !want_processed);
      RowToken token{shared.given_id, 0.0f};
      if (token.id < 0 || want_processed) filter(block);
      if (want_processed) fold_kept(block);
      choice = token.id;
      if (choice >= 0) {
        token.logit = block.logit(choice);
      } else {
        RowDecision decision;
        if constexpr (kStrategies) {
          decision = decide(params, shared, block);
          if (shared.again && decision.choice == kGoBack) {
            look_at(shared,
                    row_of_weight(slots_of(params, shared.batch_idx), shared.row_of_request));
            continue;
          }
        } else {
          decision = decide_alone(params, block, shared.batch_idx, shared.row_of_request);
        }
        token = decision.token;
        choice = decision.choice;
      }
      if (want_processed) {
        logprob = processed_logprob(block, token);
      } else if (want_logprob && threadIdx.x == 0) {
        logprob = block.logprob(token);
      }
      if (params.outputs.ranks)
        rank = block.rank(block.broadcast(token), !params.processed_logprobs);
    } else if (static_cast<int32_t>(blockIdx.x) % plan.splits != 0) {
      return;
    }
    if (threadIdx.x == 0) {
      int64_t slot =
          shared.batch_idx * (params.drafts.max_draft_tokens + 1) + shared.row_of_request;
      bool ends = shared.again || shared.rule == static_cast<int32_t>(RowRule::kEnd);
      params.outputs.token_ids[slot] = ends ? ends_with(choice) : choice;
      if (want_logprob) params.outputs.logprobs[slot] = logprob;
      if (params.outputs.ranks) params.outputs.ranks[slot] = rank;
    }
    if constexpr (kStamped) shared.stamps.mark(VerifyPhase::kChoose);
    __syncthreads();
    int64_t batch_idx = shared.batch_idx;
    if (!shared.again) {
      int num_read = shared.num_read;
      auto* counters = static_cast<int32_t*>(params.workspace);
      if (num_read > 1 && !last_to_arrive(shared, counters + batch_idx, num_read)) return;
      if (!drafts_in_order(params, shared, batch_idx)) return;
    }
    if (!kStrategies || shared.num_together == 0) break;
    int32_t accepted = shared.row_of_request;
    if (!shared.again) {
      accepted = weigh_drafts(params, shared, batch_idx, shared.num_together);
      if (accepted < 0) {
        if (threadIdx.x == 0) report_error(params.error, kVerifyDraftProbTokenIds);
        return emit_nothing(params, batch_idx);
      }
      if (accepted < shared.num_together) {
        look_at(shared, accepted);
        if constexpr (kStamped) shared.stamps.mark(VerifyPhase::kWalk);
        continue;
      }
    }
    for (int i = static_cast<int>(threadIdx.x); i < accepted; i += blockDim.x) {
      slots_of(params, batch_idx)[i] =
          params.drafts.token_ids[batch_idx * params.drafts.max_draft_tokens + i];
    }
    __syncthreads();
    break;
  }
  walk_request(params, shared, shared.batch_idx);
}

// Chooses a token in each output row by the request's strategy (if drafts cannot matter, exactly as
// sample does), and then walks along the drafts. kStrategies: drafts may matter, and may form
// trees.
// Grid:    batch * (k + 1) * splits, on x; blocks without a row exit at once.
// Block:   32 to 512 threads; each warp scans leaves of 2 KB, the last block of a row finishes the
//          row. The last row of a request walks, and in block verification visits rejected rows
//          again.
// Smem:    sizeof(RowShared), 40 KB: the row's leaves and a list of 3,072 tokens. During the scan,
//          leaves in flight use the same memory: up to 137 KB on devices that have it. Processors
//          need 41 KB more at 151,936 tokens, a quarter byte per token, or use the workspace if
//          that exceeds a block's limit.
// Cost:    one read of num_output_rows * vocab_size logits; filters as in sample. A rejection reads
//          one leaf for one-hot drafts, the leaves of the listed tokens for sparse draft_probs, and
//          the kept leaves and draft_probs for dense ones.
// Assumes: rows contiguous.
// Order:   row.cuh; the result of a row depends only on its request's parameters, drafts and
//          position.
// Source:  Leviathan et al. 2023 (rejection), Miao et al. 2024 (its trees), Sun et al. 2024
//          (block).
template <typename T, bool kProcessed, bool kStrategies>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    verify_kernel(VerifyParams params, RowPlan plan) {
  wait_for_previous_kernel();
  verify_row<T, kProcessed, kStrategies, false>(params, plan);
}

// Computes the same as verify_kernel, bit for bit, and also records phase times. Used only for
// measurements.
template <typename T, bool kStrategies>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    verify_stamped_kernel(VerifyParams params, RowPlan plan) {
  wait_for_previous_kernel();
  auto& stamps = reinterpret_cast<RowShared*>(shared_memory())->stamps;
  stamps.begin(params.stamps);
  verify_row<T, false, kStrategies, true>(params, plan);
  stamps.mark(VerifyPhase::kWalk);
  stamps.end(params.stamps);
}

}  // namespace specops
