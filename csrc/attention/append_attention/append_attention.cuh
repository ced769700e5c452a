// SPDX-License-Identifier: Apache-2.0
// append_attention on CUDA. One template serves decoding, verification and prefill: a block takes
// up to 16, 32 or 64 packed rows (query row, query head of one KV head), a range of whole leaves of
// their KV, and runs the same instructions for a row whoever else is in the tile, and however high
// that is.
//
// What a row's bits mean, and nothing else may change them:
//   tile   kTile tokens: scores by one chain of mma over head_dim; the tile's maximum; weights
//          2^(score - running maximum); P V by one chain over the tokens. Running sums of weights
//          live in 16 lanes of a row (warp, lane of a quad), added up in one order at the leaf's
//          end.
//   leaf   256 tokens at fixed positions, from an empty state.
//   chunk  8 leaves, folded left; the chunks of a row are folded left into its result, and a sink
//          after them all.
// A state with a zero sum is empty and folding it changes nothing, so tiles and leaves in which a
// row sees nothing may run or not. Who computes what (Plan) moves states between registers and
// workspace.
#pragma once

#include "attention/append_attention/cuda/block.cuh"
#include "attention/append_attention/cuda/walk.cuh"
#include "common/device.cuh"

namespace specops {

// out = softmax(sm_scale q K^T) V over the tokens each row sees, and its log-sum-exp; with a sink of
// the head in the softmax's sum, if there are any.
// Grid:    Shape::kBlocksPerSm per SM; a block takes every gridDim.x-th work item: a chunk of
//          2,048 tokens, a split of one or a whole sequence, for a tile of rows and one KV head.
// Block:   4 warps. Scores: a warp owns a quarter of the tile's tokens for all rows. P V: a warp
//          owns a quarter of head_dim for all tokens, so that K and V are read once from shared
//          memory. For 64 rows of latents 8 warps: scores of 16 rows for half of the tokens, P V of
//          an eighth of the columns.
// Smem:    queries, a ring of kStages tiles of K and of V, weights, maxima and sums, page table,
//          plan: 75 KiB for 16 rows at head_dim 128 and two bytes, 99 for 64, never more; 40 on top
//          without totals. 195 for 64 rows of latents, the outputs of whose chunk are in the
//          workspace.
// Cost:    K and V once per tile of rows, 4 * rows * tokens * head_dim flops with rows rounded up
//          to whole tiles; bandwidth-bound up to there. States: 520 bytes per row and work item at
//          head_dim 128.
// Assumes: q rows, caches and workspace aligned to 16 bytes; counters zero.
// Order:   fixed by the positions of the tokens, see the head of this file; fp32.
// Source:  Dao et al. 2022, 2023 (FlashAttention); Ye et al. 2025 (FlashInfer: packed groups).
template <typename T, int kHeadDim, int kTiles, bool kExact = true>
__global__ void __launch_bounds__((AttentionShape<T, kHeadDim, kTiles>::kThreads),
                                  (AttentionShape<T, kHeadDim, kTiles>::kBlocksPerSm))
    append_attention_kernel(const __grid_constant__ AttentionLaunch launch) {
  wait_for_previous_kernel();
  run_all(AttentionBlock<T, kHeadDim, kTiles, kExact>(launch));
}

// The same over 8-bit caches, whose elements are widened in registers (cuda/tile.cuh).
template <typename T, typename Cache, int kHeadDim, int kTiles>
__global__ void __launch_bounds__(kAttentionThreads,
                                  (AttentionShape<T, kHeadDim, kTiles, Cache>::kBlocksPerSm))
    append_8bit_attention_kernel(const __grid_constant__ AttentionLaunch launch) {
  wait_for_previous_kernel();
  run_all(AttentionBlock<T, kHeadDim, kTiles, true, false, Cache>(launch));
}

// The same, to the same bits, by a kernel whose blocks keep time: for measuring, never otherwise.
template <typename T, int kHeadDim, int kTiles>
__global__ void __launch_bounds__(kAttentionThreads,
                                  (AttentionShape<T, kHeadDim, kTiles>::kBlocksPerSm))
    append_attention_stamped_kernel(const __grid_constant__ AttentionLaunch launch) {
  wait_for_previous_kernel();
  run_all(AttentionBlock<T, kHeadDim, kTiles, true, true>(launch));
}

}  // namespace specops
