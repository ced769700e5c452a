// SPDX-License-Identifier: Apache-2.0
// 8-bit caches in append_attention on CUDA. A tile lies in shared memory as it does in the cache;
// ldmatrix, which moves pairs of bytes, brings a lane four elements, and the lane widens them to
// bf16, which is exact. Of 16 columns the even ones come first then: queries are stored in this
// order, and results leave in it.
#pragma once

#include <type_traits>

#include "attention/attention_block.cuh"
#include "attention/attention_fold.cuh"
#include "attention/kv_element.h"
#include "common/device.cuh"

namespace specops {

// Four elements as bf16: bytes 0 and 2 in x, 1 and 3 in y.
template <typename Cache>
__device__ __forceinline__ uint2 widen(uint32_t word) {
  if constexpr (std::is_same_v<Cache, KvInt8>) {
    // 128 + (its low bits) - (128 or, of a negative one, 256): three numbers that bf16 has.
    constexpr uint32_t kBase = 0x43004300u, kMinusOne = 0xbf80bf80u;
    auto two = [](uint32_t bytes) {
      uint32_t low = ptx::merge_bits(bytes, kBase, 0x007f007fu);
      uint32_t origin = ptx::merge_bits(bytes, kBase, 0x00800080u);
      return ptx::fma_bf16x2(origin, kMinusOne, low);
    };
    return {two(word), two(word >> 8)};
  } else {
    static_assert(std::is_same_v<Cache, KvE4M3>);
    // With the bits of exponent and mantissa in place it is 2^-120 times the value, subnormal ones
    // too. Adding -0 keeps the sign of a zero.
    constexpr uint32_t kUnit = 0x7b807b80u, kMinusZero = 0x80008000u;
    auto two = [](uint32_t magnitude, uint32_t sign) {
      return ptx::fma_bf16x2(ptx::merge_bits(magnitude, sign, 0x07f007f0u), kUnit, kMinusZero);
    };
    uint32_t signs = word & 0x80808080u;
    ptx::forget(signs);  // else nvcc shifts first and masks twice
    return {two(word << 4, signs << 8), two(word >> 4, signs)};
  }
}

// Two vectors of 8 elements of a query to the place of the first, even columns first.
template <typename Shape>
__device__ __forceinline__ void store_query(
    unsigned char* queries, int row, int vector, uint4 first, uint4 second) {
  auto evens = [](uint32_t a, uint32_t b) { return (a & 0xffffu) | b << 16; };
  auto odds = [](uint32_t a, uint32_t b) { return a >> 16 | (b & 0xffff0000u); };
  *reinterpret_cast<uint4*>(queries + place_of<Shape::kQueryVectors>(row, vector)) = {
      evens(first.x, first.y),
      evens(first.z, first.w),
      evens(second.x, second.y),
      evens(second.z, second.w)};
  *reinterpret_cast<uint4*>(queries + place_of<Shape::kQueryVectors>(row, vector + 1)) = {
      odds(first.x, first.y),
      odds(first.z, first.w),
      odds(second.x, second.y),
      odds(second.z, second.w)};
}

// The column of o[n][e] of a warp (Outputs): tile 2 g has the even columns of group g of 16, tile
// 2 g + 1 the odd ones.
template <typename Block>
__device__ __forceinline__ int column_of_byte(int warp, int lane, int n, int e) {
  int tile = warp * Block::kOutTiles + n;
  return tile / 2 * 16 + 4 * (lane % 4) + 2 * e + tile % 2;
}

// The scale a lane holds of a tile: lanes 0 to 15 of the warp's tokens for K, 16 to 31 for V. 0: not
// to be read.
template <typename Block>
__device__ __forceinline__ float load_scale(const Block& block, int tile) {
  using Shape = typename Block::Shape;
  constexpr int kTokens = 8 * Block::kScoreTiles, kBlocks = Shape::kTile / kPageBlock;
  if (tile > block.last_tile()) return 0.0f;
  unsigned thread = thread_index_in_loop<Block>();
  int lane = thread % kWarpSize, row = thread / kWarpSize * kTokens + lane % 16;
  const int* table = reinterpret_cast<const int*>(block.smem + Shape::kTable) +
                     static_cast<unsigned>(tile) * kBlocks % (2 * kChunkBlocks);
  int token = tile * Block::kTile + row;
  if (lane % 16 >= kTokens || token < block.unit.load_begin || token >= block.unit.load_end) {
    return 0.0f;
  }
  int place = table[row / kPageBlock];
  if (place < 0) return 0.0f;
  int64_t slot = int64_t{place} * kPageBlock + row % kPageBlock;
  const float* scales = lane < 16 ? block.params.k_scales : block.params.v_scales;
  return scales[slot * block.params.num_kv_heads + block.unit.head];
}

// That of the warp's token 8 * n + 2 * (lane % 4) + e, for K (0) or V (1).
template <typename Block>
__device__ __forceinline__ float scale_of_token(float scale, int which, int n, int e) {
  int lane = static_cast<int>(thread_index_in_loop<Block>()) % kWarpSize;
  return __shfl_sync(kFullMask, scale, 16 * which + 8 * n + 2 * (lane % 4) + e);
}

// s += q k of the warp's tokens.
template <typename Block>
__device__ __forceinline__ void multiply_byte_keys(
    const Block& block,
    const unsigned char* keys,
    float (&s)[Block::kRowTiles][Block::kScoreTiles][4]) {
  using Shape = typename Block::Shape;
  constexpr int kScoreTiles = Block::kScoreTiles;
  unsigned thread = thread_index_in_loop<Block>();
  int lane = thread % kWarpSize, warp = thread / kWarpSize;
  // B: lanes 0-7 the first 8 tokens at vector 2 k, 8-15 at 2 k + 1, 16-31 the next 8 tokens.
  int token = warp * (8 * kScoreTiles) + lane % 8 + (kScoreTiles == 2 ? lane / 16 * 8 : 0);
  LanePlace<Shape::kVectors> b_place(token, lane / 8 % 2);
  LanePlace<Shape::kQueryVectors> a_place(lane % 16, lane / 16);
  const unsigned char* queries = block.smem + Shape::kQueries;
#pragma unroll
  for (int k = 0; k < Block::kHeadDim / 32; ++k) {
    uint32_t words[kScoreTiles][2];
    if constexpr (kScoreTiles == 2) {
      uint32_t r[4];
      ptx::ldmatrix_x4(r, keys + b_place.after(2 * k));
      words[0][0] = r[0];
      words[0][1] = r[1];
      words[1][0] = r[2];
      words[1][1] = r[3];
    } else {
      ptx::ldmatrix_x2(words[0], keys + b_place.after(2 * k));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t b[kScoreTiles][2];
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n) {
        uint2 wide = widen<typename Block::Cache>(words[n][half]);
        b[n][0] = wide.x;
        b[n][1] = wide.y;
      }
#pragma unroll
      for (int i = 0; i < Block::kRowTiles; ++i) {
        uint32_t a[4];
        ptx::ldmatrix_x4(a,
                         queries + i * 16 * Shape::kQueryBytes + a_place.after(2 * (2 * k + half)));
#pragma unroll
        for (int n = 0; n < kScoreTiles; ++n) {
          ptx::mma_m16n8k16<typename Block::Element>(s[i][n], a, b[n]);
        }
      }
    }
  }
}

// leaf.o += P V.
template <typename Block>
__device__ __forceinline__ void add_byte_values(const Block& block,
                                                const unsigned char* values,
                                                Outputs<Block>& leaf) {
  using Shape = typename Block::Shape;
  constexpr int kOutTiles = Block::kOutTiles;
  constexpr int kGroups = (kOutTiles + 1) / 2;  // of 16 columns
  static_assert(kGroups == 1 || kGroups % 2 == 0);
  unsigned thread = thread_index_in_loop<Block>();
  int lane = thread % kWarpSize, warp = thread / kWarpSize;
  // Where a warp has an odd number of tiles, every other warp begins with odd columns.
  bool begins_odd = kOutTiles % 2 != 0 && warp % 2 != 0;
  const unsigned char* probs = block.smem + Shape::kProbs;
  LanePlace<Shape::kProbVectors> a_place(lane % 16, lane / 16);
  // B: lanes 0-15 the tokens at a group, 16-31 at the next.
  int group = warp * kOutTiles / 2 + (kGroups > 1 ? lane / 16 : 0);
  int b_row = opaque_in_loop<Block>(lane % 16 * Shape::kRowBytes);
  int b_vector = opaque_in_loop<Block>(group ^ twist<Shape::kVectors>(lane % 16));
#pragma unroll
  for (int k = 0; k < Block::kTile / 16; ++k) {
    uint32_t b[2 * kGroups][2];
#pragma unroll
    for (int g = 0; g < kGroups; g += 2) {
      const unsigned char* place = values + k * 16 * Shape::kRowBytes + b_row + (b_vector ^ g) * 16;
      uint32_t r[kGroups > 1 ? 4 : 2];
      if constexpr (kGroups > 1) {
        ptx::ldmatrix_x4_trans(r, place);
      } else {
        ptx::ldmatrix_x2_trans(r, place);
      }
#pragma unroll
      for (int i = 0; i < (kGroups > 1 ? 4 : 2); ++i) {
        uint2 wide = widen<typename Block::Cache>(r[i]);
        b[2 * (g + i / 2)][i % 2] = wide.x;
        b[2 * (g + i / 2) + 1][i % 2] = wide.y;
      }
    }
#pragma unroll
    for (int i = 0; i < Block::kRowTiles; ++i) {
      uint32_t a[4];
      ptx::ldmatrix_x4(a, probs + i * 16 * Shape::kProbVectors * 16 + a_place.after(2 * k));
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) {
        constexpr int kMore = kOutTiles % 2;
        uint32_t column[2] = {begins_odd ? b[n + kMore][0] : b[n][0],
                              begins_odd ? b[n + kMore][1] : b[n][1]};
        ptx::mma_m16n8k16<typename Block::Element>(leaf.o[i][n], a, column);
      }
    }
  }
}

}  // namespace specops
