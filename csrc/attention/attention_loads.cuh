// SPDX-License-Identifier: Apache-2.0
// From global to shared memory in append_attention on CUDA: the page table, tiles of K and V, and
// the queries of a unit.
#pragma once

#include "attention/attention_block.cuh"
#include "attention/attention_bytes.cuh"
#include "common/device.cuh"

namespace specops {

// Where each 16 tokens of a chunk lie in the caches, in blocks of 16 tokens; -1: not to be read.
template <typename Block>
__device__ __forceinline__ void load_table(const Block& block, int chunk) {
  using Shape = typename Block::Shape;
  int* table = reinterpret_cast<int*>(block.smem + Shape::kTable) + (chunk & 1) * kChunkBlocks;
#pragma unroll 1
  for (int i = thread_index(); i < kChunkBlocks; i += kAttentionThreads) {
    int token = chunk * kChunkTokens + i * kPageBlock;
    int place = -1;
    if (token < block.unit.load_end && token + kPageBlock > block.unit.load_begin) {
      int page_size = static_cast<int>(block.params.page_size);
      int entry = block.unit.request.kv_begin + token / page_size;
      int page = block.params.kv_indices[entry];
      Fault fault = fault_of_page(block.params, entry, page);
      if (fault.found()) {
        report_error(block.params.error, fault.code);
      } else {
        place = page * (page_size / kPageBlock) + token % page_size / kPageBlock;
      }
    }
    table[i] = place;
  }
}

// A thread's part of the copy of a tile: from row `row` every kCopyRows-th row, and of these from
// vector `vector` on every kCopyLanes-th vector. Both steps keep the turn of a row in shared memory,
// so that all of a thread's places follow from the first by constants.
template <typename Shape>
struct CopyShare {
  static constexpr int kPasses = Shape::kTile / Shape::kCopyRows;
  static constexpr int kSteps = Shape::kVectors / Shape::kCopyLanes;
  int row, vector;

  __device__ __forceinline__ explicit CopyShare(unsigned thread)
      : row(thread / Shape::kCopyLanes), vector(thread % Shape::kCopyLanes) {}

  // In bytes, from the begin of the tile.
  __device__ __forceinline__ int place() const { return place_of<Shape::kVectors>(row, vector); }
  __device__ __forceinline__ static constexpr int more(int pass, int step) {
    return (pass * Shape::kCopyRows * Shape::kVectors + step * Shape::kCopyLanes) * 16;
  }
};

// The page blocks of a tile, from the table.
template <int kBlocks>
struct TileBlocks {
  int place[kBlocks];

  __device__ __forceinline__ explicit TileBlocks(const int* table) {
    static_assert(kBlocks == 2 || kBlocks == 4);
    if constexpr (kBlocks == 4) {
      int4 found = *reinterpret_cast<const int4*>(table);
      place[0] = found.x;
      place[1] = found.y;
      place[2] = found.z;
      place[3] = found.w;
    } else {
      int2 found = *reinterpret_cast<const int2*>(table);
      place[0] = found.x;
      place[1] = found.y;
    }
  }
  __device__ __forceinline__ bool all_there() const {
    int every = place[0];
#pragma unroll
    for (int i = 1; i < kBlocks; ++i) every |= place[i];
    return every >= 0;
  }
};

// Starts the copy of one tile of K or V; tokens out of range become zeros.
template <typename Block>
__device__ __forceinline__ void load_tile(const Block& block,
                                          const void* cache,
                                          unsigned char* slot,
                                          int tile) {
  using Shape = typename Block::Shape;
  using Share = CopyShare<Shape>;
  constexpr int kRowsAtOnce = Shape::kCopyRows;
  constexpr int kBlocks = Shape::kTile / kPageBlock;
  Share share(thread_index_in_loop<Block>());
  if (Shape::kFilled < Shape::kVectors && share.vector >= Shape::kFilled) return;
  unsigned token_bytes = static_cast<unsigned>(block.params.num_kv_heads) * Shape::kCacheBytes;
  unsigned block_bytes = kPageBlock * token_bytes;
  unsigned first_byte = block.unit.head * Shape::kCacheBytes + share.vector * 16 +
                        share.row % kPageBlock * token_bytes;
  const unsigned char* source = static_cast<const unsigned char*>(cache) + first_byte;
  unsigned char* target = slot + share.place();
  const int* table = reinterpret_cast<const int*>(block.smem + Shape::kTable) +
                     static_cast<unsigned>(tile) * kBlocks % (2 * kChunkBlocks);
  int begin = block.unit.load_begin - tile * Block::kTile;
  int end = block.unit.load_end - tile * Block::kTile;
  TileBlocks<kBlocks> blocks(table);
  if (begin <= 0 && end >= Block::kTile && blocks.all_there()) {
    // The rows at once are half a page block, one, or two.
    const unsigned char* second = source + kPageBlock / 2 * token_bytes;
#pragma unroll
    for (int pass = 0; pass < Share::kPasses; ++pass) {
      int first = pass * kRowsAtOnce / kPageBlock;
      int place = blocks.place[first];
      if (kRowsAtOnce > kPageBlock && share.row >= kPageBlock) place = blocks.place[first + 1];
      bool is_second = pass * kRowsAtOnce % kPageBlock != 0;
      const unsigned char* from = ptx::advance(is_second ? second : source, place, block_bytes);
#pragma unroll
      for (int step = 0; step < Share::kSteps; ++step) {
        ptx::cp_async_16(target + Share::more(pass, step), from + step * Shape::kCopyLanes * 16);
      }
    }
    return;
  }
#pragma unroll 1
  for (int pass = 0; pass < Share::kPasses; ++pass) {
    int row = pass * kRowsAtOnce + share.row;
    int place = table[row / kPageBlock];
    bool valid = place >= 0 && row >= begin && row < end;
    const unsigned char* from = source;
    if (valid) {
      from =
          ptx::advance(source + pass * kRowsAtOnce % kPageBlock * token_bytes, place, block_bytes);
    }
#pragma unroll
    for (int step = 0; step < Share::kSteps; ++step) {
      ptx::cp_async_16(target + Share::more(0, step) + pass * Share::more(1, 0),
                       from + step * Shape::kCopyLanes * 16,
                       valid);
    }
  }
}

template <typename Block>
__device__ __forceinline__ void load_queries(const Block& block) {
  using Shape = typename Block::Shape;
  using T = typename Block::Element;
  Unit& unit = block.unit;
  unsigned thread = thread_index();
  int2* seen = reinterpret_cast<int2*>(block.smem + Shape::kSeen);
  static_assert(16 * Block::kRowTiles <= kAttentionThreads);
  if (thread < 16 * Block::kRowTiles) {
    int row = thread;
    int packed = unit.first_row + min(row, unit.rows - 1);
    int position = unit.request.kv_len - unit.request.qo_len + packed / block.group();
    seen[row] = make_int2(window_begin(block.params, position),
                          seen_end(block.params, position, unit.request.kv_len));
  }
  // 8-bit caches: two vectors at once, whose columns change places.
  constexpr int kAtOnce = Shape::kScaled ? 2 : 1, kShares = Shape::kQueryVectors / kAtOnce;
#pragma unroll 1
  for (unsigned index = thread; index < 16 * Block::kRowTiles * kShares;
       index += kAttentionThreads) {
    int row = index / kShares, vector = index % kShares * kAtOnce;
    bool valid = row < unit.rows;
    int packed = unit.first_row + (valid ? row : 0);
    int64_t query = int64_t{unit.request.qo_begin} + packed / block.group();
    int head = unit.head * block.group() + packed % block.group();
    const T* source = static_cast<const T*>(block.params.q) + query * block.params.q_stride +
                      head * Block::kHeadDim + vector * (16 / sizeof(T));
    unsigned char* queries = block.smem + Shape::kQueries;
    if constexpr (Shape::kScaled) {
      const uint4* from = reinterpret_cast<const uint4*>(source);
      uint4 first{}, second{};
      if (valid) {
        first = from[0];
        second = from[1];
      }
      store_query<Shape>(queries, row, vector, first, second);
    } else {
      ptx::cp_async_16(queries + place_of<Shape::kQueryVectors>(row, vector), source, valid);
    }
  }
}

}  // namespace specops
