// SPDX-License-Identifier: Apache-2.0
// The serial part of verification: how far a chain of drafts agrees with the rows' own choices.
#pragma once

#include <cstdint>

#include "common/philox.h"

namespace specops {

// What a request's sampling parameters mean to verify; values of specops.sampling.VerifyStrategy.
enum class VerifyStrategy : int32_t {
  kGreedy = 0,
  kTargetMatch = 1,
  kRejection = 2,
  kBlock = 3,
  kTopP = 4,
};

// Values of specops.sampling.AcceptPolicy; all but kNormal and kRejectAll measure, not decode.
enum class AcceptPolicy : int32_t { kNormal = 0, kAcceptAll = 1, kRejectAll = 2, kSynthetic = 3 };

// Whether a value of the strategy array is one that serves chains, or trees.
SPECOPS_HOST_DEVICE bool is_strategy(int32_t value, bool tree) {
  return value >= 0 &&
         value <= static_cast<int32_t>(tree ? VerifyStrategy::kRejection : VerifyStrategy::kTopP);
}

// The same of the policy array: policies that measure are for chains.
SPECOPS_HOST_DEVICE bool is_policy(int32_t value, bool tree) {
  if (tree) {
    return value == static_cast<int32_t>(AcceptPolicy::kNormal) ||
           value == static_cast<int32_t>(AcceptPolicy::kRejectAll);
  }
  return value >= 0 && value <= static_cast<int32_t>(AcceptPolicy::kSynthetic);
}

// Whether row `idx` of a request takes its draft unseen; kAcceptAll's rule. A -1 never passes.
SPECOPS_HOST_DEVICE bool takes_draft(AcceptPolicy policy,
                                     const int32_t* draft_token_ids,
                                     int num_rows,
                                     int idx) {
  return policy == AcceptPolicy::kAcceptAll && idx + 1 < num_rows && draft_token_ids[idx] >= 0;
}

// On entry output_token_ids[0, num_rows) holds each row's choice (under kRejectAll the first is
// enough); on return it holds the emitted tokens, then -1, and logprobs (may be nullptr) zeros
// beside those. Returns the number of accepted drafts: one less than the emitted tokens, 0 for an
// idle request (num_rows = 0), which emits nothing.
SPECOPS_HOST_DEVICE int32_t accept_walk(AcceptPolicy policy,
                                        const int32_t* draft_token_ids,
                                        int num_rows,
                                        int capacity,
                                        int32_t* output_token_ids,
                                        float* logprobs) {
  int limit = policy == AcceptPolicy::kRejectAll ? 0 : num_rows - 1;
  int accepted = 0;
  while (accepted < limit && draft_token_ids[accepted] >= 0 &&
         draft_token_ids[accepted] == output_token_ids[accepted]) {
    ++accepted;
  }
  for (int idx = num_rows > 0 ? accepted + 1 : 0; idx < capacity; ++idx) {
    output_token_ids[idx] = -1;
    if (logprobs != nullptr) logprobs[idx] = 0.0f;
  }
  return accepted;
}

}  // namespace specops
