// SPDX-License-Identifier: Apache-2.0
// Processing of one work item of append_attention on CUDA: the loop over its KV tiles, and the
// fallback that runs the queries of a tile one at a time.
#pragma once

#include "attention/append_attention/cuda/block.cuh"
#include "attention/append_attention/cuda/plan.cuh"
#include "attention/append_attention/cuda/results.cuh"
#include "attention/append_attention/cuda/state.cuh"
#include "attention/append_attention/cuda/tile.cuh"
#include "attention/append_attention/cuda/wide.cuh"
#include "common/device.cuh"

namespace specops {

// Reduces the item's tokens for the rows of its tile, and writes the states or the result. Returns
// false without writing anything if V has an infinity or a NaN in a token that some row of the tile
// must not see: a weight of zero would not remove it, because 0 * inf is NaN.
template <typename Block>
__device__ __forceinline__ bool attend(const Block& block) {
  using Shape = typename Block::Shape;
  WorkItem& item = block.item;
  load_queries(block);
  load_table(block, item.begin / kChunkTokens);
  if (item.end > (item.begin / kChunkTokens + 1) * kChunkTokens) {
    load_table(block, item.begin / kChunkTokens + 1);
  }
  __syncthreads();
  int begin = block.first_tile();

  float s[Block::kScoreRowTiles][Block::kScoreTiles][4];
  // For 8-bit caches: scales of the tile that is being scored or weighted, and of the next tile.
  float scale = 0.0f;
  [[maybe_unused]] float next_scale = 0.0f;
  Outputs<Block> leaf;
  [[maybe_unused]] Outputs<Block> chunk_in_registers;
  Outputs<Block>& chunk = choose<Shape::kIsWide>(leaf, chunk_in_registers);
  leaf.clear();
  chunk.clear();
  if (thread_index() < 16 * Block::kRowTiles) {
    block.chunk_sums(block.leaf_of(begin))[thread_index()] = make_float2(-INFINITY, 0.0f);
    block.running(begin - 1)[thread_index()] = -INFINITY;
  }
#pragma unroll
  for (int i = 0; i < 2 * Block::kScoreRowTiles * Shape::kSumsOfWarp; ++i)
    block.lane_sums()[i * Shape::kThreads + thread_index()] = 0.0f;
  // Copies run ahead of the arithmetic. Step `tile` starts copying V of tile + kStages - 1 and K of
  // the tile after that. With three slots, it starts K and V of the next tile, separately because K
  // is needed first. With one slot, it starts V of its tile and, once V is used, K of the next tile.
  // For latents, it starts the tile for which a slot has become free. Steps before first - 1 only
  // start copies, and step first - 1 scores the first tile. Every step rereads the item from shared
  // memory, because registers are scarce.
#pragma unroll 1
  for (int tile = begin - Shape::kAhead;; ++tile) {
    int first = block.first_tile(), last = block.last_tile();
    if (tile > last) break;
    if (tile >= first - 1) __syncthreads();  // maxima are written; the previous tile is done
    if (tile >= first) {
      weigh(block, tile, scale, s, leaf);
    }
    if constexpr (Shape::kScaled) {
      scale = next_scale;
      if (tile >= first - 2) next_scale = load_scale(block, tile + 2);
    }
    int ahead = tile + Shape::kAhead;
#pragma unroll 1
    for (int which = Shape::kOneSlot ? 1 : 0; which < (Shape::kIsLatent ? 1 : 2); ++which) {
      int wanted = Shape::kThreeSlots ? tile + 1 : ahead - which;
      if (Shape::kThreeSlots && which == 1) ptx::cp_async_commit();
      if (wanted < first || wanted > last) continue;
      const void* cache = which == 0 ? block.params.k_cache : block.params.v_cache;
      load_tile(block, cache, which == 0 ? block.k_slot(wanted) : block.v_slot(wanted), wanted);
    }
    ptx::cp_async_commit();
    if (tile < first - 1) continue;
    if (tile % Shape::kTilesPerChunk == 0 && tile > first &&
        item.end > (tile / Shape::kTilesPerChunk + 1) * kChunkTokens) {
      load_table(block, tile / Shape::kTilesPerChunk + 1);
    }
    if constexpr (Shape::kThreeSlots) {
      ptx::cp_async_wait<2>();
    } else if constexpr (!Shape::kWaitsLate) {
      ptx::cp_async_wait<Shape::kAhead - 1>();
    }
    // 8-bit caches need no such check: their elements are finite, and scales are never applied for
    // rows that do not see the token.
    if (!Shape::kScaled && tile >= first && item.many_queries && block.partly_seen(tile)) {
      if (__syncthreads_or(has_nonfinite(block, tile))) {
        ptx::cp_async_wait<0>();
        return false;
      }
    } else {
      __syncthreads();  // weights, this tile's V and the next tile's K have arrived
    }
    if (Block::kStamped && tile == first - 1) stamp(block, AttentionPhase::kLoad);
    if (tile >= first) {
      if constexpr (!Shape::kIsWide) {
        accumulate(block, tile, leaf);
      } else if (tile < block.last_tile()) {
        accumulate_wide<true>(block, tile, leaf, s);
      } else {
        accumulate_wide<false>(block, tile, leaf, s);
      }
      last = block.last_tile();
      if ((tile + 1) * Block::kTile % Block::kLeaf == 0 || tile == last) {
        bool leafwise = item.leaf_stride != 0;
        bool ends = leafwise || (tile + 1) % Shape::kTilesPerChunk == 0 || tile == last;
        if constexpr (Shape::kIsWide) {
          int number = block.leaf_of(tile);
          bool begins =
              leafwise || number % kChunkLeaves == 0 || number == block.leaf_of(block.first_tile());
          fold_leaf_in_memory(block, tile, begins, ends, leaf);
        } else {
          fold_leaf(block, tile, leaf, chunk);
        }
        if (ends) {
          __syncthreads();  // all threads see the sums of the chunk
          bool has_total = tile / Shape::kTilesPerChunk > item.begin / kChunkTokens;
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
      if constexpr (Shape::kOneSlot) {
        __syncthreads();  // all warps are done with V, whose slot K takes
        load_tile(block, block.params.k_cache, block.k_slot(tile + 1), tile + 1);
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        __syncthreads();
      } else if constexpr (Shape::kWaitsLate) {  // accumulate() did not need the copy
        ptx::cp_async_wait<Shape::kThreeSlots ? 1 : 0>();
        __syncthreads();
      }
      unsigned thread = thread_index();
      if constexpr (!Shape::kIsWide) {
        multiply_keys(block, tile + 1, thread, s);
      } else if (tile < block.first_tile()) {
        multiply_wide_keys(block, tile + 1, s);
      }
      finish_scores(block, tile + 1, thread, scale, s);
    }
  }
  return true;
}

// Narrows the item to the one query that contains row `row` of the tile.
template <typename Block>
__device__ __forceinline__ void narrow(const Block& block, int row) {
  WorkItem& item = block.item;
  item.first_row += row - item.state_row;
  item.state_row = row;
  int query = item.first_row / block.group();
  item.rows = min((query + 1) * block.group() - item.first_row, item.tile_rows - row);
  int position = item.request.kv_len - item.request.qo_len + query;
  item.load_begin = max(item.begin, window_begin(block.params, position));
  item.load_end = min(item.end, seen_end(block.params, position, item.request.kv_len));
  item.seen_end = all_see_end(block.params, item.request, item.batch_idx, position);
  item.seen_begin = window_begin(block.params, position);
  item.many_queries = false;
}

// Runs all rows of the tile together or, if that would not be exact, one query at a time.
template <typename Block>
__device__ __forceinline__ void run_rows(const Block& block) {
  WorkItem& item = block.item;
  for (;;) {
    bool done = attend(block);
    if (done && item.tile_rows == item.state_row + item.rows) return;
    __syncthreads();
    if (thread_index() == 0) narrow(block, done ? item.state_row + item.rows : 0);
    __syncthreads();
  }
}

// ---- loop over work items ----

// The functions below are a block's loop over the work items of append_attention on CUDA: they
// select and set up the items of the block, and find the last block to arrive.

// Returns which of the plan's first `count` requests or groups contains item `index`.
template <typename Block>
__device__ __forceinline__ int find_owner(const Block& block, int index, int count) {
  int low = 0, high = count - 1;  // binary search for the first that ends after the item
  while (low < high) {
    int middle = (low + high) / 2;
    if (block.plan.item_end[middle] > index) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Sets up work item `index` of the plan of the requests from first_request on. `split`: index of
// the split in the chunk; -1 for an item that is not split. Items from tail_begin on are split if
// possible. Called by one thread.
template <typename Block>
__device__ __forceinline__ void find_item(
    const Block& block, int64_t first_request, int index, int tail_begin, int split) {
  using Shape = typename Block::Shape;
  WorkItem& item = block.item;
  const AppendAttentionParams& params = block.params;
  int most = static_cast<int>(min(params.batch - first_request, int64_t{kPlanned}));
  int low = find_owner(block, index, most);
  int first_item = low == 0 ? 0 : block.plan.item_end[low - 1];
  Request request = load_request(params, first_request + low);
  bool whole = block.plan.counter[low] < 0;
  int shared = whole || !request.valid ? 0 : shared_leaves(block.launch, first_request + low);
  RequestWork work = work_of<Shape::kRows>(block.launch, request, shared);
  int sequences = work.sequences;
  int place = index - first_item;
  int chunk = work.first_chunk + place / sequences;
  int sequence = place % sequences;
  int head = sequence / work.tiles, tile = sequence % work.tiles;
  item.valid = true;
  if (whole) {
    tile = work.tiles - 1 - tile;  // longest tiles first
    if (split > 0) item.valid = false;
    split = -1;
  }
  item.request = request;
  item.head = head;
  item.first_row = tile * Shape::kRows;
  int64_t packed = int64_t{request.qo_len} * block.group();
  item.rows = static_cast<int>(min(packed - item.first_row, int64_t{Shape::kRows}));
  item.state_row = 0;
  item.state_rows = (item.rows + 1) / 2 * 2;
  item.tile_rows = item.rows;
  item.state = nullptr;
  item.leaf_stride = 0;
  item.splits = 1;
  item.arrivals = 1;
  item.meets_once = false;
  item.batch_idx = first_request + low;
  item.shared = shared;
  if (!request.valid) {
    if (split > 0) item.valid = false;
    return;
  }
  int first_query = item.first_row / block.group();
  int last_query = (item.first_row + item.rows - 1) / block.group();
  int position = request.kv_len - request.qo_len;
  item.low = window_begin(params, position + first_query);
  item.high = seen_end(params, position + last_query, request.kv_len);
  item.seen_begin = window_begin(params, position + last_query);
  item.seen_end = all_see_end(params, request, item.batch_idx, position + first_query);
  item.many_queries = first_query != last_query;
  item.begin = item.low;
  item.end = item.high;
  if (!whole) {
    int split_leaves = split < 0 ? kChunkLeaves : block.cursor.split_leaves;
    int begin = chunk * kChunkTokens + max(split, 0) * split_leaves * kLeafTokens;
    item.begin = max(max(item.low, begin), shared * kLeafTokens);
    item.end = min(item.high, begin + split_leaves * kLeafTokens);
    if (item.begin >= item.end) item.valid = false;
    // The chunks of this sequence from first_cut on belong to the tail, which may be split.
    int before = max(tail_begin - first_item - sequence, 0);
    int first_cut = (before + sequences - 1) / sequences;
    item.first_cut = work.first_chunk + first_cut;
    item.first_tail = first_item + first_cut * sequences + sequence - tail_begin;
    int first_leaf = max(max(item.low / kLeafTokens, shared), chunk * kChunkLeaves);
    item.splits = splits_of_chunk(block, chunk, split_leaves);
    int first_chunk = max(item.low / kChunkTokens, shared / kChunkLeaves);
    item.arrivals = (item.high - 1) / kChunkTokens + 1 - first_chunk;
    // With only two chunks, a second arrival would take longer than letting one block fold both
    // chunks.
    item.meets_once = split >= 0 && shared == 0 && item.arrivals == 2 &&
                      first_chunk >= work.first_chunk + first_cut;
    if (item.meets_once) {
      item.arrivals = splits_of_chunk(block, first_chunk, split_leaves) +
                      splits_of_chunk(block, first_chunk + 1, split_leaves);
    }
    item.first_chunk = work.first_chunk;
    item.sequences = sequences;
    item.sequence = sequence;
    item.counter = block.plan.counter[low] + sequence;
    item.chunk_float4 = block.plan.state[low];
    item.state_float4s = work.state_float4s;
    int leaf = item.begin / kLeafTokens;
    if (is_boundary(block, chunk)) {
      item.state = leaf_state(block, leaf);
      item.leaf_stride = slot_state(block, 1) - slot_state(block, 0);
    } else if (item.splits > 1) {
      // The split that contains the first leaf of the chunk folds its leaves into one state.
      item.state = leaf_state(block, leaf);
      if (leaf / split_leaves != first_leaf / split_leaves) {
        item.leaf_stride = block.launch.leaf_floats;
      }
    } else if (item.arrivals > 1 || shared > 0) {
      item.state = chunk_state(block, chunk);
    }
  }
  item.load_begin = item.begin;
  item.load_end = item.end;
}

// Sets up work item `index` of the list of groups: a tile of the rows of all members of a group,
// and a split of their shared leaves. All shared tokens precede the first of these rows.
template <typename Block>
__device__ __forceinline__ void find_shared_item(const Block& block, int index) {
  using Shape = typename Block::Shape;
  WorkItem& item = block.item;
  int owner = find_owner(block, index, kPlanned);
  const Group& group = block.launch.group_list->groups[owner];
  int place = index - (owner == 0 ? 0 : block.plan.item_end[owner - 1]);
  int tiles = group_tiles(block, group), heads = static_cast<int>(block.params.num_kv_heads);
  int split = place / (tiles * heads), tile = place % tiles;
  int begin = group.begin + split, end = begin + 1;
  if (group.leafwise == 0) {
    int chunk = group.begin / kChunkLeaves + split;
    begin = max(group.begin, chunk * kChunkLeaves);
    end = min(group.end, (chunk + 1) * kChunkLeaves);
  }
  item.valid = true;
  item.request = load_request(block.params, group.member);
  item.request.qo_begin = group.first_row;
  item.head = place / tiles % heads;
  item.first_row = tile * Shape::kRows;
  int64_t packed = int64_t{group.rows} * block.group();
  item.rows = static_cast<int>(min(packed - item.first_row, int64_t{Shape::kRows}));
  item.state_row = 0;
  item.state_rows = group_state_rows(block, group);
  item.tile_rows = item.rows;
  item.low = item.begin = item.load_begin = begin * kLeafTokens;
  item.high = item.end = item.load_end = end * kLeafTokens;
  item.seen_begin = 0;
  item.seen_end = INT32_MAX;
  item.many_queries = false;
  item.arrivals = 0;
  item.leaf_stride = 0;
  if (group.holds_chunk(begin / kChunkLeaves)) {
    item.state =
        group_state(block, group, group.slot_of_chunk(begin / kChunkLeaves), item.head, tile);
  } else {
    item.state = group_state(block, group, group.slot_of_leaf(begin), item.head, tile);
    item.leaf_stride = group_stride(block, group);
  }
}

template <typename Block>
__device__ __forceinline__ void next_item(const Block& block) {
  WorkCursor& cursor = block.cursor;
  cursor.now += static_cast<int>(gridDim.x);
  if (cursor.now >= cursor.end) return;
  if (block.launch.is_shared_launch) return find_shared_item(block, cursor.now);
  int in_tail = cursor.now - cursor.tail_begin, splits = kChunkLeaves / cursor.split_leaves;
  if (in_tail < 0) {
    find_item(block, cursor.first_request, cursor.now, cursor.tail_begin, -1);
  } else {
    find_item(block,
              cursor.first_request,
              cursor.tail_begin + in_tail / splits,
              cursor.tail_begin,
              in_tail % splits);
  }
}

// Runs the item that next_item() set up.
template <typename Block>
__device__ __forceinline__ void run_item(const Block& block) {
  WorkItem& item = block.item;
  if (!item.valid) return;
  if (!item.request.valid) return write_zeros(block);
  run_rows(block);
  stamp(block, AttentionPhase::kStream);
  if (item.state == nullptr || item.arrivals == 0) return;
  call_arrive<Block>(&block.launch);
  stamp(block, AttentionPhase::kMerge);
}

template <typename Block>
__device__ __forceinline__ void run_items(const Block& block) {
  for (;;) {
    __syncthreads();  // all threads are done with the shared memory of the previous item
    // Recompute the thread index: a wide state leaves no register to keep it across this call.
    unsigned thread = Block::Shape::kIsWide ? thread_index() : threadIdx.x;
    if (thread == 0) next_item(block);
    __syncthreads();
    stamp(block, AttentionPhase::kItem);
    if (block.cursor.now >= block.cursor.end) break;
    run_item(block);
  }
}

// Plans the work items of up to kPlanned requests from `first_request` on.
template <typename Block>
__device__ __forceinline__ void plan_items(const Block& block, int64_t first_request) {
  using Shape = typename Block::Shape;
  WorkCursor& cursor = block.cursor;
  // Counters and state memory that earlier plans used, and their number of items modulo the grid.
  bool begins = first_request == 0;
  int counters = begins ? 0 : cursor.counters, float4s = begins ? 0 : cursor.float4s;
  int base = begins ? 0 : cursor.base;
  int items = make_plan<Shape::kRows, Shape::kThreads>(
      block.launch, block.plan, first_request, counters, float4s, &cursor.row_end);
  int blocks = static_cast<int>(gridDim.x);
  // Items are assigned to the blocks round-robin. The items of an incomplete last wave may be
  // split.
  int tail = (base + items) % blocks, splits = 1;
  if (first_request + kPlanned >= block.params.batch &&
      tail <= min(block.launch.tail_chunks, items)) {
    splits = splits_of_tail(tail, blocks, block.launch.leaf_cost, block.launch.least_share);
  }
  bool cuts = splits > 1;
  if (threadIdx.x == 0) {
    cursor.first_request = first_request;
    cursor.tail_begin = cuts ? items - tail : items;
    cursor.end = cuts ? items - tail + tail * splits : items;
    cursor.split_leaves = kChunkLeaves / splits;
    cursor.now = (static_cast<int>(blockIdx.x) - base + blocks) % blocks - blocks;
    cursor.counters = counters;
    cursor.float4s = float4s;
    cursor.base = tail;
  }
}

// Sets up the cursor for the work items in the list of groups.
template <typename Block>
__device__ __forceinline__ void plan_shared_items(const Block& block) {
  const GroupList& list = *block.launch.group_list;
  if (Block::Shape::kThreads == kPlanned || threadIdx.x < kPlanned) {
    block.plan.item_end[threadIdx.x] = list.item_end[threadIdx.x];
  }
  if (threadIdx.x == 0) {
    block.cursor.now = static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x);
    block.cursor.end = list.items;
  }
}

template <typename Block>
__device__ __forceinline__ void run_all(const Block& block) {
  begin_stamps(block);
  if (threadIdx.x == 0) block.cursor.row_end = 0;
  __syncthreads();
  for (int64_t first = 0; first < block.params.batch;
       first = block.cursor.first_request + kPlanned) {
    if (block.launch.is_shared_launch) {
      plan_shared_items(block);
    } else {
      plan_items(block, first);
    }
    stamp(block, AttentionPhase::kPlan);
    run_items(block);
    if (block.launch.is_shared_launch) return;
  }
  zero_padding(block);
  end_stamps(block);
}

}  // namespace specops
