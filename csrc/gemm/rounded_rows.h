// SPDX-License-Identifier: Apache-2.0
// Size of rounded rows on CUDA (rounded_rows.cuh).
#pragma once

#include <cstdint>

namespace specops {

constexpr int64_t kRoundedRows = 64;  // rows of a tile

// Returns the bytes of 128 inputs of a tile: a byte per row, input and plane of integers, and per
// row four scales and four sums.
constexpr int64_t rounded_stage_bytes(int64_t planes) { return kRoundedRows * (planes * 128 + 32); }

}  // namespace specops
