// SPDX-License-Identifier: Apache-2.0
// Layout of a token in a latent cache (MLA). It has one head, which all query heads share: a
// latent, which is also the value, followed by a rotated key. Latent and rotated key together are
// the key.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace specops {

constexpr int64_t kLatentDim = 512;
constexpr int64_t kLatentRopeDim = 64;
constexpr int64_t kLatentKeyDim = kLatentDim + kLatentRopeDim;

// Return the columns of V, and the elements read per token and head, for keys of head_dim elements.
SPECOPS_HOST_DEVICE constexpr int64_t value_dim_of(int64_t head_dim) {
  return head_dim == kLatentKeyDim ? kLatentDim : head_dim;
}
SPECOPS_HOST_DEVICE constexpr int64_t read_dim_of(int64_t head_dim) {
  return head_dim == kLatentKeyDim ? kLatentKeyDim : 2 * head_dim;
}

}  // namespace specops
