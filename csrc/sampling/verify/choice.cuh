// SPDX-License-Identifier: Apache-2.0
// Choice of a token in a row by verify on CUDA: a draft, the token that `sample` chooses, or a
// token of the residual after rejections. Also the order in which block verification visits rows.
#pragma once

#include "sampling/row/cuda/drafted_row.cuh"
#include "sampling/row/cuda/draw.cuh"
#include "sampling/verify/accept_walk.h"
#include "sampling/verify/request.cuh"

namespace specops {

static_assert(kMaxTreeDrafts <= kListCapacity);

// Copies the tokens of a row's children to shared.list_id and returns their number. A child with a
// negative id ends the list.
__device__ inline int list_children(RowShared& shared, const RequestDrafts& drafts, int32_t row) {
  __syncthreads();
  if (warp_id() == 0) {
    int number = 0;
    bool ended = false;
    int32_t end = drafts.parents ? drafts.num_nodes : min(row + 1, drafts.num_nodes);
#pragma unroll 1
    for (int32_t begin = row; begin < end && !ended; begin += kWarpSize) {
      int32_t node = begin + lane_id();
      bool child = node < end && (drafts.parents == nullptr || drafts.parents[node] == row - 1);
      int32_t token = child ? drafts.token_ids[node] : -1;
      unsigned ends = __ballot_sync(kFullMask, child && token < 0);
      unsigned before = ends != 0 ? (ends & -ends) - 1 : kFullMask;
      unsigned listed = __ballot_sync(kFullMask, child) & before;
      int place = number + __popc(listed & ((1u << lane_id()) - 1));
      if ((listed >> lane_id() & 1u) != 0 && place < kListCapacity) shared.list_id[place] = token;
      number += __popc(listed);
      ended = ends != 0;
    }
    if (lane_id() == 0) shared.list_count = min(number, kListCapacity);
  }
  __syncthreads();
  return shared.list_count;
}

// Returns the last row before `row` whose weight is above 0. The first row always has such a
// weight.
__device__ inline int32_t row_of_weight(const int32_t* slots, int32_t row) {
  do --row;
  while (row > 0 && slots[row] == 0);
  return row;
}

// Computes the weights of block verification. Before the call, the output arrays have the
// probabilities of the drafts and, in the row after the last draft, that row's own token; the
// weights replace the probabilities. Returns the number of drafts if all are accepted; otherwise
// the row to visit again first, which is the last one whose weight is above 0; -1 if a list of
// draft token ids has an invalid token.
__device__ inline int32_t weigh_drafts(const VerifyParams& params,
                                       RowShared& shared,
                                       int64_t batch_idx,
                                       int32_t num_drafts) {
  if (warp_id() == 0) {
    RequestDrafts drafts = drafts_of(params.drafts, batch_idx, num_drafts);
    int32_t* slots = slots_of(params, batch_idx);
    double weight = 1.0;
    bool wrong = false;
#pragma unroll 1
    for (int32_t i = 0; i < num_drafts; ++i) {
      float target_prob = __int_as_float(slots[i]);
      __syncwarp(kFullMask);
      if (lane_id() == 0) slots[i] = __float_as_int(static_cast<float>(weight));
      bool outside;
      float given = draft_prob(draft_row(params, batch_idx, i),
                               drafts.token_ids[i],
                               static_cast<int32_t>(params.vocab_size),
                               &outside);
      wrong = wrong || outside;
      weight = next_block_weight(weight, target_prob, given);
    }
    __syncwarp(kFullMask);
    bool all = coin_of(params, batch_idx, num_drafts - 1, true, Purpose::kAccept) < weight;
    if (lane_id() == 0) {
      shared.leaf = wrong ? -1 : all ? num_drafts : row_of_weight(slots, num_drafts);
    }
  }
  __syncthreads();
  return shared.leaf;
}

// Makes the block continue with another row of its request.
__device__ inline void look_at(RowShared& shared, int32_t row) {
  __syncthreads();
  if (threadIdx.x == 0) {
    shared.row_of_request = row;
    shared.again = 1;
  }
  __syncthreads();
}

struct RowDecision {
  RowToken token;  // the token whose logprob and rank are reported for the row
  int32_t choice;  // token, or kNoChoice; in block verification, a probability
};

// Chooses the token that `sample` chooses for the row.
template <typename Block>
__device__ inline RowDecision decide_alone(const VerifyParams& params,
                                           Block& block,
                                           int64_t batch_idx,
                                           int32_t row) {
  float uniform = 0.0f;
  if (!block.one_hot()) {
    int32_t depth = path_depth(draft_path(params, batch_idx, row));
    uniform = coin_of(params, batch_idx, depth, false, Purpose::kTarget);
  }
  RowToken token = draw(block, uniform);
  return {token, token.id};
}

// Chooses in a row whose drafts may matter. In block verification, the first visit of a row returns
// the probability of the row's draft; a second visit (`again`), after the weights are computed,
// returns a token or kGoBack.
template <typename Block>
__device__ inline RowDecision decide(const VerifyParams& params, RowShared& shared, Block& block) {
  int64_t batch_idx = shared.batch_idx;
  int32_t row = shared.row_of_request;
  bool again = shared.again != 0;
  RequestDrafts drafts = drafts_of(params.drafts, batch_idx, shared.num_rows - 1);
  auto vocab_size = static_cast<int32_t>(params.vocab_size);
  auto rule = static_cast<RowRule>(shared.rule);
  bool one_hot = block.one_hot();
  bool together = row < shared.num_together;
  bool anchored = shared.num_together > 0;
  DraftRow draft = draft_row(params, batch_idx, row);
  if (!one_hot) block.weigh();

  // Candidates: the children in the list, or a single draft that needs no random number.
  int32_t number = 0, found = kDrawOwn;
  if (rule == RowRule::kRejection) {
    if (!one_hot) number = list_children(shared, drafts, row);
  } else if (together || rule == RowRule::kTopP) {
    int32_t id = drafts.token_ids[row];
    __syncthreads();
    if (threadIdx.x == 0) shared.list_id[0] = id;
    __syncthreads();
    if (again) {
      number = 1;
    } else if (id < vocab_size && (together || (!one_hot && block.target_prob(id) > 0.0))) {
      found = 0;
    }
  }
  double weight = 0.0;
  if (again) weight = row > 0 ? __int_as_float(slots_of(params, batch_idx)[row]) : 1.0;
  int32_t depth = path_depth(draft_path(params, batch_idx, row));
  auto accept_coin = [&](int32_t sub_index) {
    if (again && row == 0) return -1.0f;  // there is no earlier row
    int32_t place = again ? row - 1 : depth;
    return coin_of(params, batch_idx, place, anchored, Purpose::kAccept, sub_index);
  };
  if (one_hot && number > 0) {
    // The target is one-hot, so the residual has at most the target's only token.
    bool outside;
    int32_t only = shared.kept.last_id;
    double given = draft_prob(draft, only, vocab_size, &outside);
    if (draft.one_hot()) given = shared.list_id[0] == only ? 1.0 : 0.0;
    double mass = left_of(block_residual(weight), 1.0, given);
    if (!(accept_coin(0) < block_chance(weight, mass))) found = kGoBack;
  } else if (number > 0) {
    found = block.judge(draft, number, weight, accept_coin);
  }

  if (found == kGoBack) return {{0, 0.0f}, kGoBack};
  if (found == kOutOfOrder) return {{0, block.logit(0)}, kNoChoice};
  if (found >= 0) {
    int32_t id = shared.list_id[found];
    int32_t choice = id;
    if (together) {
      double only = id == shared.kept.last_id ? 1.0 : 0.0;
      double probability = one_hot ? only : block.target_prob(id);
      choice = __float_as_int(static_cast<float>(probability));
    }
    return {{id, block.logit(id)}, choice};
  }
  if (found == kDrawLeft) {
    float uniform = coin_of(params, batch_idx, depth, anchored, Purpose::kResidual);
    RowToken token = block.draw_left(draft, number, uniform);
    return {token, token.id};
  }
  RowToken token = draw(block, coin_of(params, batch_idx, depth, anchored, Purpose::kTarget));
  return {token, together && !again ? __float_as_int(0.0f) : token.id};
}

}  // namespace specops
