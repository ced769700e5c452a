// SPDX-License-Identifier: Apache-2.0
// commit: appends the tokens that a step emitted to their requests, at most up to the end of each
// request. The rules are in commit_walk.h.
#pragma once

#include <cstdint>

#include "common/cuda_stream.h"
#include "common/error_flag.h"
#include "common/host_device.h"
#include "common/index_rule.h"
#include "common/isa.h"

namespace specops {

// Every array in the following structs, except EmittedTokens::token_ids, may be nullptr: its rule
// is then disabled, or its output is not requested.

// The tokens that a step emitted. commit truncates them in place.
struct EmittedTokens {
  int32_t* token_ids = nullptr;  // [batch, max_tokens], then -1
  float* logprobs = nullptr;     // [batch, max_tokens]
  int32_t* ranks = nullptr;      // [batch, max_tokens]
};

struct EndingRules {
  const int32_t* max_lens = nullptr;        // [num_slots], maximum length; -1 = no limit
  const int32_t* min_tokens = nullptr;      // [num_slots], output tokens before stop rules apply
  const int32_t* stop_token_ids = nullptr;  // [num_slots, num_stop_tokens], -1 padded
  // [num_slots, num_stop_sequences, stop_sequence_len], -1 padded
  const int32_t* stop_sequences = nullptr;
  const int32_t* think_end_token_id = nullptr;  // [num_slots], -1 = none
  const int32_t* thinking_budget = nullptr;     // [num_slots], -1 = none
  const int32_t* reply_budget = nullptr;        // [num_slots], -1 = none
  const int32_t* inject_token_ids = nullptr;    // [num_slots, num_inject], -1 padded
  int64_t num_stop_tokens = 0;
  int64_t num_stop_sequences = 0;
  int64_t stop_sequence_len = 0;
  int64_t num_inject = 0;
};

// Tables of token counts that commit updates.
struct TokenCounts {
  int32_t* counted_token_ids = nullptr;  // [num_slots, num_counted], ascending, then -1
  int32_t* token_counts = nullptr;       // [num_slots, num_counted], 2 * in output + in prompt
  int64_t num_counted = 0;
};

// Outputs of commit, written per slot.
struct RequestStatus {
  int32_t* finish_reasons = nullptr;  // [num_slots], FinishReason
  int32_t* stop_indices = nullptr;    // [num_slots], index of the stop token or sequence, or -1
  int32_t* thinking_state = nullptr;  // [num_slots]
};

// Arguments of commit. A slot is the index of a request in token_ids and in every [num_slots]
// array.
struct CommitParams {
  EmittedTokens emitted;
  const int32_t* slots;        // [batch]; -1 = none
  int32_t* token_ids;          // [num_slots, max_len], rows token_ids_stride apart; extended
  int32_t* lens;               // [num_slots], number of tokens in each row; updated
  const int32_t* prompt_lens;  // [num_slots], number of prompt tokens of the row; may be nullptr
  EndingRules rules;
  TokenCounts counts;
  RequestStatus status;
  int32_t* num_committed_tokens;  // [batch], output; may be nullptr
  int64_t batch;
  int64_t max_tokens;
  int64_t num_slots;
  int64_t max_len;
  int64_t token_ids_stride;  // elements between rows
  ErrorFlag error;
};

SPECOPS_FAULT(4001, kCommitSlot) = "commit: slots must be -1 or below num_slots{ = #}";
SPECOPS_FAULT(4002, kCommitSlotTaken) = "commit: slots must be of no other request, got one again";
SPECOPS_FAULT(4003, kCommitRoom) =
    "commit: lens must be at least 0, with room for the {# }new tokens below max_len{ = #}, got "
    "more than fit";
SPECOPS_FAULT(4004, kCommitCountedTokens) =
    "commit: counts.counted_token_ids must be few enough to leave room for the {# }new ones{ in a "
    "width of #}, got a row too full";

SPECOPS_HOST_DEVICE Fault find_fault(const CommitParams& params, int64_t batch_idx) {
  int32_t slot = params.slots[batch_idx];
  return find_slot_fault(kCommitSlot, slot, batch_idx, params.num_slots);
}

// Checks that the token_ids row of a slot has capacity for `count` more tokens.
SPECOPS_HOST_DEVICE Fault find_room_fault(const CommitParams& params, int32_t slot, int64_t count) {
  int64_t len = params.lens[slot];
  if (len >= 0 && len + count <= params.max_len) return {};
  return fault_at(kCommitRoom, len, slot).with(count, params.max_len);
}

// Checks that a row of counted_token_ids that has `used` ids has capacity for num_new more.
SPECOPS_HOST_DEVICE Fault find_counted_fault(const CommitParams& params,
                                             int32_t slot,
                                             int64_t used,
                                             int64_t num_new) {
  if (used + num_new <= params.counts.num_counted) return {};
  return fault_at(kCommitCountedTokens, used, slot).with(num_new, params.counts.num_counted);
}

SPECOPS_DECLARE_CPU(commit_cpu, CommitParams);
SPECOPS_DECLARE_CUDA(commit_cuda, CommitParams);

}  // namespace specops
