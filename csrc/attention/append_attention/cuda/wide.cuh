// SPDX-License-Identifier: Apache-2.0
// Products of one tile of latents for 64 rows in append_attention on CUDA. Each warp computes
// scores of 16 rows by 16 tokens and outputs of 64 rows by 64 columns. Scores wait for shared
// memory and outputs wait for tensor cores, so the outputs of one tile are computed interleaved
// with the scores of the next.
#pragma once

#include "attention/append_attention/cuda/block.cuh"
#include "attention/append_attention/cuda/state.cuh"
#include "common/device.cuh"

namespace specops {

// The scores of a warp are computed in steps of 16 elements. Fully unrolled, the loop would load so
// far ahead that it takes the registers of the state.
constexpr int kWideSteps = static_cast<int>(kLatentKeyDim) / 16, kWideStepsAtOnce = 12;
static_assert(kWideSteps == 3 * kWideStepsAtOnce && kWideStepsAtOnce % 4 == 0);

template <typename Block>
struct WideScores {
  using Shape = typename Block::Shape;
  const unsigned char *keys, *queries;
  LanePlace<Shape::kVectors> key_place;         // lanes 0-7, 16-23 at vector 2 k, others at 2 k + 1
  LanePlace<Shape::kQueryVectors> query_place;  // lanes 0-15 at vector 2 k, 16-31 at 2 k + 1

  __device__ __forceinline__ WideScores(const Block& block, int tile, int lane, int warp)
      : keys(block.k_slot(tile) + block.token_warp(warp) * 16 * Shape::kRowBytes),
        queries(block.smem + Shape::kQueries + block.first_score_row(warp) * Shape::kQueryBytes),
        key_place(lane % 8 + lane / 16 * 8, lane / 8 % 2),
        query_place(lane % 16, lane / 16) {}

  // Adds the products of step `done` + k. `done` is a multiple of kWideStepsAtOnce; a step covers
  // 32 bytes of each row.
  __device__ __forceinline__ void add(int done, int k, float (&s)[1][2][4]) const {
    uint32_t a[4], b[4];
    ptx::ldmatrix_x4(b, keys + 32 * done + key_place.after(2 * k));
    ptx::ldmatrix_x4(a, queries + 32 * done + query_place.after(2 * k));
    uint32_t tokens[2][2] = {{b[0], b[1]}, {b[2], b[3]}};
    ptx::mma_m16n8k16<typename Block::Element>(s[0][0], a, tokens[0]);
    ptx::mma_m16n8k16<typename Block::Element>(s[0][1], a, tokens[1]);
  }
};

template <typename Block>
__device__ __forceinline__ void clear_scores(float (&s)[1][2][4]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[0][n][e] = 0.0f;
  }
}

// Computes s = q k for the tile.
template <typename Block>
__device__ __forceinline__ void multiply_wide_keys(const Block& block,
                                                   int tile,
                                                   float (&s)[1][2][4]) {
  unsigned thread = thread_index();
  WideScores<Block> scores(block, tile, thread % kWarpSize, thread / kWarpSize);
  clear_scores<Block>(s);
#pragma unroll 1
  for (int done = 0; done < kWideSteps; done += kWideStepsAtOnce) {
#pragma unroll
    for (int k = 0; k < kWideStepsAtOnce; ++k) scores.add(done, k, s);
  }
}

// Rescales leaf.o by the factors that other warps computed, and adds P V of the tile. If kScores,
// also computes s = q k of the next tile.
template <bool kScores, typename Block>
__device__ __forceinline__ void accumulate_wide(const Block& block,
                                                int tile,
                                                Outputs<Block>& leaf,
                                                float (&s)[1][2][4]) {
  using Shape = typename Block::Shape;
  unsigned thread = thread_index();
  int lane = thread % kWarpSize, warp = thread / kWarpSize;
  const float* rescales = block.rescales() + lane / 4;
  const unsigned char* probs = block.smem + Shape::kProbs;
  const unsigned char* values = block.v_slot(tile) + lane % 16 * Shape::kRowBytes;
  LanePlace<Shape::kProbVectors> weights(lane % 16, lane / 16);
  // B operand: lanes 0-15 address the tokens at a column tile, lanes 16-31 at the next one. Opaque,
  // because otherwise the address of each column tile would take a register.
  int column = opaque((warp * Block::kOutTiles + lane / 16) ^ twist<Shape::kVectors>(lane % 16));
  WideScores<Block> scores(block, tile + 1, lane, warp);
  if constexpr (kScores) clear_scores<Block>(s);
#pragma unroll
  for (int i = 0; i < Block::kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < Block::kOutTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        leaf.o[i][n][e] = __fmul_rn(leaf.o[i][n][e], rescales[16 * i + 8 * (e / 2)]);
      }
    }
  }
#pragma unroll 1
  for (int k = 0; k < Shape::kTile / 16; ++k) {
    uint32_t b[Block::kOutTiles / 2][4];
#pragma unroll
    for (int n = 0; n < Block::kOutTiles; n += 2) {
      ptx::ldmatrix_x4_trans(b[n / 2], values + k * 16 * Shape::kRowBytes + (column ^ n) * 16);
    }
    // Each row tile of outputs is interleaved with kSteps steps of scores.
    constexpr int kSteps = kWideStepsAtOnce / Block::kRowTiles;
    constexpr int kColumns = (Block::kOutTiles + kSteps - 1) / kSteps;
#pragma unroll
    for (int i = 0; i < Block::kRowTiles; ++i) {
      uint32_t a[4];
      const unsigned char* rows = probs + i * 16 * Shape::kProbVectors * 16;
      ptx::ldmatrix_x4(a, rows + (weights.vector ^ 2 * k * 16));
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if constexpr (kScores) scores.add(k * kWideStepsAtOnce, kSteps * i + step, s);
#pragma unroll
        for (int n = step * kColumns; n < (step + 1) * kColumns && n < Block::kOutTiles; ++n) {
          uint32_t columns[2] = {b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]};
          ptx::mma_m16n8k16<typename Block::Element>(leaf.o[i][n], a, columns);
        }
      }
    }
  }
  if constexpr (kScores) {
#pragma unroll
    for (int k = 0; k < kWideStepsAtOnce; ++k) scores.add(2 * kWideStepsAtOnce, k, s);
  }
}

}  // namespace specops
