// SPDX-License-Identifier: Apache-2.0
// What a token of a latent cache (MLA) is: one head for all query heads, a latent, which is the value,
// and a rotated key; both together are the key.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace specops {

constexpr int64_t kLatentDim = 512;
constexpr int64_t kLatentRopeDim = 64;
constexpr int64_t kLatentKeyDim = kLatentDim + kLatentRopeDim;

// Columns of V, for keys of so many elements; and how many elements are read of a token and head.
SPECOPS_HOST_DEVICE constexpr int64_t value_dim_of(int64_t head_dim) {
  return head_dim == kLatentKeyDim ? kLatentDim : head_dim;
}
SPECOPS_HOST_DEVICE constexpr int64_t read_dim_of(int64_t head_dim) {
  return head_dim == kLatentKeyDim ? kLatentKeyDim : 2 * head_dim;
}

}  // namespace specops
