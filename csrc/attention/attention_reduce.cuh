// SPDX-License-Identifier: Apache-2.0
// One unit of work of append_attention on CUDA from end to end: the loop over its tiles of KV, and
// the detour for rows that may not go through it together.
#pragma once

#include "attention/attention_block.cuh"
#include "attention/attention_bytes.cuh"
#include "attention/attention_fold.cuh"
#include "attention/attention_leaf.cuh"
#include "attention/attention_loads.cuh"
#include "attention/attention_results.cuh"
#include "attention/attention_stamps.cuh"
#include "attention/attention_tile.cuh"
#include "common/device.cuh"

namespace specops {

// Reduces the unit's tokens for the rows of its tile and writes its states or the result. Returns
// false, with nothing written, where V holds an infinity or a NaN that some row must not see: a
// weight of zero would not keep it out.
template <typename Block>
__device__ __forceinline__ bool attend(const Block& block) {
  using Shape = typename Block::Shape;
  Unit& unit = block.unit;
  load_queries(block);
  load_table(block, unit.begin / kChunkTokens);
  if (unit.end > (unit.begin / kChunkTokens + 1) * kChunkTokens) {
    load_table(block, unit.begin / kChunkTokens + 1);
  }
  __syncthreads();
  int begin = block.first_tile();

  float s[Block::kRowTiles][Block::kScoreTiles][4];
  // 8-bit caches: of the tile that is scored or weighed, and of the one after it.
  float scale = 0.0f;
  [[maybe_unused]] float next_scale = 0.0f;
  Outputs<Block> leaf;
  Outputs<Block> chunk;
  leaf.clear();
  chunk.clear();
  if (thread_index() < 16 * Block::kRowTiles) {
    block.chunk_sums(block.leaf_of(begin))[thread_index()] = make_float2(-INFINITY, 0.0f);
    block.running(begin - 1)[thread_index()] = -INFINITY;
  }
#pragma unroll
  for (int i = 0; i < 2 * Block::kRowTiles; ++i)
    block.lane_sums()[i * kAttentionThreads + thread_index()] = 0.0f;
  // Copies run ahead: what is begun in step `tile` is V of tile + kStages - 1 and K of the one
  // after it; with three slots K and V of the tile after it, apart, since K is needed first. The
  // steps before first - 1 only begin copies, that step scores the first tile. What the loop asks
  // of the unit it reads anew in each step: registers are short.
#pragma unroll 1
  for (int tile = begin - Block::kStages;; ++tile) {
    int first = block.first_tile(), last = block.last_tile();
    if (tile > last) break;
    if (tile >= first - 1) __syncthreads();  // maxima are out; the tile before is done with
    if (tile >= first) {
      weigh(block, tile, scale, s, leaf);
    }
    if constexpr (Shape::kScaled) {
      scale = next_scale;
      if (tile >= first - 2) next_scale = load_scale(block, tile + 2);
    }
    int ahead = tile + Block::kStages - 1;
#pragma unroll 1
    for (int which = 0; which < 2; ++which) {
      int wanted = Shape::kThreeSlots ? tile + 1 : ahead + 1 - which;
      if (Shape::kThreeSlots && which == 1) ptx::cp_async_commit();
      if (wanted < first || wanted > last || (Shape::kIsLatent && which == 1)) continue;
      const void* cache = which == 0 ? block.params.k_cache : block.params.v_cache;
      load_tile(block, cache, which == 0 ? block.k_slot(wanted) : block.v_slot(wanted), wanted);
    }
    ptx::cp_async_commit();
    if (tile < first - 1) continue;
    if (tile % Shape::kTilesPerChunk == 0 && tile > first &&
        unit.end > (tile / Shape::kTilesPerChunk + 1) * kChunkTokens) {
      load_table(block, tile / Shape::kTilesPerChunk + 1);
    }
    if constexpr (Shape::kThreeSlots) {
      ptx::cp_async_wait<2>();
    } else if constexpr (!Shape::kIsLatent) {
      ptx::cp_async_wait<Block::kStages - 1>();
    }
    // Elements of 8-bit caches are finite, and their scales reach no row that does not see them.
    if (!Shape::kScaled && tile >= first && unit.many_queries && block.partly_seen(tile)) {
      if (__syncthreads_or(has_nonfinite(block, tile))) {
        ptx::cp_async_wait<0>();
        return false;
      }
    } else {
      __syncthreads();  // weights, this tile's V and the next one's K are there
    }
    if (Block::kStamped && tile == first - 1) stamp(block, AttentionPhase::kLoad);
    if (tile >= first) {
      accumulate(block, tile, leaf);
      last = block.last_tile();
      if ((tile + 1) * Block::kTile % Block::kLeaf == 0 || tile == last) {
        fold_leaf(block, tile, leaf, chunk);
        bool leafwise = unit.leaf_stride != 0;
        if (leafwise || (tile + 1) % Shape::kTilesPerChunk == 0 || tile == last) {
          __syncthreads();  // the chunk's sums are there
          bool has_total = tile / Shape::kTilesPerChunk > unit.begin / kChunkTokens;
          if (!leafwise && (has_total || tile < last)) {
            fold_chunk(block, block.leaf_of(tile) + 1, has_total, tile == last, chunk);
            __syncthreads();
          }
          if (leafwise || tile == last) write_rows(block, tile, chunk);
          if (leafwise && tile < last) {
            __syncthreads();
            if (thread_index() < 16 * Block::kRowTiles) {
              block.chunk_sums(block.leaf_of(tile) + 1)[thread_index()] =
                  make_float2(-INFINITY, 0.0f);
            }
          }
          chunk.clear();
        }
        leaf.clear();
      }
    }
    if (tile < block.last_tile()) {
      if constexpr (Shape::kIsLatent || Shape::kThreeSlots) {  // accumulate() needed no more
        ptx::cp_async_wait<Shape::kThreeSlots ? 1 : 0>();
        __syncthreads();
      }
      score(block, tile + 1, scale, s);
    }
  }
  return true;
}

// Makes the unit one of the query of row `row` of its tile.
template <typename Block>
__device__ __forceinline__ void narrow(const Block& block, int row) {
  Unit& unit = block.unit;
  unit.first_row += row - unit.state_row;
  unit.state_row = row;
  int query = unit.first_row / block.group();
  unit.rows = min((query + 1) * block.group() - unit.first_row, unit.tile_rows - row);
  int position = unit.request.kv_len - unit.request.qo_len + query;
  unit.load_begin = max(unit.begin, window_begin(block.params, position));
  unit.load_end = min(unit.end, seen_end(block.params, position, unit.request.kv_len));
  unit.seen_end = all_see_end(block.params, unit.request, unit.batch_idx, position);
  unit.seen_begin = window_begin(block.params, position);
  unit.many_queries = false;
}

// Runs the tile at once, or, where that would not be exact, one query row after the other.
template <typename Block>
__device__ __forceinline__ void run_rows(const Block& block) {
  Unit& unit = block.unit;
  for (;;) {
    bool done = attend(block);
    if (done && unit.tile_rows == unit.state_row + unit.rows) return;
    __syncthreads();
    if (thread_index() == 0) narrow(block, done ? unit.state_row + unit.rows : 0);
    __syncthreads();
  }
}

}  // namespace specops
