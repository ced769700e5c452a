// SPDX-License-Identifier: Apache-2.0
// Replaces csrc/common/philox.h when the sampling ops are compiled for tests/exact_distribution.py:
// every uniform comes from a table, so that a test can integrate over it.
#pragma once

#define philox_uniform generated_uniform
#include "../../../csrc/common/philox.h"
#undef philox_uniform

namespace specops {

// Returns the entry of the table in row key.seed and the column of the rest of the key; adds a
// column for a new key.
float scripted_uniform(const UniformKey& key, Purpose purpose);

SPECOPS_HOST_DEVICE float philox_uniform(const UniformKey& key, Purpose purpose) {
  return scripted_uniform(key, purpose);
}

}  // namespace specops
