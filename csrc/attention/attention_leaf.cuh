// SPDX-License-Identifier: Apache-2.0
// What happens at the end of a leaf and of a chunk in append_attention on CUDA: folds of states, in
// the one order there is.
#pragma once

#include "attention/attention_block.cuh"
#include "attention/attention_fold.cuh"
#include "common/device.cuh"

namespace specops {

// chunk = chunk, then the leaf that ends with the tile. The leaf's sums of weights are added up
// first: the four lanes of a quad, then the warps in order.
template <typename Block>
__device__ __forceinline__ void fold_leaf(const Block& block,
                                          int tile,
                                          const Outputs<Block>& leaf,
                                          Outputs<Block>& chunk) {
  using Shape = typename Block::Shape;
  unsigned thread = thread_index();
  int lane = thread % kWarpSize, warp = thread / kWarpSize;
  float* sums = reinterpret_cast<float*>(block.smem + Shape::kSums);
#pragma unroll
  for (int i = 0; i < Block::kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = block.lane_sums()[(2 * i + half) * kAttentionThreads + thread];
      sum = __fadd_rn(sum, __shfl_xor_sync(kFullMask, sum, 1));
      sum = __fadd_rn(sum, __shfl_xor_sync(kFullMask, sum, 2));
      if (lane % 4 == 0) sums[(16 * i + lane / 4 + 8 * half) * kAttentionWarps + warp] = sum;
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < Block::kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int row = 16 * i + lane / 4 + 8 * half;
      float4 x = reinterpret_cast<const float4*>(sums)[row];
      float l = __fadd_rn(__fadd_rn(__fadd_rn(x.x, x.y), x.z), x.w);
      float2 before = block.chunk_sums(block.leaf_of(tile))[row];
      Fold fold = fold_sums(before.x, before.y, block.running(tile)[row], l);
      if (thread < kWarpSize && lane % 4 == 0) {
        block.chunk_sums(block.leaf_of(tile) + 1)[row] = make_float2(fold.m, fold.l);
      }
#pragma unroll
      for (int n = 0; n < Block::kOutTiles; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          chunk.o[i][n][e] = fold_value(fold, chunk.o[i][n][e], leaf.o[i][n][e]);
        }
      }
    }
  }
}

// The chunks of a sequence that one block owns: `total`, thread-private memory, becomes total, then
// the chunk, which takes the result as well.
template <typename Block>
__device__ __forceinline__ void fold_chunk(
    const Block& block, int leaf, bool has_total, bool is_last, Outputs<Block>& chunk) {
  unsigned thread = thread_index();
  int lane = thread % kWarpSize;
  float4* total = block.total_of_block(thread);
#pragma unroll
  for (int i = 0; i < Block::kRowTiles; ++i) {
    float2* place[2] = {block.chunk_sums(leaf) + 16 * i + lane / 4,
                        block.chunk_sums(leaf) + 16 * i + lane / 4 + 8};
    float2 sums[2] = {*place[0], *place[1]};
    Fold fold[2] = {fold_sums(-INFINITY, 0.0f, sums[0].x, sums[0].y),
                    fold_sums(-INFINITY, 0.0f, sums[1].x, sums[1].y)};
    if (has_total) {
      float4 before = total[i * (Block::kOutTiles + 1) * kAttentionThreads];
      fold[0] = fold_sums(before.x, before.y, sums[0].x, sums[0].y);
      fold[1] = fold_sums(before.z, before.w, sums[1].x, sums[1].y);
    }
    total[i * (Block::kOutTiles + 1) * kAttentionThreads] =
        make_float4(fold[0].m, fold[0].l, fold[1].m, fold[1].l);
#pragma unroll
    for (int n = 0; n < Block::kOutTiles; ++n) {
      float4* at = total + (i * (Block::kOutTiles + 1) + n + 1) * kAttentionThreads;
      float* o = chunk.o[i][n];
      if (has_total) {
        float4 before = *at;
        o[0] = fold_value(fold[0], before.x, o[0]);
        o[1] = fold_value(fold[0], before.y, o[1]);
        o[2] = fold_value(fold[1], before.z, o[2]);
        o[3] = fold_value(fold[1], before.w, o[3]);
      }
      if (!is_last) *at = make_float4(o[0], o[1], o[2], o[3]);
    }
  }
  __syncthreads();  // every thread has read the sums
  if (thread >= kWarpSize || lane % 4 != 0) return;
#pragma unroll
  for (int i = 0; i < Block::kRowTiles; ++i) {
    float4 sums = total[i * (Block::kOutTiles + 1) * kAttentionThreads];
    block.chunk_sums(leaf)[16 * i + lane / 4] =
        is_last ? make_float2(sums.x, sums.y) : make_float2(-INFINITY, 0.0f);
    block.chunk_sums(leaf)[16 * i + lane / 4 + 8] =
        is_last ? make_float2(sums.z, sums.w) : make_float2(-INFINITY, 0.0f);
  }
}

}  // namespace specops
