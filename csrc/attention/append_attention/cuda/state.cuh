// SPDX-License-Identifier: Apache-2.0
// States of append_attention on CUDA and the operation that combines two of them. A state has the
// maximum of the scores, the sum of the weights and the weighted sum of V.
#pragma once

#include "attention/append_attention/cuda/block.cuh"
#include "common/device.cuh"

namespace specops {

// Factors that combine state b with the state a before it. The weights and outputs of an empty
// state are zeros, and the scale of the other state is then 1.
struct Fold {
  float m, l, a_scale, b_scale;
};

__device__ __forceinline__ Fold fold_sums(float a_m, float a_l, float b_m, float b_l) {
  Fold fold;
  fold.m = fmaxf(a_m, b_m);
  float origin = fold.m == -INFINITY ? 0.0f : fold.m;
  fold.a_scale = ptx::exp2_approx(__fsub_rn(a_m, origin));
  fold.b_scale = ptx::exp2_approx(__fsub_rn(b_m, origin));
  fold.l = __fmaf_rn(b_l, fold.b_scale, __fmul_rn(a_l, fold.a_scale));
  return fold;
}

__device__ __forceinline__ float fold_value(const Fold& fold, float a, float b) {
  return __fmaf_rn(b, fold.b_scale, __fmul_rn(a, fold.a_scale));
}

// Returns a final output. Adding zero turns -0 into 0. A fold with an empty state may do so too, so
// without the addition the sign of a zero would depend on the division of work.
__device__ __forceinline__ float finished(float o, float scale) {
  return __fmaf_rn(o, scale, 0.0f);
}
__device__ __forceinline__ float inverse(float l) { return l == 0.0f ? 0.0f : __fdiv_rn(1.0f, l); }

// One lane's part of the outputs of a tile of rows, in the fragment layout of mma: o[i][n][2 * half
// + e] belongs to row 16 * i + lane / 4 + 8 * half and column (warp * kOutTiles + n) * 8 + 2 *
// (lane % 4) + e.
template <typename Block>
struct Outputs {
  float o[Block::kRowTiles][Block::kOutTiles][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < Block::kRowTiles; ++i) {
#pragma unroll
      for (int n = 0; n < Block::kOutTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[i][n][e] = 0.0f;
      }
    }
  }
};

// Returns the first of two states if kFirst is true, else the second.
template <bool kFirst, typename State>
__device__ __forceinline__ State& choose(State& first, State& second) {
  if constexpr (kFirst) {
    return first;
  } else {
    return second;
  }
}

// Four columns of a row's state.
struct StatePart {
  float m = -INFINITY, l = 0.0f;
  float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

  __device__ __forceinline__ void append(float2 sums, float4 x) {
    Fold fold = fold_sums(m, l, sums.x, sums.y);
    m = fold.m;
    l = fold.l;
    o.x = fold_value(fold, o.x, x.x);
    o.y = fold_value(fold, o.y, x.y);
    o.z = fold_value(fold, o.z, x.z);
    o.w = fold_value(fold, o.w, x.w);
  }
  // Appends row `row` of a stored state that has `rows` rows.
  template <int kHeadDim>
  __device__ __forceinline__ void append_state(const float* state, int rows, int row, int quad) {
    append(reinterpret_cast<const float2*>(state + rows * kHeadDim)[row],
           reinterpret_cast<const float4*>(state)[row * (kHeadDim / 4) + quad]);
  }
};

// ---- ends of leaves and chunks ----

// Folds at the end of a leaf and at the end of a chunk. Their order is fixed.

// Stores each row's sums of weights of the leaf that ends with this tile. A row has four partial
// sums; each adds the four lanes of a quad.
template <typename Block>
__device__ __forceinline__ void add_up_weights(const Block& block) {
  using Shape = typename Block::Shape;
  unsigned thread = thread_index();
  int lane = thread % kWarpSize, warp = thread / kWarpSize;
  float* sums = reinterpret_cast<float*>(block.smem + Shape::kSums);
#pragma unroll
  for (int r = 0; r < 2 * Block::kScoreRowTiles; ++r) {
    int row = block.first_score_row(warp) + 8 * r + lane / 4;
#pragma unroll
    for (int part = 0; part < Shape::kSumsOfWarp; ++part) {
      float sum = block.lane_sums()[(r * Shape::kSumsOfWarp + part) * Shape::kThreads + thread];
      sum = __fadd_rn(sum, __shfl_xor_sync(kFullMask, sum, 1));
      sum = __fadd_rn(sum, __shfl_xor_sync(kFullMask, sum, 2));
      int place = block.token_warp(warp) * Shape::kSumsOfWarp + part;
      if (lane % 4 == 0) sums[row * Shape::kSumParts + place] = sum;
    }
  }
}

// Returns the factors that combine a row of the chunk with the leaf that ends with this tile. The
// leaf's four partial sums are added in order. The first warp stores the combined (m, l).
template <typename Block>
__device__ __forceinline__ Fold fold_row(const Block& block, int tile, int row) {
  const float* sums = reinterpret_cast<const float*>(block.smem + Block::Shape::kSums);
  float4 x = reinterpret_cast<const float4*>(sums)[row];
  float l = __fadd_rn(__fadd_rn(__fadd_rn(x.x, x.y), x.z), x.w);
  float2 before = block.chunk_sums(block.leaf_of(tile))[row];
  Fold fold = fold_sums(before.x, before.y, block.running(tile)[row], l);
  unsigned thread = thread_index();
  if (thread < kWarpSize && thread % 4 == 0) {
    block.chunk_sums(block.leaf_of(tile) + 1)[row] = make_float2(fold.m, fold.l);
  }
  return fold;
}

// Folds the leaf that ends with this tile into `chunk`.
template <typename Block>
__device__ __forceinline__ void fold_leaf(const Block& block,
                                          int tile,
                                          const Outputs<Block>& leaf,
                                          Outputs<Block>& chunk) {
  add_up_weights(block);
  __syncthreads();
  int lane = thread_index() % kWarpSize;
#pragma unroll
  for (int i = 0; i < Block::kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Fold fold = fold_row(block, tile, 16 * i + lane / 4 + 8 * half);
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

// Folds the leaf like fold_leaf, but into a chunk in thread-private memory. The first leaf of a
// chunk finds it empty. At the end of the chunk, the result is not stored there but replaces the
// leaf.
template <typename Block>
__device__ __forceinline__ void fold_leaf_in_memory(
    const Block& block, int tile, bool begins, bool ends, Outputs<Block>& leaf) {
  using Shape = typename Block::Shape;
  add_up_weights(block);
  __syncthreads();
  unsigned thread = thread_index();
  int row = thread % kWarpSize / 4;
  float4* chunk = block.chunk_of_block(thread);
#pragma unroll
  for (int i = 0; i < Block::kRowTiles; ++i) {
    Fold fold[2] = {fold_row(block, tile, 16 * i + row), fold_row(block, tile, 16 * i + row + 8)};
    float4 before[Block::kOutTiles];
#pragma unroll
    for (int n = 0; n < Block::kOutTiles; ++n) {
      before[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (!begins) before[n] = chunk[(i * Block::kOutTiles + n) * Shape::kThreads];
    }
#pragma unroll
    for (int n = 0; n < Block::kOutTiles; ++n) {
      float* o = leaf.o[i][n];
      o[0] = fold_value(fold[0], before[n].x, o[0]);
      o[1] = fold_value(fold[0], before[n].y, o[1]);
      o[2] = fold_value(fold[1], before[n].z, o[2]);
      o[3] = fold_value(fold[1], before[n].w, o[3]);
      if (!ends) {
        chunk[(i * Block::kOutTiles + n) * Shape::kThreads] = make_float4(o[0], o[1], o[2], o[3]);
      }
    }
  }
}

// Folds a chunk into the total of a sequence that one block owns. `total` is in thread-private
// memory; `chunk` receives the result as well.
template <typename Block>
__device__ __forceinline__ void fold_chunk(
    const Block& block, int leaf, bool has_total, bool is_last, Outputs<Block>& chunk) {
  using Shape = typename Block::Shape;
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
      float4 before = total[i * (Block::kOutTiles + 1) * Shape::kThreads];
      fold[0] = fold_sums(before.x, before.y, sums[0].x, sums[0].y);
      fold[1] = fold_sums(before.z, before.w, sums[1].x, sums[1].y);
    }
    total[i * (Block::kOutTiles + 1) * Shape::kThreads] =
        make_float4(fold[0].m, fold[0].l, fold[1].m, fold[1].l);
#pragma unroll
    for (int n = 0; n < Block::kOutTiles; ++n) {
      float4* at = total + (i * (Block::kOutTiles + 1) + n + 1) * Shape::kThreads;
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
  __syncthreads();  // all threads have read the sums
  if (thread >= kWarpSize || lane % 4 != 0) return;
#pragma unroll
  for (int i = 0; i < Block::kRowTiles; ++i) {
    float4 sums = total[i * (Block::kOutTiles + 1) * Shape::kThreads];
    block.chunk_sums(leaf)[16 * i + lane / 4] =
        is_last ? make_float2(sums.x, sums.y) : make_float2(-INFINITY, 0.0f);
    block.chunk_sums(leaf)[16 * i + lane / 4 + 8] =
        is_last ? make_float2(sums.z, sums.w) : make_float2(-INFINITY, 0.0f);
  }
}

}  // namespace specops
