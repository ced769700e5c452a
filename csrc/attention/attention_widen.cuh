// SPDX-License-Identifier: Apache-2.0
// 8-bit caches in append_attention on CUDA: a tile is copied as it lies and widened in shared memory to
// elements of the dtype of q, which are exact; with its scales it is a tile like any other from there
// on.
#pragma once

#include <type_traits>

#include "attention/attention_block.cuh"
#include "attention/kv_element.h"
#include "common/device.cuh"

namespace specops {

// Where a thread's vectors of 16 elements stand in a tile. It copies, and later widens, the same
// ones, so that nobody waits for another's copies.
template <typename Shape>
struct RawShare {
  static constexpr int kSteps = Shape::kTile * Shape::kRawVectors / kAttentionThreads;
  static_assert(kSteps * kAttentionThreads == Shape::kTile * Shape::kRawVectors);
  int thread;

  __device__ __forceinline__ int row(int step) const {
    return (step * kAttentionThreads + thread) / Shape::kRawVectors;
  }
  __device__ __forceinline__ int vector(int step) const {
    return (step * kAttentionThreads + thread) % Shape::kRawVectors;
  }
  __device__ __forceinline__ int place(int step) const {
    return (step * kAttentionThreads + thread) * 16;
  }
};

// The slot of a row of a tile in the caches; -1: not to be read.
template <typename Block>
__device__ __forceinline__ int64_t slot_of(const Block& block, int tile, int row) {
  using Shape = typename Block::Shape;
  constexpr int kBlocks = Shape::kTile / kPageBlock;
  const int* table = reinterpret_cast<const int*>(block.smem + Shape::kTable) +
                     static_cast<unsigned>(tile) * kBlocks % (2 * kChunkBlocks);
  int place = table[row / kPageBlock], token = tile * Block::kTile + row;
  bool valid = place >= 0 && token >= block.unit.load_begin && token < block.unit.load_end;
  return valid ? int64_t{place} * kPageBlock + row % kPageBlock : -1;
}

// Starts the copy of one tile; tokens out of range become zeros.
template <typename Block>
__device__ __forceinline__ void load_raw_tile(const Block& block,
                                              const void* cache,
                                              unsigned char* slot,
                                              int tile) {
  using Shape = typename Block::Shape;
  RawShare<Shape> share{static_cast<int>(thread_index())};
#pragma unroll 1
  for (int step = 0; step < share.kSteps; ++step) {
    int64_t from = slot_of(block, tile, share.row(step));
    int64_t head = (from < 0 ? 0 : from) * block.params.num_kv_heads + block.unit.head;
    const auto* source = static_cast<const unsigned char*>(cache) + head * Block::kHeadDim;
    ptx::cp_async_16(slot + share.place(step), source + share.vector(step) * 16, from >= 0);
  }
}

// What widened elements of a cache are short of: its scales make it good.
template <typename Cache>
constexpr float kWidened = 1.0f;
template <>
constexpr float kWidened<KvE4M3> = 0x1p-8f;

// Four elements as four of T, all exact.
template <typename T, typename Cache>
__device__ __forceinline__ uint2 widen(uint32_t word) {
  if constexpr (std::is_same_v<Cache, KvInt8>) {
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = static_cast<float>(static_cast<int8_t>(word >> 8 * i));
    return {ptx::pack2<T>(x[0], x[1]), ptx::pack2<T>(x[2], x[3])};
  } else {
    // Seven bits to the left they are a float16 of 2^-8 times the value, subnormal ones too.
    uint32_t pairs[2] = {(word & 0xffu) | (word & 0xff00u) << 8,
                         (word >> 16 & 0xffu) | (word >> 8 & 0xff0000u)};
    uint32_t out[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t halves = (pairs[i] & 0x00800080u) << 8 | (pairs[i] & 0x007f007fu) << 7;
      float2 x = ptx::unpack2<float16>(halves);
      out[i] = ptx::pack2<T>(x.x, x.y);
    }
    return {out[0], out[1]};
  }
}

// The thread's part of a tile that has landed, from a raw slot to a widened one.
template <typename Block>
__device__ __forceinline__ void widen_tile(const unsigned char* raw, unsigned char* wide) {
  using Shape = typename Block::Shape;
  RawShare<Shape> share{static_cast<int>(thread_index())};
#pragma unroll 1
  for (int step = 0; step < share.kSteps; ++step) {
    uint4 words = *reinterpret_cast<const uint4*>(raw + share.place(step));
    uint2 x[4] = {widen<typename Block::Element, typename Block::Cache>(words.x),
                  widen<typename Block::Element, typename Block::Cache>(words.y),
                  widen<typename Block::Element, typename Block::Cache>(words.z),
                  widen<typename Block::Element, typename Block::Cache>(words.w)};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int place = place_of<Shape::kVectors>(share.row(step), 2 * share.vector(step) + half);
      *reinterpret_cast<uint4*>(wide + place) =
          uint4{x[2 * half].x, x[2 * half].y, x[2 * half + 1].x, x[2 * half + 1].y};
    }
  }
}

// The scale that the thread has of a tile: the first kTile threads those of K, the next those of V.
template <typename Block>
__device__ __forceinline__ float load_scale(const Block& block, int tile) {
  int row = static_cast<int>(thread_index()) % Block::kTile;
  int which = static_cast<int>(thread_index()) / Block::kTile;
  int64_t slot = which > 1 ? -1 : slot_of(block, tile, row);
  if (slot < 0) return 0.0f;
  const float* scales = which == 0 ? block.params.k_scales : block.params.v_scales;
  float scale = scales[slot * block.params.num_kv_heads + block.unit.head];
  return __fmul_rn(scale, 1.0f / kWidened<typename Block::Cache>);
}

template <typename Block>
__device__ __forceinline__ void keep_scale(const Block& block, int tile, float scale) {
  int row = static_cast<int>(thread_index()) % Block::kTile;
  int which = static_cast<int>(thread_index()) / Block::kTile;
  if (which == 0) block.k_scales()[row] = scale;
  if (which == 1) block.v_scales(tile)[row] = scale;
}

}  // namespace specops
