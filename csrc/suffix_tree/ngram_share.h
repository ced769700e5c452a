// SPDX-License-Identifier: Apache-2.0
// Division of max_total_draft_tokens among requests. Drafts are truncated to the largest common cap
// that keeps the total within the limit. What remains of the limit goes to the first truncated
// requests in order, one token each. Drafts that were already in a row (num_given_drafts) count
// towards the total, but are never truncated.
//
// If there is a total limit, ngram_propose first stores both numbers of a request (drafts, and
// drafts already in the row) packed in num_draft_tokens, because num_given_drafts may be the same
// array.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace specops {

// The widest draft_token_ids for which both numbers fit one entry: (k + 1)^2 is below 2^31.
constexpr int64_t kNgramMaxSharedDrafts = 46339;

// A request before the division: it has `count` drafts, of which the first `num_given` were already
// in the row.
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

// Returns the number of drafts that a request keeps under a cap.
SPECOPS_HOST_DEVICE int32_t capped(NgramShare share, int32_t cap) {
  if (share.count <= cap) return share.count;
  return share.num_given > cap ? share.num_given : cap;
}

// Returns whether a cap higher by one would give the request one more draft.
SPECOPS_HOST_DEVICE bool is_cut(NgramShare share, int32_t cap) {
  return share.count > cap && share.num_given <= cap;
}

}  // namespace specops
