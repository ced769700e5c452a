// SPDX-License-Identifier: Apache-2.0
// One unit of work of append_attention on CUDA from end to end: the loop over its tiles of KV, and
// the detour for rows that may not go through it together.
#pragma once

#include "attention/append_attention/cuda/block.cuh"
#include "attention/append_attention/cuda/plan.cuh"
#include "attention/append_attention/cuda/results.cuh"
#include "attention/append_attention/cuda/state.cuh"
#include "attention/append_attention/cuda/tile.cuh"
#include "attention/append_attention/cuda/wide.cuh"
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

  float s[Block::kScoreRowTiles][Block::kScoreTiles][4];
  // 8-bit caches: of the tile that is scored or weighed, and of the one after it.
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
  // Copies run ahead: what is begun in step `tile` is V of tile + kStages - 1 and K of the one
  // after it; with three slots K and V of the tile after it, apart, since K is needed first. Of
  // latents it is the tile for which a slot has become free. The steps before first - 1 only begin
  // copies, that step scores the first tile. What the loop asks of the unit it reads anew in each
  // step: registers are short.
#pragma unroll 1
  for (int tile = begin - Shape::kAhead;; ++tile) {
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
    int ahead = tile + Shape::kAhead;
#pragma unroll 1
    for (int which = 0; which < (Shape::kIsLatent ? 1 : 2); ++which) {
      int wanted = Shape::kThreeSlots ? tile + 1 : ahead - which;
      if (Shape::kThreeSlots && which == 1) ptx::cp_async_commit();
      if (wanted < first || wanted > last) continue;
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
    } else if constexpr (!Shape::kWaitsLate) {
      ptx::cp_async_wait<Shape::kAhead - 1>();
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
      if constexpr (!Shape::kIsWide) {
        accumulate(block, tile, leaf);
      } else if (tile < block.last_tile()) {
        accumulate_wide<true>(block, tile, leaf, s);
      } else {
        accumulate_wide<false>(block, tile, leaf, s);
      }
      last = block.last_tile();
      if ((tile + 1) * Block::kTile % Block::kLeaf == 0 || tile == last) {
        bool leafwise = unit.leaf_stride != 0;
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
      if constexpr (Shape::kWaitsLate) {  // accumulate() needed no more
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

// ---- the walk over the units ----

// A block's walk over the units of append_attention on CUDA: which are its own, what a unit
// consists of, and who arrives last.

// Which request, or group, of the first `count` of the plan has the unit.
template <typename Block>
__device__ __forceinline__ int find_owner(const Block& block, int index, int count) {
  int low = 0, high = count - 1;  // the first that ends after the unit
  while (low < high) {
    int middle = (low + high) / 2;
    if (block.plan.unit_end[middle] > index) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Unit `index` of the plan of the requests from first_request on. `part`: -1, or which part of the
// chunk; units from tail_begin on are cut into parts, where they can be. By one thread.
template <typename Block>
__device__ __forceinline__ void find_unit(
    const Block& block, int64_t first_request, int index, int tail_begin, int part) {
  using Shape = typename Block::Shape;
  Unit& unit = block.unit;
  const AppendAttentionParams& params = block.params;
  int most = static_cast<int>(min(params.batch - first_request, int64_t{kPlanned}));
  int low = find_owner(block, index, most);
  int first_unit = low == 0 ? 0 : block.plan.unit_end[low - 1];
  Request request = load_request(params, first_request + low);
  bool whole = block.plan.counter[low] < 0;
  int shared = whole || !request.valid ? 0 : shared_leaves(block.launch, first_request + low);
  Demand demand = demand_of<Shape::kRows>(block.launch, request, shared);
  int sequences = demand.sequences;
  int place = index - first_unit;
  int chunk = demand.first_chunk + place / sequences;
  int sequence = place % sequences;
  int head = sequence / demand.tiles, tile = sequence % demand.tiles;
  unit.valid = true;
  if (whole) {
    tile = demand.tiles - 1 - tile;  // the longest first
    if (part > 0) unit.valid = false;
    part = -1;
  }
  unit.request = request;
  unit.head = head;
  unit.first_row = tile * Shape::kRows;
  int64_t packed = int64_t{request.qo_len} * block.group();
  unit.rows = static_cast<int>(min(packed - unit.first_row, int64_t{Shape::kRows}));
  unit.state_row = 0;
  unit.state_rows = (unit.rows + 1) / 2 * 2;
  unit.tile_rows = unit.rows;
  unit.state = nullptr;
  unit.leaf_stride = 0;
  unit.parts = 1;
  unit.arrivals = 1;
  unit.meets_once = false;
  unit.batch_idx = first_request + low;
  unit.shared = shared;
  if (!request.valid) {
    if (part > 0) unit.valid = false;
    return;
  }
  int first_query = unit.first_row / block.group();
  int last_query = (unit.first_row + unit.rows - 1) / block.group();
  int position = request.kv_len - request.qo_len;
  unit.low = window_begin(params, position + first_query);
  unit.high = seen_end(params, position + last_query, request.kv_len);
  unit.seen_begin = window_begin(params, position + last_query);
  unit.seen_end = all_see_end(params, request, unit.batch_idx, position + first_query);
  unit.many_queries = first_query != last_query;
  unit.begin = unit.low;
  unit.end = unit.high;
  if (!whole) {
    int part_leaves = part < 0 ? kChunkLeaves : block.turns.part_leaves;
    int begin = chunk * kChunkTokens + max(part, 0) * part_leaves * kLeafTokens;
    unit.begin = max(max(unit.low, begin), shared * kLeafTokens);
    unit.end = min(unit.high, begin + part_leaves * kLeafTokens);
    if (unit.begin >= unit.end) unit.valid = false;
    // Chunks of this sequence from first_cut on lie in the tail.
    int before = max(tail_begin - first_unit - sequence, 0);
    int first_cut = (before + sequences - 1) / sequences;
    unit.first_cut = demand.first_chunk + first_cut;
    unit.first_tail = first_unit + first_cut * sequences + sequence - tail_begin;
    int first_leaf = max(max(unit.low / kLeafTokens, shared), chunk * kChunkLeaves);
    unit.parts = parts_of_chunk(block, chunk, part_leaves);
    int first_chunk = max(unit.low / kChunkTokens, shared / kChunkLeaves);
    unit.arrivals = (unit.high - 1) / kChunkTokens + 1 - first_chunk;
    // A second arrival takes longer than the fold of a second chunk by the same block.
    unit.meets_once = part >= 0 && shared == 0 && unit.arrivals == 2 &&
                      first_chunk >= demand.first_chunk + first_cut;
    if (unit.meets_once) {
      unit.arrivals = parts_of_chunk(block, first_chunk, part_leaves) +
                      parts_of_chunk(block, first_chunk + 1, part_leaves);
    }
    unit.first_chunk = demand.first_chunk;
    unit.sequences = sequences;
    unit.sequence = sequence;
    unit.counter = block.plan.counter[low] + sequence;
    unit.chunk_quad = block.plan.state[low];
    unit.state_quads = demand.state_quads;
    int leaf = unit.begin / kLeafTokens;
    if (is_boundary(block, chunk)) {
      unit.state = leaf_state(block, leaf);
      unit.leaf_stride = slot_state(block, 1) - slot_state(block, 0);
    } else if (unit.parts > 1) {
      // The part with the first leaf folds its own.
      unit.state = leaf_state(block, leaf);
      if (leaf / part_leaves != first_leaf / part_leaves) {
        unit.leaf_stride = block.launch.leaf_floats;
      }
    } else if (unit.arrivals > 1 || shared > 0) {
      unit.state = chunk_state(block, chunk);
    }
  }
  unit.load_begin = unit.begin;
  unit.load_end = unit.end;
}

// Unit `index` of the list of groups: rows of all members of a group and a piece of what they share.
// All of it lies before the first of their rows.
template <typename Block>
__device__ __forceinline__ void find_shared_unit(const Block& block, int index) {
  using Shape = typename Block::Shape;
  Unit& unit = block.unit;
  int owner = find_owner(block, index, kPlanned);
  const Group& group = block.launch.group_list->groups[owner];
  int place = index - (owner == 0 ? 0 : block.plan.unit_end[owner - 1]);
  int tiles = group_tiles(block, group), heads = static_cast<int>(block.params.num_kv_heads);
  int piece = place / (tiles * heads), tile = place % tiles;
  int begin = group.begin + piece, end = begin + 1;
  if (group.leafwise == 0) {
    int chunk = group.begin / kChunkLeaves + piece;
    begin = max(group.begin, chunk * kChunkLeaves);
    end = min(group.end, (chunk + 1) * kChunkLeaves);
  }
  unit.valid = true;
  unit.request = load_request(block.params, group.member);
  unit.request.qo_begin = group.first_row;
  unit.head = place / tiles % heads;
  unit.first_row = tile * Shape::kRows;
  int64_t packed = int64_t{group.rows} * block.group();
  unit.rows = static_cast<int>(min(packed - unit.first_row, int64_t{Shape::kRows}));
  unit.state_row = 0;
  unit.state_rows = group_state_rows(block, group);
  unit.tile_rows = unit.rows;
  unit.low = unit.begin = unit.load_begin = begin * kLeafTokens;
  unit.high = unit.end = unit.load_end = end * kLeafTokens;
  unit.seen_begin = 0;
  unit.seen_end = INT32_MAX;
  unit.many_queries = false;
  unit.arrivals = 0;
  unit.leaf_stride = 0;
  if (group.holds_chunk(begin / kChunkLeaves)) {
    unit.state =
        group_state(block, group, group.slot_of_chunk(begin / kChunkLeaves), unit.head, tile);
  } else {
    unit.state = group_state(block, group, group.slot_of_leaf(begin), unit.head, tile);
    unit.leaf_stride = group_stride(block, group);
  }
}

template <typename Block>
__device__ __forceinline__ void next_unit(const Block& block) {
  Turns& turns = block.turns;
  turns.now += static_cast<int>(gridDim.x);
  if (turns.now >= turns.end) return;
  if (block.launch.is_shared_launch) return find_shared_unit(block, turns.now);
  int in_tail = turns.now - turns.tail_begin, parts = kChunkLeaves / turns.part_leaves;
  if (in_tail < 0) {
    find_unit(block, turns.first_request, turns.now, turns.tail_begin, -1);
  } else {
    find_unit(block,
              turns.first_request,
              turns.tail_begin + in_tail / parts,
              turns.tail_begin,
              in_tail % parts);
  }
}

// Runs the unit that was found.
template <typename Block>
__device__ __forceinline__ void run_unit(const Block& block) {
  Unit& unit = block.unit;
  if (!unit.valid) return;
  if (!unit.request.valid) return write_zeros(block);
  run_rows(block);
  stamp(block, AttentionPhase::kStream);
  if (unit.state == nullptr || unit.arrivals == 0) return;
  call_arrive<Block>(&block.launch);
  stamp(block, AttentionPhase::kMerge);
}

template <typename Block>
__device__ __forceinline__ void run_turns(const Block& block) {
  for (;;) {
    __syncthreads();  // the unit before is done with shared memory
    // A wide state leaves no register for what this asks, and its answer.
    unsigned thread = Block::Shape::kIsWide ? thread_index() : threadIdx.x;
    if (thread == 0) next_unit(block);
    __syncthreads();
    stamp(block, AttentionPhase::kUnit);
    if (block.turns.now >= block.turns.end) break;
    run_unit(block);
  }
}

// What the requests from `first_request` on leave to do, at most kPlanned of them, as turns.
template <typename Block>
__device__ __forceinline__ void plan_turns(const Block& block, int64_t first_request) {
  using Shape = typename Block::Shape;
  Turns& turns = block.turns;
  // Used so far, and the units of the requests before, modulo the grid.
  bool begins = first_request == 0;
  int counters = begins ? 0 : turns.counters, quads = begins ? 0 : turns.quads;
  int base = begins ? 0 : turns.base;
  int units = make_plan<Shape::kRows, Shape::kThreads>(
      block.launch, block.plan, first_request, counters, quads, &turns.row_end);
  int blocks = static_cast<int>(gridDim.x);
  // Units go to the blocks in turn. What is left for a wave of few blocks may be cut.
  int tail = (base + units) % blocks, parts = 1;
  if (first_request + kPlanned >= block.params.batch &&
      tail <= min(block.launch.tail_units, units)) {
    parts = parts_of_tail(tail, blocks, block.launch.leaf_cost, block.launch.least_share);
  }
  bool cuts = parts > 1;
  if (threadIdx.x == 0) {
    turns.first_request = first_request;
    turns.tail_begin = cuts ? units - tail : units;
    turns.end = cuts ? units - tail + tail * parts : units;
    turns.part_leaves = kChunkLeaves / parts;
    turns.now = (static_cast<int>(blockIdx.x) - base + blocks) % blocks - blocks;
    turns.counters = counters;
    turns.quads = quads;
    turns.base = tail;
  }
}

// What groups of requests share, as turns.
template <typename Block>
__device__ __forceinline__ void plan_shared_turns(const Block& block) {
  const GroupList& list = *block.launch.group_list;
  if (Block::Shape::kThreads == kPlanned || threadIdx.x < kPlanned) {
    block.plan.unit_end[threadIdx.x] = list.unit_end[threadIdx.x];
  }
  if (threadIdx.x == 0) {
    block.turns.now = static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x);
    block.turns.end = list.units;
  }
}

template <typename Block>
__device__ __forceinline__ void run_all(const Block& block) {
  begin_stamps(block);
  if (threadIdx.x == 0) block.turns.row_end = 0;
  __syncthreads();
  for (int64_t first = 0; first < block.params.batch;
       first = block.turns.first_request + kPlanned) {
    if (block.launch.is_shared_launch) {
      plan_shared_turns(block);
    } else {
      plan_turns(block, first);
    }
    stamp(block, AttentionPhase::kPlan);
    run_turns(block);
    if (block.launch.is_shared_launch) return;
  }
  zero_padding(block);
  end_stamps(block);
}

}  // namespace specops
