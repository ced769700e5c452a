// SPDX-License-Identifier: Apache-2.0
// How requests share max_total_draft_tokens: each is cut to the largest equal cap under which all
// together keep within it, and what is left over goes one each to the first requests in order that
// the cap has cut. Given drafts count, and are never cut.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace specops {

// What a request keeps of `count` drafts, the first `num_given` of them given, under a cap.
SPECOPS_HOST_DEVICE int32_t capped(int32_t count, int32_t num_given, int32_t cap) {
  if (count <= cap) return count;
  return num_given > cap ? num_given : cap;
}

// Whether one more would be one more for it.
SPECOPS_HOST_DEVICE bool is_cut(int32_t count, int32_t num_given, int32_t cap) {
  return count > cap && num_given <= cap;
}

}  // namespace specops
