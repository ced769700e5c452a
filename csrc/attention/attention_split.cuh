// SPDX-License-Identifier: Apache-2.0
// Sequences that several blocks of append_attention on CUDA reduce: where their states lie in the
// workspace, those of shared prefixes too.
#pragma once

#include "attention/attention_block.cuh"
#include "common/device.cuh"

namespace specops {

// One row of a state: its outputs, and its (m, l). Without outputs there is no such state.
struct StateRow {
  const float* outs = nullptr;
  const float2* sums = nullptr;
};

template <typename Block>
__device__ __forceinline__ StateRow row_of_state(const float* state, int rows, int row) {
  return {state + row * Block::kValueDim,
          reinterpret_cast<const float2*>(state + rows * Block::kValueDim) + row};
}

// ---- the sequence's own states: of a chunk, and of a leaf of a chunk that was cut ----

template <typename Block>
__device__ __forceinline__ float* slot_state(const Block& block, int slot) {
  Unit& unit = block.unit;
  int64_t index = int64_t{slot} * unit.sequences + unit.sequence;
  return block.launch.chunk_states + 4 * (unit.chunk_quad + index * unit.state_quads);
}

// A chunk that begins with shared leaves has a slot for each of its own; its state takes the last.
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

// Into how many parts that are not empty a chunk of the sequence is cut.
template <typename Block>
__device__ __forceinline__ int parts_of_chunk(const Block& block, int chunk, int part_leaves) {
  Unit& unit = block.unit;
  int first = max(max(unit.low / kLeafTokens, unit.shared), chunk * kChunkLeaves);
  int last = min((unit.high - 1) / kLeafTokens, chunk * kChunkLeaves + kChunkLeaves - 1);
  return last / part_leaves - first / part_leaves + 1;
}

// Whether a leaf of the unit's chunk has a state: the part of the chunk with its first leaf has one
// for all of its leaves, there.
template <typename Block>
__device__ __forceinline__ bool has_leaf_state(const Block& block, int leaf) {
  Unit& unit = block.unit;
  if (leaf > (unit.high - 1) / kLeafTokens) return false;
  if (is_boundary(block, leaf / kChunkLeaves)) return leaf >= unit.shared;
  int first = max(unit.low / kLeafTokens, leaf / kChunkLeaves * kChunkLeaves);
  int part_leaves = block.turns.part_leaves;
  return leaf == first || (leaf > first && leaf / part_leaves != first / part_leaves);
}

// Whether the unit's chunk is all there is of its sequence.
template <typename Block>
__device__ __forceinline__ bool is_only_chunk(const Block& block) {
  return block.unit.arrivals == 1 && block.unit.shared == 0;
}

// ---- those of groups ----

template <typename Block>
__device__ __forceinline__ int group_tiles(const Block& block, const Group& group) {
  int64_t packed = int64_t{group.rows} * block.group();
  return static_cast<int>((packed + block.launch.group_rows - 1) / block.launch.group_rows);
}

template <typename Block>
__device__ __forceinline__ int group_state_rows(const Block& block, const Group& group) {
  int64_t packed = int64_t{group.rows} * block.group();
  int most = block.launch.group_rows;
  return packed < most ? static_cast<int>(packed + 1) / 2 * 2 : most;
}

// Floats between slots of a group.
template <typename Block>
__device__ __forceinline__ int64_t group_stride(const Block& block, const Group& group) {
  return int64_t{group_tiles(block, group)} * block.params.num_kv_heads *
         group_state_rows(block, group) * (Block::kValueDim + 2);
}

template <typename Block>
__device__ __forceinline__ float* group_state(
    const Block& block, const Group& group, int slot, int head, int tile) {
  return block.launch.shared_states + int64_t{4} * group.state + slot * group_stride(block, group) +
         (int64_t{head} * group_tiles(block, group) + tile) * group_state_rows(block, group) *
             (Block::kValueDim + 2);
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

// Whether one state holds the chunk of the unit's request: of the request, or of a group.
template <typename Block>
__device__ __forceinline__ bool has_state(const Block& block, int chunk) {
  if ((chunk + 1) * kChunkLeaves > block.unit.shared) return true;
  return group_of(block, chunk * kChunkLeaves).holds_chunk(chunk);
}

// A row of the unit in the state that a group has for the leaf, or for its chunk.
template <typename Block>
__device__ __forceinline__ StateRow shared_row(const Block& block, int leaf, int row) {
  const Group& group = group_of(block, leaf);
  int most = block.launch.group_rows;
  int chunk = leaf / kChunkLeaves;
  int slot = group.holds_chunk(chunk) ? group.slot_of_chunk(chunk) : group.slot_of_leaf(leaf);
  int packed = block.unit.first_row + row;
  packed += (block.unit.request.qo_begin - group.first_row) * block.group();
  const float* state = group_state(block, group, slot, block.unit.head, packed / most);
  return row_of_state<Block>(state, group_state_rows(block, group), packed % most);
}

}  // namespace specops
