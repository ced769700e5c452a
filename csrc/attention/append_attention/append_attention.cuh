// SPDX-License-Identifier: Apache-2.0
// append_attention on CUDA. One kernel template serves decoding, verification and prefill. A block
// takes a tile of up to 16, 32 or 64 packed rows (a packed row is one query row and one query head
// of a KV head) and a range of whole leaves of their KV. The instructions for a row do not depend
// on the other rows of the tile or on the height of the tile.
//
// The bits of a row's result are defined by these three levels and by nothing else:
//   tile   kTile tokens: scores by one chain of mma over head_dim; the tile's maximum; weights
//          2^(score - running maximum); P V by one chain over the tokens. Running sums of weights
//          live in 16 lanes of a row (warp, lane of a quad), added up in one order at the leaf's
//          end.
//   leaf   256 tokens at fixed positions, from an empty state.
//   chunk  8 leaves, folded left; the chunks of a row are folded left into its result, and a sink
//          is folded in last.
// A state with a zero sum is empty, and folding it changes nothing. Tiles and leaves in which a row
// sees nothing may therefore be run or skipped. The division of work among blocks (Plan) decides
// only whether a state is kept in registers or passes through the workspace.
#pragma once

#include "attention/append_attention/cuda/block.cuh"
#include "attention/append_attention/cuda/walk.cuh"
#include "common/device.cuh"

namespace specops {

// Computes out = softmax(sm_scale q K^T) V over the tokens that each row sees, and its log-sum-exp.
// With sinks, the sink of the row's head is added to the softmax denominator.
// Grid:    Shape::kBlocksPerSm per SM; a block takes every gridDim.x-th work item: a chunk of 2,048
//          tokens, a split of a chunk or a whole sequence, for a tile of rows and one KV head.
// Block:   4 warps. Scores: a warp owns a quarter of the tile's tokens for all rows. P V: a warp
//          owns a quarter of head_dim for all tokens, so that K and V are read once from shared
//          memory. 64 rows of latents use 8 warps: a warp scores 16 rows for half of the tokens and
//          computes P V for an eighth of the columns.
// Smem:    queries, a ring of kStages tiles of K and of V, weights, maxima and sums, page table,
//          plan: 75 KiB for 16 rows at head_dim 128 and two bytes, 99 for 64, never more; 40 more
//          if totals are not in the workspace. 195 for 64 rows of latents, which keep the outputs
//          of their chunk in the workspace. float32 heads of 512 have one slot for K and V, and
//          read their queries from global memory.
// Cost:    K and V once per tile of rows, 4 * rows * tokens * head_dim flops with rows rounded up
//          to whole tiles; bandwidth-bound up to there. States: 520 bytes per row and work item at
//          head_dim 128.
// Assumes: q rows, caches and workspace aligned to 16 bytes; counters zero.
// Order:   fixed by the positions of the tokens, see the top of this file; fp32.
// Source:  Dao et al. 2022, 2023 (FlashAttention); Ye et al. 2025 (FlashInfer: packed groups).
template <typename T, int kHeadDim, int kTiles, bool kExact = true>
__global__ void __launch_bounds__((AttentionShape<T, kHeadDim, kTiles>::kThreads),
                                  (AttentionShape<T, kHeadDim, kTiles>::kBlocksPerSm))
    append_attention_kernel(const __grid_constant__ AttentionLaunch launch) {
  wait_for_previous_kernel();
  run_all(AttentionBlock<T, kHeadDim, kTiles, kExact>(launch));
}

// Computes the same as append_attention_kernel over 8-bit caches, whose elements are widened in
// registers (cuda/tile.cuh).
template <typename T, typename Cache, int kHeadDim, int kTiles>
__global__ void __launch_bounds__(kAttentionThreads,
                                  (AttentionShape<T, kHeadDim, kTiles, Cache>::kBlocksPerSm))
    append_8bit_attention_kernel(const __grid_constant__ AttentionLaunch launch) {
  wait_for_previous_kernel();
  run_all(AttentionBlock<T, kHeadDim, kTiles, true, false, Cache>(launch));
}

// Computes the same as append_attention_kernel, bit for bit, and also records the time of each
// phase. Used only for measurements.
template <typename T, int kHeadDim, int kTiles>
__global__ void __launch_bounds__(kAttentionThreads,
                                  (AttentionShape<T, kHeadDim, kTiles>::kBlocksPerSm))
    append_attention_stamped_kernel(const __grid_constant__ AttentionLaunch launch) {
  wait_for_previous_kernel();
  run_all(AttentionBlock<T, kHeadDim, kTiles, true, true>(launch));
}

}  // namespace specops
