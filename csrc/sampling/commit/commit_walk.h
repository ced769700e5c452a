// SPDX-License-Identifier: Apache-2.0
// The serial part of commit: computes how many of the emitted tokens a request takes, and how it
// ends. These functions do not write to the request's arrays, except the store functions. An
// injected token is always the last one taken, so the number of tokens and the last token describe
// the result, and a caller can check it before anything is written.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "sampling/commit/commit.h"

namespace specops {

// Values of specops.sampling.FinishReason.
enum class FinishReason : int32_t { kRunning = 0, kStopToken = 1, kStopSequence = 2, kLength = 3 };

struct CommitWalk {
  int32_t count;          // number of tokens taken
  int32_t last_token_id;  // the last token taken; an injected token replaces the emitted one
  int32_t thinking_state;
  int32_t finish_reason;
  int32_t stop_index;
  bool is_injected;
};

// Returns a slot's entry of `values`, or `absent` if `values` is nullptr.
SPECOPS_HOST_DEVICE int32_t of_slot(const int32_t* values, int32_t slot, int32_t absent) {
  return values != nullptr ? values[slot] : absent;
}

// Returns the number of ids before the first -1, at most `capacity`.
SPECOPS_HOST_DEVICE int64_t count_ids(const int32_t* ids, int64_t capacity) {
  int64_t count = 0;
  while (count < capacity && ids[count] >= 0) ++count;
  return count;
}

// Returns the index of the first entry with this id before the first -1; -1 if there is none.
SPECOPS_HOST_DEVICE int32_t find_id(const int32_t* ids, int64_t capacity, int32_t token_id) {
  for (int64_t i = 0; i < capacity && ids[i] >= 0; ++i) {
    if (ids[i] == token_id) return static_cast<int32_t>(i);
  }
  return -1;
}

// The tokens of a request if it takes the first `count` emitted tokens, the last of them replaced
// by last_token_id.
struct CommitTokens {
  const int32_t* row;      // the slot's row of token_ids
  const int32_t* emitted;  // the request's row of emitted.token_ids
  int64_t len;
  int32_t last_token_id;
  int64_t count;
};

// Returns token `idx` of the tokens taken in this step.
SPECOPS_HOST_DEVICE int32_t taken_token(const CommitTokens& tokens, int64_t idx) {
  return idx + 1 == tokens.count ? tokens.last_token_id : tokens.emitted[idx];
}

SPECOPS_HOST_DEVICE int32_t token_at(const CommitTokens& tokens, int64_t position) {
  return position < tokens.len ? tokens.row[position] : taken_token(tokens, position - tokens.len);
}

// Returns the index of the slot's first stop sequence with which the output (without the prompt)
// ends; -1 if there is none.
SPECOPS_HOST_DEVICE int32_t find_stop_sequence(const CommitParams& params,
                                               int32_t slot,
                                               const CommitTokens& tokens,
                                               int64_t num_output_tokens) {
  if (params.rules.stop_sequences == nullptr) return -1;
  const int32_t* sequence = params.rules.stop_sequences +
                            slot * params.rules.num_stop_sequences * params.rules.stop_sequence_len;
  int64_t end = tokens.len + tokens.count;
  for (int64_t i = 0; i < params.rules.num_stop_sequences;
       ++i, sequence += params.rules.stop_sequence_len) {
    int64_t length = count_ids(sequence, params.rules.stop_sequence_len);
    if (length == 0 || length > num_output_tokens) continue;
    int64_t matched = 0;  // number of equal tokens, counted from the end
    while (matched < length &&
           sequence[length - 1 - matched] == token_at(tokens, end - 1 - matched)) {
      ++matched;
    }
    if (matched == length) return static_cast<int32_t>(i);
  }
  return -1;
}

// Applies the rules to one request. Its slot must be valid and have between 0 and max_len tokens.
SPECOPS_HOST_DEVICE CommitWalk commit_walk(const CommitParams& params,
                                           int64_t batch_idx,
                                           int32_t slot) {
  CommitWalk walk{.count = 0,
                  .last_token_id = -1,
                  .thinking_state = of_slot(params.status.thinking_state, slot, -1),
                  .finish_reason = of_slot(params.status.finish_reasons, slot, 0),
                  .stop_index = -1,
                  .is_injected = false};
  if (walk.finish_reason != 0) {
    walk.stop_index = of_slot(params.status.stop_indices, slot, -1);
    return walk;
  }
  CommitTokens tokens{.row = params.token_ids + slot * params.token_ids_stride,
                      .emitted = params.emitted.token_ids + batch_idx * params.max_tokens,
                      .len = params.lens[slot],
                      .last_token_id = -1,
                      .count = 0};
  int32_t prompt_len = of_slot(params.prompt_lens, slot, 0);
  int32_t max_len = of_slot(params.rules.max_lens, slot, -1);
  int32_t min_tokens = of_slot(params.rules.min_tokens, slot, 0);
  const int32_t* stop_token_ids =
      params.rules.stop_token_ids != nullptr
          ? params.rules.stop_token_ids + slot * params.rules.num_stop_tokens
          : nullptr;
  int64_t num_stop_tokens = stop_token_ids != nullptr ? params.rules.num_stop_tokens : 0;

  bool thinks = walk.thinking_state >= 0;
  int32_t think_end = of_slot(params.rules.think_end_token_id, slot, -1);
  int32_t thinking_budget = thinks ? of_slot(params.rules.thinking_budget, slot, -1) : -1;
  int32_t reply_budget = thinks ? of_slot(params.rules.reply_budget, slot, -1) : -1;
  const int32_t* inject = nullptr;
  int64_t num_inject = 0;
  if (thinks && params.rules.inject_token_ids != nullptr) {
    inject = params.rules.inject_token_ids + slot * params.rules.num_inject;
    num_inject = count_ids(inject, params.rules.num_inject);
  }
  int64_t state = walk.thinking_state;

  while (tokens.count < params.max_tokens && tokens.emitted[tokens.count] >= 0) {
    int32_t token_id = tokens.emitted[tokens.count++];
    int64_t num_output_tokens = tokens.len + tokens.count - (prompt_len > 0 ? prompt_len : 0);
    bool may_stop = num_output_tokens >= min_tokens;

    if (state == 0 && token_id == think_end) {
      state = num_inject + 1;
    } else if (thinks) {
      bool over = thinking_budget >= 0 && num_output_tokens > thinking_budget;
      if (state == 0 && (over || (num_inject > 0 && may_stop &&
                                  find_id(stop_token_ids, num_stop_tokens, token_id) >= 0))) {
        state = 1;
      }
      if (state >= 1 && state <= num_inject) {
        token_id = inject[state - 1];
        walk.is_injected = true;
      }
      if (state >= 1 && state < INT32_MAX) ++state;  // counts a token: an injected or a reply token
    }
    tokens.last_token_id = token_id;

    if (may_stop) {
      walk.stop_index = find_id(stop_token_ids, num_stop_tokens, token_id);
      if (walk.stop_index >= 0) {
        walk.finish_reason = static_cast<int32_t>(FinishReason::kStopToken);
        break;
      }
      walk.stop_index = find_stop_sequence(params, slot, tokens, num_output_tokens);
      if (walk.stop_index >= 0) {
        walk.finish_reason = static_cast<int32_t>(FinishReason::kStopSequence);
        break;
      }
    }
    bool is_full = max_len >= 0 && tokens.len + tokens.count >= max_len;
    if (is_full || (reply_budget >= 0 && state > num_inject + reply_budget)) {
      walk.finish_reason = static_cast<int32_t>(FinishReason::kLength);
      break;
    }
    if (walk.is_injected) break;  // the next tokens were drafted after another token
  }
  walk.count = static_cast<int32_t>(tokens.count);
  walk.last_token_id = tokens.last_token_id;
  walk.thinking_state = static_cast<int32_t>(state);
  return walk;
}

// Returns the tokens that a finished walk takes.
SPECOPS_HOST_DEVICE CommitTokens committed_tokens(const CommitParams& params,
                                                  int64_t batch_idx,
                                                  int32_t slot,
                                                  const CommitWalk& walk) {
  return {.row = params.token_ids + slot * params.token_ids_stride,
          .emitted = params.emitted.token_ids + batch_idx * params.max_tokens,
          .len = params.lens[slot],
          .last_token_id = walk.last_token_id,
          .count = walk.count};
}

// Stores the results of the walk in the slot's status arrays, but not its tokens and token counts.
SPECOPS_HOST_DEVICE void store_walk(const CommitParams& params,
                                    int64_t batch_idx,
                                    int32_t slot,
                                    const CommitWalk& walk) {
  params.lens[slot] += walk.count;
  if (params.status.thinking_state != nullptr)
    params.status.thinking_state[slot] = walk.thinking_state;
  if (params.status.finish_reasons != nullptr)
    params.status.finish_reasons[slot] = walk.finish_reason;
  if (params.status.stop_indices != nullptr) params.status.stop_indices[slot] = walk.stop_index;
  if (params.num_committed_tokens != nullptr) params.num_committed_tokens[batch_idx] = walk.count;
}

// Stores position `idx` of the request's emitted outputs, truncated by the walk.
SPECOPS_HOST_DEVICE void store_output(const CommitParams& params,
                                      int64_t batch_idx,
                                      const CommitWalk& walk,
                                      int64_t idx) {
  bool is_cut = idx >= walk.count;
  bool is_last = idx + 1 == walk.count;
  if (!is_cut && !(is_last && walk.is_injected)) return;
  int64_t place = batch_idx * params.max_tokens + idx;
  params.emitted.token_ids[place] = is_cut ? -1 : walk.last_token_id;
  if (params.emitted.logprobs != nullptr) params.emitted.logprobs[place] = 0.0f;
  if (params.emitted.ranks != nullptr) params.emitted.ranks[place] = is_cut ? 0 : 1;
}

// Returns the position of an id in a row of counted_token_ids, or the position at which to insert
// it. Entries of -1 sort last.
SPECOPS_HOST_DEVICE int64_t counted_place(const int32_t* ids, int64_t capacity, int32_t token_id) {
  int64_t begin = 0, end = capacity;
  while (begin < end) {
    int64_t middle = (begin + end) / 2;
    if (static_cast<uint32_t>(ids[middle]) < static_cast<uint32_t>(token_id)) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

// Returns whether the token is new to the request: it is neither in the table nor among the earlier
// tokens of this step.
SPECOPS_HOST_DEVICE bool is_new_token(const int32_t* ids,
                                      int64_t capacity,
                                      const CommitTokens& tokens,
                                      int64_t idx) {
  int32_t token_id = taken_token(tokens, idx);
  for (int64_t i = 0; i < idx; ++i) {
    if (taken_token(tokens, i) == token_id) return false;
  }
  int64_t place = counted_place(ids, capacity, token_id);
  return place == capacity || ids[place] != token_id;
}

}  // namespace specops
