// SPDX-License-Identifier: Apache-2.0
// How requests share max_total_draft_tokens: each is cut to the largest equal cap under which all
// together keep within it, and what is left over goes one each to the first requests in order that
// the cap has cut. Given drafts count, and are never cut.
//
// Where a total is shared, ngram_propose leaves in num_draft_tokens both numbers that the share is
// made of: num_given_drafts may be the same array.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace specops {

// The widest draft_token_ids whose two numbers fit one entry: (k + 1)^2 is below 2^31.
constexpr int64_t kNgramMaxSharedDrafts = 46339;

// What is known of a request before its share: `count` drafts, the first `num_given` of them given.
struct NgramShare {
  int32_t num_given;
  int32_t count;
};

SPECOPS_HOST_DEVICE int32_t pack_share(NgramShare share, int64_t capacity) {
  return share.num_given * static_cast<int32_t>(capacity + 1) + share.count;
}

SPECOPS_HOST_DEVICE NgramShare unpack_share(int32_t entry, int64_t capacity) {
  auto base = static_cast<int32_t>(capacity + 1);
  return {entry / base, entry % base};
}

// What a request keeps of its drafts under a cap.
SPECOPS_HOST_DEVICE int32_t capped(NgramShare share, int32_t cap) {
  if (share.count <= cap) return share.count;
  return share.num_given > cap ? share.num_given : cap;
}

// Whether one more would be one more for it.
SPECOPS_HOST_DEVICE bool is_cut(NgramShare share, int32_t cap) {
  return share.count > cap && share.num_given <= cap;
}

}  // namespace specops
