// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "sampling/accept_walk.h"
#include "sampling/drafted_row.cuh"
#include "sampling/filters.cuh"
#include "sampling/row_plan.cuh"
#include "sampling/target_row.cuh"
#include "sampling/verify.h"

namespace specops {

static_assert(kMaxTreeDrafts <= kListCapacity);

// One request's part of a step.
struct VerifyRequest {
  int32_t first;         // of its rows
  int32_t num_rows;      // 0: idle, or at fault
  int32_t num_read;      // rows that are chosen from
  int32_t num_together;  // drafts that block verification judges together; else 0
  VerifyStrategy strategy;
  AcceptPolicy policy;
  SamplingParams filters;  // as the strategy has them
  ErrorCode fault;         // of a request that is not idle

  // All loads before all looks: they take as long as one.
  __device__ VerifyRequest(const VerifyParams& params, int64_t batch_idx) {
    VerifyValues values = values_of(params, batch_idx);
    first = values.begin;
    strategy = static_cast<VerifyStrategy>(values.strategy);
    policy = static_cast<AcceptPolicy>(values.policy);
    filters = values.filters;
    fault = fault_of(params, values, batch_idx).code;
    num_rows = fault == ErrorCode::kNone ? values.end - values.begin : 0;
    num_read = policy == AcceptPolicy::kRejectAll && num_rows > 0 ? 1 : num_rows;
    num_together = 0;
    if (strategy == VerifyStrategy::kGreedy) filters = {};
    if (strategy != VerifyStrategy::kBlock || num_rows == 0) return;
    Drafts drafts = drafts_of(params, batch_idx, num_rows);
    if (!is_block_step(strategy, policy, drafts, is_greedy(filters))) return;
    num_together = chain_len(drafts);
    num_read = num_together + 1;
  }

  __device__ static Drafts drafts_of(const VerifyParams& params,
                                     int64_t batch_idx,
                                     int32_t num_rows) {
    int64_t node = batch_idx * params.max_draft_tokens;
    return {params.draft_token_ids + node,
            params.parents ? params.parents + node : nullptr,
            num_rows - 1};
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
    if (!is_parent(parent, node)) {
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
      params.accepted_nodes[batch_idx * (capacity - 1) + i] = -1;
    }
  }
  if (threadIdx.x == 0) params.num_accepted_tokens[batch_idx] = 0;
}

// Where a request's rows leave their choices.
__device__ inline int32_t* slots_of(const VerifyParams& params, int64_t batch_idx) {
  return params.output_token_ids + batch_idx * (params.max_draft_tokens + 1);
}

constexpr ErrorCode kListedFault = code_of(SamplingOp::kVerify, SamplingRule::kDraftProbTokenIds);

// Whether drafts, parents, masks and what the rows found are in order; else the request emits nothing.
// Of several faults any may be told, but the same one always.
__device__ inline bool drafts_in_order(const VerifyParams& params,
                                       RowShared& shared,
                                       int64_t batch_idx) {
  int num_rows = shared.num_rows, num_read = shared.num_read;
  Drafts drafts = VerifyRequest::drafts_of(params, batch_idx, num_rows);
  const int32_t* choices = slots_of(params, batch_idx);
  ErrorCode fault = ErrorCode::kNone;
  for (int i = static_cast<int>(threadIdx.x); i < num_rows; i += blockDim.x) {
    if (i < num_read && choices[i] == kNoChoice) fault = kListedFault;
    Fault mask = fault_of_mask(SamplingOp::kVerify, params.processors, shared.first_row + i);
    if (mask.found()) fault = mask.code;
    if (i == drafts.num_nodes) continue;
    Fault parent =
        fault_of_parent(SamplingOp::kVerify, params.parents, params.max_draft_tokens, batch_idx, i);
    if (parent.found()) fault = parent.code;
  }
  fault = static_cast<ErrorCode>(block_reduce<Max>(shared, static_cast<int32_t>(fault)));
  if (fault == ErrorCode::kNone) return true;
  if (threadIdx.x == 0) report_error(params.error, fault);
  emit_nothing(params, batch_idx);
  return false;
}

// The walk of a request whose choices are in the outputs. One thread walks; in shared memory where
// the rows fit, so that it does not wait for every token in turn.
__device__ inline void walk_request(const VerifyParams& params,
                                    RowShared& shared,
                                    int64_t batch_idx) {
  int num_rows = shared.num_rows, num_read = shared.num_read;
  int32_t capacity = static_cast<int32_t>(params.max_draft_tokens) + 1;
  int64_t first = batch_idx * capacity, first_node = batch_idx * (capacity - 1);
  Drafts drafts = VerifyRequest::drafts_of(params, batch_idx, num_rows);
  Emitted emitted{params.output_token_ids + first,
                  params.logprobs ? params.logprobs + first : nullptr,
                  params.ranks ? params.ranks + first : nullptr,
                  params.accepted_nodes ? params.accepted_nodes + first_node : nullptr};
  bool staged = 3 * capacity <= kListCapacity;
  Drafts near_drafts = drafts;
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
    params.num_accepted_tokens[batch_idx] = accept_walk(near_drafts, num_rows, capacity, near);
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

// A coin of a row, `depth` tokens past the request's position. `together`: of block verification.
__device__ inline float coin_of(const VerifyParams& params,
                                int64_t batch_idx,
                                int32_t depth,
                                bool together,
                                Purpose purpose,
                                uint32_t sub_index = 0) {
  if (params.filters.seeds == nullptr) return 0.0f;  // greedy
  int32_t position = params.positions[batch_idx];
  uint32_t anchor = together ? block_anchor(position) : 0;
  return uniform_source(params.filters, batch_idx, position + depth, anchor)(purpose, sub_index);
}

// What the children of a request's row were drawn from.
__device__ inline DraftRow draft_row(const VerifyParams& params, int64_t batch_idx, int32_t row) {
  int64_t first = draft_probs_begin(params, batch_idx, row);
  if (first < 0) return {nullptr, nullptr, 0};
  return {params.draft_probs + first,
          params.draft_prob_token_ids ? params.draft_prob_token_ids + first : nullptr,
          static_cast<int32_t>(params.num_draft_probs)};
}

// Lists the tokens of a row's children in shared.list_id; returns how many. A child that is no token
// ends them.
__device__ inline int list_children(RowShared& shared, const Drafts& drafts, int32_t row) {
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

// The last row before one that has a weight; the first row always has.
__device__ inline int32_t row_of_weight(const int32_t* slots, int32_t row) {
  do --row;
  while (row > 0 && slots[row] == 0);
  return row;
}

// Block verification, once the rows have left the probabilities of their drafts in the outputs, and
// the row after the drafts its own token: weights take the probabilities' place. Returns how many
// drafts are accepted where that is all of them, else the first row to be looked at again, the last
// one with a weight, or -1 where a list names a token that is none.
__device__ inline int32_t weigh_drafts(const VerifyParams& params,
                                       RowShared& shared,
                                       int64_t batch_idx,
                                       int32_t num_drafts) {
  if (warp_id() == 0) {
    Drafts drafts = VerifyRequest::drafts_of(params, batch_idx, num_drafts + 1);
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

// Leaves a request in the shared memory of a row's block. By one thread.
__device__ inline void enter_request(const VerifyParams& params,
                                     RowShared& shared,
                                     const VerifyRequest& request,
                                     int64_t batch_idx,
                                     int32_t row) {
  Drafts drafts = VerifyRequest::drafts_of(params, batch_idx, request.num_rows);
  // No load where drafts have no say; and a tree's children are looked for once they are needed.
  bool have_say =
      request.policy == AcceptPolicy::kAcceptAll || request.policy == AcceptPolicy::kSynthetic ||
      request.strategy == VerifyStrategy::kRejection || request.strategy == VerifyStrategy::kTopP;
  int32_t child = !have_say ? -1 : drafts.parents ? 0 : next_child(drafts, row);
  int32_t draft = child >= 0 && drafts.parents == nullptr ? drafts.token_ids[child] : child;
  float rate = 0.0f;
  if (request.policy == AcceptPolicy::kSynthetic && child >= 0) {
    rate = params.accept_rates[batch_idx * params.max_draft_tokens + child];
  }
  RowRule rule = row_rule(
      request.strategy,
      request.policy,
      draft,
      params.vocab_size,
      rate,
      is_greedy(request.filters),
      [&](Purpose purpose, uint32_t) { return coin_of(params, batch_idx, row, false, purpose); });
  shared.batch_idx = static_cast<int32_t>(batch_idx);
  shared.row_of_request = row;
  shared.again = 0;
  shared.first_row = request.first;
  shared.num_rows = request.num_rows;
  shared.num_read = request.num_read;
  shared.num_together = request.num_together;
  shared.filters = request.filters;
  shared.rule = static_cast<int32_t>(rule);
  shared.given_id = rule == RowRule::kDraft ? draft : -1;
}

// Sends the block to another row of its request.
__device__ inline void look_at(RowShared& shared, int32_t row) {
  __syncthreads();
  if (threadIdx.x == 0) {
    shared.row_of_request = row;
    shared.again = 1;
  }
  __syncthreads();
}

struct RowDecision {
  RowToken token;  // whose logprob and rank belong to the row
  int32_t choice;  // kNoChoice: the drafts are not in order; in block verification, a probability
};

// The row's own token.
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

// The choice of a row in whose drafts have a say, or may have. Block verification: first the
// probability of the row's draft; then, where its weight is known (`again`), a token or kGoBack.
template <typename Block>
__device__ inline RowDecision decide(const VerifyParams& params, RowShared& shared, Block& block) {
  int64_t batch_idx = shared.batch_idx;
  int32_t row = shared.row_of_request;
  bool again = shared.again != 0;
  Drafts drafts = VerifyRequest::drafts_of(params, batch_idx, shared.num_rows);
  auto vocab_size = static_cast<int32_t>(params.vocab_size);
  auto rule = static_cast<RowRule>(shared.rule);
  bool one_hot = block.one_hot();
  bool together = row < shared.num_together;
  bool anchored = shared.num_together > 0;
  DraftRow draft = draft_row(params, batch_idx, row);
  if (!one_hot) block.weigh();

  // Who is judged: children in a list, or one draft that needs no coin.
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
    if (again && row == 0) return -1.0f;  // there is no further back
    int32_t place = again ? row - 1 : depth;
    return coin_of(params, batch_idx, place, anchored, Purpose::kAccept, sub_index);
  };
  if (one_hot && number > 0) {
    // All that the only token of the target leaves is itself.
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

// Each output row's choice, by its strategy and, where drafts have no say, exactly as sample makes it;
// then the walk along the drafts. kStrategies: drafts may have a say, and be trees.
// Grid:    batch * (k + 1) * splits, on x; blocks without a row end at once.
// Block:   32 to 512 threads; a warp takes leaves of 2 KB, the last block of a row ends the row, the
//          last row of a request walks, and in block verification looks at rejected rows again.
// Smem:    sizeof(RowShared), 40 KB: the row's leaves and a list of 3,072 tokens; under processors
//          40 KB more at 151,936 tokens, a quarter byte each.
// Cost:    one read of num_output_rows * vocab_size logits; filters as in sample. A rejection reads a
//          leaf for one-hot drafts, the leaves a list names, or the kept leaves and draft_probs.
// Assumes: rows contiguous.
// Order:   row.cuh; a row depends on its request's parameters, drafts and position alone.
// Source:  Leviathan et al. 2023 (rejection), Miao et al. 2024 (its trees), Sun et al. 2024 (block).
template <typename T, bool kProcessed, bool kStrategies>
__global__ void __launch_bounds__(kMaxRowThreads, 1)
    verify_kernel(VerifyParams params, RowPlan plan) {
  RowShared& shared = *reinterpret_cast<RowShared*>(shared_memory());
  int32_t capacity = static_cast<int32_t>(params.max_draft_tokens) + 1;
  int32_t item = static_cast<int32_t>(blockIdx.x) / plan.splits;
  int32_t batch_idx = item / capacity;
  int32_t row_of_request = item % capacity;  // the row looked at
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
  __syncthreads();  // from here on everything about the row is in shared memory
  bool want_logprob = params.logprobs != nullptr;
  bool want_processed = want_logprob && params.processed_logprobs;

#pragma unroll 1
  while (true) {
    int32_t choice = shared.given_id;
    float logprob = 0.0f;
    int32_t rank = 0;
    if (choice < 0 || want_logprob || params.ranks != nullptr) {
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
                      plan.num_leaves * (RowLogits<T>::kLeafSize / 32));
      }
      RowSlots slots(plan, shared, workspace + params.workspace_bytes, row_idx);
      WantedSums wanted(shared.filters, row.size, want_logprob, params.processed_logprobs);
      bool warm = wanted.warm && (choice < 0 || want_processed);
      float scale = inverse_temperature(shared.filters.temperature) * kLog2e;
      if (kStrategies && shared.again) {
        scan_leaves(row, 0, plan.num_leaves, wanted.raw, warm, scale, slots.stats);
        __syncthreads();
      } else if (!scan_row(plan,
                           shared,
                           row,
                           slots,
                           wanted.raw,
                           warm,
                           scale,
                           counters + params.batch + row_idx)) {
        return;
      }
      DraftedRow<T, kProcessed> block(shared, row, shared.filters, slots.stats, slots.masses);
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
      if (params.ranks) rank = block.rank(block.broadcast(token), !params.processed_logprobs);
    } else if (static_cast<int32_t>(blockIdx.x) % plan.splits != 0) {
      return;
    }
    if (threadIdx.x == 0) {
      int64_t slot = shared.batch_idx * (params.max_draft_tokens + 1) + shared.row_of_request;
      bool ends = shared.again || shared.rule == static_cast<int32_t>(RowRule::kEnd);
      params.output_token_ids[slot] = ends ? ends_with(choice) : choice;
      if (want_logprob) params.logprobs[slot] = logprob;
      if (params.ranks) params.ranks[slot] = rank;
    }
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
        if (threadIdx.x == 0) report_error(params.error, kListedFault);
        return emit_nothing(params, batch_idx);
      }
      if (accepted < shared.num_together) {
        look_at(shared, accepted);
        continue;
      }
    }
    for (int i = static_cast<int>(threadIdx.x); i < accepted; i += blockDim.x) {
      slots_of(params, batch_idx)[i] =
          params.draft_token_ids[batch_idx * params.max_draft_tokens + i];
    }
    __syncthreads();
    break;
  }
  walk_request(params, shared, shared.batch_idx);
}

}  // namespace specops
