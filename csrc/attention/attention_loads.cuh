// SPDX-License-Identifier: Apache-2.0
// From global to shared memory in append_attention on CUDA: the page table, tiles of K and V, and
// the queries of a unit.
#pragma once

#include "attention/attention_block.cuh"
#include "common/device.cuh"

namespace specops {

// Where each 16 tokens of a chunk lie in the caches, in blocks of 16 tokens; -1: not to be read.
template <typename Block>
__device__ __forceinline__ void load_table(const Block& block, int chunk) {
  using Shape = typename Block::Shape;
  int* table = reinterpret_cast<int*>(block.smem + Shape::kTable) + (chunk & 1) * kChunkBlocks;
  for (int i = threadIdx.x; i < kChunkBlocks; i += kAttentionThreads) {
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

// Starts the copy of one tile of K or V; tokens out of range become zeros.
template <typename Block>
__device__ __forceinline__ void load_tile(const Block& block,
                                          const void* cache,
                                          unsigned char* slot,
                                          int tile) {
  using Shape = typename Block::Shape;
  using T = typename Block::Element;
  int begin = block.unit.load_begin, end = block.unit.load_end;
  unsigned thread = thread_index();
  const int* table = reinterpret_cast<const int*>(block.smem + Shape::kTable);
  int heads = static_cast<int>(block.params.num_kv_heads);
  const T* base = static_cast<const T*>(cache) + block.unit.head * Block::kHeadDim;
#pragma unroll 4
  for (int pass = 0; pass < Block::kTile * Shape::kVectors / kAttentionThreads; ++pass) {
    unsigned index = pass * kAttentionThreads + thread;
    int row = index / Shape::kVectors, vector = index % Shape::kVectors;
    int token = tile * Block::kTile + row;
    int place = table[token / kPageBlock % (2 * kChunkBlocks)];
    bool valid = place >= 0 && token >= begin && token < end;
    int64_t offset = int64_t{place} * (kPageBlock * heads * Block::kHeadDim) +
                     row % kPageBlock * (heads * Block::kHeadDim) + vector * (16 / sizeof(T));
    ptx::cp_async_16(
        slot + place_of<Shape::kVectors>(row, vector), base + (valid ? offset : 0), valid);
  }
}

template <int kRowTiles, typename Block>
__device__ __forceinline__ void load_queries(const Block& block) {
  using Shape = typename Block::Shape;
  using T = typename Block::Element;
  Unit& unit = block.unit;
  int2* seen = reinterpret_cast<int2*>(block.smem + Shape::kSeen);
  for (int row = threadIdx.x; row < 16 * kRowTiles; row += kAttentionThreads) {
    int packed = unit.first_row + min(row, unit.rows - 1);
    int position = unit.request.kv_len - unit.request.qo_len + packed / block.group();
    seen[row] = make_int2(window_begin(block.params, position), position + 1);
  }
#pragma unroll 1
  for (unsigned index = threadIdx.x; index < 16 * kRowTiles * Shape::kVectors;
       index += kAttentionThreads) {
    int row = index / Shape::kVectors, vector = index % Shape::kVectors;
    bool valid = row < unit.rows;
    int packed = unit.first_row + (valid ? row : 0);
    int64_t query = int64_t{unit.request.qo_begin} + packed / block.group();
    int head = unit.head * block.group() + packed % block.group();
    const T* source = static_cast<const T*>(block.params.q) + query * block.params.q_stride +
                      head * Block::kHeadDim + vector * (16 / sizeof(T));
    ptx::cp_async_16(
        block.smem + Shape::kQueries + place_of<Shape::kVectors>(row, vector), source, valid);
  }
}

}  // namespace specops
