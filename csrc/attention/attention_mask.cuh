// SPDX-License-Identifier: Apache-2.0
// Masks of append_attention on CUDA: which tokens a row's bits hide from it.
#pragma once

#include "attention/attention_block.cuh"
#include "common/device.cuh"

namespace specops {

// Whether the mask, if there is one, hides a token from a row of the tile.
template <typename Block>
__device__ __forceinline__ bool is_masked(const Block& block, int row, int token) {
  if (block.params.mask == nullptr) return false;
  Unit& unit = block.unit;
  // Asked for many tokens in a row: what follows from one must not wait in a register for the next.
  row = opaque(row);
  token = opaque(token);
  int packed = unit.first_row + min(row, unit.rows - 1);
  int query = unit.request.qo_begin + packed / block.group();
  int position = unit.request.kv_len - unit.request.qo_len;
  int64_t place = token - mask_begin(block.params, unit.batch_idx, position);
  return !mask_allows(block.params, query, place);
}

}  // namespace specops
