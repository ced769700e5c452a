// SPDX-License-Identifier: Apache-2.0
// Sequences that several blocks of append_attention on CUDA reduce: where their states lie in the
// workspace, those of shared prefixes too, and the fold of the last block to arrive.
#pragma once

#include "attention/attention_block.cuh"
#include "attention/attention_fold.cuh"
#include "attention/attention_results.cuh"
#include "common/device.cuh"

namespace specops {

// States of the sequence: of a chunk, and of a leaf of a chunk that was cut.
template <typename Block>
__device__ __forceinline__ float* slot_state(const Block& block, int slot) {
  Unit& unit = block.unit;
  int64_t index = int64_t{slot} * unit.sequences + unit.sequence;
  return block.launch.chunk_states + 4 * (unit.chunk_quad + index * unit.state_quads);
}

// A chunk that begins with shared leaves has a slot for each of its own.
template <typename Block>
__device__ __forceinline__ bool is_boundary(const Block& block, int chunk) {
  return block.unit.shared % kChunkLeaves != 0 && chunk == block.unit.first_chunk;
}

template <typename Block>
__device__ __forceinline__ float* chunk_state(const Block& block, int chunk) {
  int slot = chunk - block.unit.first_chunk;
  if (block.unit.shared % kChunkLeaves != 0)
    slot += kChunkLeaves - 1 - block.unit.shared % kChunkLeaves;
  return slot_state(block, slot);
}

template <typename Block>
__device__ __forceinline__ float* leaf_state(const Block& block, int leaf) {
  Unit& unit = block.unit;
  if (is_boundary(block, leaf / kChunkLeaves)) return slot_state(block, leaf - unit.shared);
  int64_t tail = unit.first_tail + int64_t{leaf / kChunkLeaves - unit.first_cut} * unit.sequences;
  return block.launch.leaf_states +
         (tail * kChunkLeaves + leaf % kChunkLeaves) * block.launch.leaf_floats;
}

template <typename Block>
__device__ __forceinline__ int group_tiles(const Block& block, const Group& group) {
  using Shape = typename Block::Shape;
  return static_cast<int>((int64_t{group.rows} * block.group() + Shape::kRows - 1) / Shape::kRows);
}

template <typename Block>
__device__ __forceinline__ int group_state_rows(const Block& block, const Group& group) {
  using Shape = typename Block::Shape;
  int64_t packed = int64_t{group.rows} * block.group();
  return packed < Shape::kRows ? static_cast<int>(packed + 1) / 2 * 2 : Shape::kRows;
}

// Floats between slots of a group.
template <typename Block>
__device__ __forceinline__ int64_t group_stride(const Block& block, const Group& group) {
  return int64_t{group_tiles(block, group)} * block.params.num_kv_heads *
         group_state_rows(block, group) * (Block::kHeadDim + 2);
}

template <typename Block>
__device__ __forceinline__ float* group_state(
    const Block& block, const Group& group, int slot, int head, int tile) {
  return block.launch.shared_states + int64_t{4} * group.state + slot * group_stride(block, group) +
         (int64_t{head} * group_tiles(block, group) + tile) * group_state_rows(block, group) *
             (Block::kHeadDim + 2);
}

template <typename Block>
__device__ __forceinline__ const Group& group_at(const Block& block, int64_t level) {
  return block.launch
      .groups[level * block.params.batch + leader_of(block.params, level, block.unit.batch_idx)];
}

// The group that has reduced a leaf of the unit's request.
template <typename Block>
__device__ __forceinline__ const Group& group_of(const Block& block, int leaf) {
  int64_t level = block.params.num_prefix_levels - 1;
  for (; level > 0; --level) {
    const Group& group = group_at(block, level);
    if (leaf >= group.begin) return group;
  }
  return group_at(block, 0);
}

template <typename Block>
__device__ __forceinline__ void append_shared(
    const Block& block, StatePart& part, const Group& group, int slot, int row, int quad) {
  using Shape = typename Block::Shape;
  int packed = block.unit.first_row + row;
  packed += (block.unit.request.qo_begin - group.first_row) * block.group();
  part.append_state<Block::kHeadDim>(
      group_state(block, group, slot, block.unit.head, packed / Shape::kRows),
      group_state_rows(block, group),
      packed % Shape::kRows,
      quad);
}

// Folds the states of a sequence in order and writes its rows.
template <typename Block>
__device__ __forceinline__ void finish_sequence(const Block& block) {
  Unit& unit = block.unit;
  constexpr int kQuads = Block::kHeadDim / 4;
  int first_leaf = unit.low / kLeafTokens, last_leaf = (unit.high - 1) / kLeafTokens;
  int first_chunk = unit.low / kChunkTokens, last_chunk = (unit.high - 1) / kChunkTokens;
  for (int i = threadIdx.x; i < unit.rows * kQuads; i += kAttentionThreads) {
    int row = i / kQuads, quad = i % kQuads;
    StatePart total;
    // Eight states at a time, so that their loads overlap.
    float2 sums[kChunkLeaves];
    float4 outs[kChunkLeaves];
    auto load = [&](int slot, const float* state) {
      sums[slot] = reinterpret_cast<const float2*>(state + unit.state_rows * Block::kHeadDim)[row];
      outs[slot] = reinterpret_cast<const float4*>(state)[row * kQuads + quad];
    };
    for (int chunk = first_chunk; chunk <= last_chunk && chunk < unit.first_cut;
         chunk += kChunkLeaves) {
#pragma unroll
      for (int j = 0; j < kChunkLeaves; ++j) {
        sums[j] = make_float2(-INFINITY, 0.0f);
        outs[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (chunk + j <= last_chunk && chunk + j < unit.first_cut) {
          load(j, chunk_state(block, chunk + j));
        }
      }
#pragma unroll
      for (int j = 0; j < kChunkLeaves; ++j) {
        total.append(sums[j], outs[j]);
      }
    }
    for (int chunk = max(first_chunk, unit.first_cut); chunk <= last_chunk; ++chunk) {
#pragma unroll
      for (int j = 0; j < kChunkLeaves; ++j) {
        int leaf = chunk * kChunkLeaves + j;
        sums[j] = make_float2(-INFINITY, 0.0f);
        outs[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (leaf >= first_leaf && leaf <= last_leaf) load(j, leaf_state(block, leaf));
      }
      StatePart sum;
#pragma unroll
      for (int j = 0; j < kChunkLeaves; ++j) sum.append(sums[j], outs[j]);
      total.append(make_float2(sum.m, sum.l), sum.o);
    }
    write_part(block, row, quad, total);
  }
}

// The same where groups have reduced the first leaves.
template <typename Block>
__device__ __forceinline__ void finish_shared_sequence(const Block& block) {
  Unit& unit = block.unit;
  constexpr int kQuads = Block::kHeadDim / 4;
  int last_leaf = (unit.high - 1) / kLeafTokens;
  for (int i = threadIdx.x; i < unit.rows * kQuads; i += kAttentionThreads) {
    int row = i / kQuads, quad = i % kQuads;
    StatePart total;
    for (int chunk = 0; chunk * kChunkLeaves <= last_leaf; ++chunk) {
      int leaf = chunk * kChunkLeaves;
      if (leaf < unit.shared) {
        const Group& group = group_of(block, leaf);
        if (group.holds_chunk(chunk)) {
          append_shared(block, total, group, group.slot_of_chunk(chunk), row, quad);
          continue;
        }
      } else if (chunk < unit.first_cut) {
        total.append_state<Block::kHeadDim>(chunk_state(block, chunk), unit.state_rows, row, quad);
        continue;
      }
      StatePart sum;
      for (; leaf <= last_leaf && leaf / kChunkLeaves == chunk; ++leaf) {
        if (leaf < unit.shared) {
          const Group& group = group_of(block, leaf);
          append_shared(block, sum, group, group.slot_of_leaf(leaf), row, quad);
        } else {
          sum.append_state<Block::kHeadDim>(leaf_state(block, leaf), unit.state_rows, row, quad);
        }
      }
      total.append(make_float2(sum.m, sum.l), sum.o);
    }
    write_part(block, row, quad, total);
  }
}

}  // namespace specops
