// SPDX-License-Identifier: Apache-2.0
// Masks of append_attention on CUDA: scores of tokens that a row's bits hide from it.
#pragma once

#include "attention/attention_block.cuh"
#include "common/device.cuh"

namespace specops {

// s = -inf where the mask hides the token from the row, in the layout of score().
template <int kRowTiles, typename Block>
__device__ __forceinline__ void hide_masked(const Block& block,
                                            int tile,
                                            float (&s)[kRowTiles][Block::kScoreTiles][4]) {
  Unit& unit = block.unit;
  unsigned thread = thread_index();
  int lane = thread % kWarpSize, warp = thread / kWarpSize;
  int token = tile * Block::kTile + warp * (8 * Block::kScoreTiles) + 2 * (lane % 4);
  int position = unit.request.kv_len - unit.request.qo_len;
  int64_t place = token - mask_begin(block.params, unit.batch_idx, position);
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int packed = unit.first_row + min(16 * i + lane / 4 + 8 * half, unit.rows - 1);
      int64_t row = int64_t{unit.request.qo_begin} + packed / block.group();
#pragma unroll
      for (int n = 0; n < Block::kScoreTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (!mask_allows(block.params, row, place + 8 * n + e)) s[i][n][2 * half + e] = -INFINITY;
        }
      }
    }
  }
}

}  // namespace specops
