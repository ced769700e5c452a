// SPDX-License-Identifier: Apache-2.0
// Tokens of a request by absolute position: first its known tokens, then its drafts.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace specops {

// Returns the token at `position`; -1 past the end of both. text: [len], drafts: [capacity].
SPECOPS_HOST_DEVICE int32_t token_at(
    const int32_t* text, int64_t len, const int32_t* drafts, int64_t capacity, int64_t position) {
  if (position < len) return text[position];
  return position - len < capacity ? drafts[position - len] : -1;
}

}  // namespace specops
