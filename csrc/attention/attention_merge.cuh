// SPDX-License-Identifier: Apache-2.0
// The fold of states that several blocks of append_attention on CUDA have left in the workspace: of
// the leaves of a chunk, and of the chunks of a sequence, by the last block to arrive.
#pragma once

#include "attention/attention_block.cuh"
#include "attention/attention_fold.cuh"
#include "attention/attention_results.cuh"
#include "attention/attention_split.cuh"
#include "common/device.cuh"

namespace specops {

// The running fold of a tile of rows. How two states combine depends on their (m, l) alone, so a
// step finds the factors of all its states once a row, one thread a row, and all threads then apply
// them to the outputs.
template <typename Block>
struct Merge {
  using Shape = typename Block::Shape;
  static constexpr int kQuads = Block::kValueDim / 4;
  static constexpr int kItems = Shape::kRows * kQuads / kAttentionThreads;  // quads of a thread
  static constexpr int kItemsAtOnce = kItems % 2 == 0 ? 2 : 1;
  static_assert(Shape::kRows * kQuads % kAttentionThreads == 0);

  // In the ring, which is idle.
  struct Shared {
    const float* outs[kChunkLeaves][Shape::kRows];
    float2 sums[kChunkLeaves][Shape::kRows];
    float2 scales[kChunkLeaves + 1][Shape::kRows];  // (a_scale, b_scale); last: of their sum
    float2 result[Shape::kRows];
  };
  static_assert(sizeof(Shared) <= Shape::kSharedBytes - Shape::kRing);

  Shared& shared;
  int rows;
  float m, l;  // of row threadIdx.x
  float4 outs[kItems];

  __device__ __forceinline__ explicit Merge(const Block& block)
      : shared(*reinterpret_cast<Shared*>(block.smem + Shape::kRing)),
        rows(block.unit.rows),
        m(-INFINITY),
        l(0.0f) {
#pragma unroll
    for (float4& out : outs) out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }

  // Appends `count` states, at most kChunkLeaves; locate(j, row) says where row `row` of the j-th
  // is. As one: they are folded from an empty state first, and their sum is appended.
  template <typename Locate>
  __device__ __forceinline__ void append(int count, bool as_one, const Locate& locate) {
    __syncthreads();  // the step before has been applied
#pragma unroll 1
    for (int i = threadIdx.x; i < kChunkLeaves * rows; i += kAttentionThreads) {
      int row = i / kChunkLeaves, j = i % kChunkLeaves;
      StateRow state;
      if (j < count) state = locate(j, row);
      shared.outs[j][row] = state.outs;
      shared.sums[j][row] = state.outs == nullptr ? make_float2(-INFINITY, 0.0f) : *state.sums;
    }
    __syncthreads();
#pragma unroll
    for (int first = 0; first < kItems; first += kItemsAtOnce) {
      if (first * kAttentionThreads >= rows * kQuads) break;
      float4 x[kItemsAtOnce][kChunkLeaves];
#pragma unroll
      for (int i = 0; i < kItemsAtOnce; ++i) load(first + i, x[i]);
      if (first == 0) {
        if (static_cast<int>(threadIdx.x) < rows) find_scales(as_one);
        __syncthreads();
      }
#pragma unroll
      for (int i = 0; i < kItemsAtOnce; ++i) apply(first + i, as_one, x[i]);
    }
  }

  // For write(row, quad, part) to write the fold.
  template <typename Write>
  __device__ __forceinline__ void finish(const Write& write) {
    if (static_cast<int>(threadIdx.x) < rows) shared.result[threadIdx.x] = make_float2(m, l);
    __syncthreads();
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      int index = item * kAttentionThreads + threadIdx.x;
      if (index >= rows * kQuads) break;
      StatePart part;
      part.m = shared.result[index / kQuads].x;
      part.l = shared.result[index / kQuads].y;
      part.o = outs[item];
      write(index / kQuads, index % kQuads, part);
    }
  }

 private:
  __device__ __forceinline__ void load(int item, float4 (&x)[kChunkLeaves]) const {
    int index = item * kAttentionThreads + threadIdx.x;
    bool mine = index < rows * kQuads;
#pragma unroll
    for (int j = 0; j < kChunkLeaves; ++j) {
      const float* from = mine ? shared.outs[j][index / kQuads] : nullptr;
      x[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (from != nullptr) x[j] = reinterpret_cast<const float4*>(from)[index % kQuads];
    }
  }

  __device__ __forceinline__ void find_scales(bool as_one) {
    int row = threadIdx.x;
    float top = as_one ? -INFINITY : m, sum = as_one ? 0.0f : l;
#pragma unroll
    for (int j = 0; j < kChunkLeaves; ++j) {
      float2 sums = shared.sums[j][row];
      Fold fold = fold_sums(top, sum, sums.x, sums.y);
      top = fold.m;
      sum = fold.l;
      shared.scales[j][row] = make_float2(fold.a_scale, fold.b_scale);
    }
    if (as_one) {
      Fold fold = fold_sums(m, l, top, sum);
      shared.scales[kChunkLeaves][row] = make_float2(fold.a_scale, fold.b_scale);
      top = fold.m;
      sum = fold.l;
    }
    m = top;
    l = sum;
  }

  __device__ __forceinline__ void apply(int item, bool as_one, const float4 (&x)[kChunkLeaves]) {
    int index = item * kAttentionThreads + threadIdx.x;
    if (index >= rows * kQuads) return;
    int row = index / kQuads;
    float4 sum = as_one ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : outs[item];
#pragma unroll
    for (int j = 0; j < kChunkLeaves; ++j) sum = scaled_sum(sum, x[j], shared.scales[j][row]);
    outs[item] = as_one ? scaled_sum(outs[item], sum, shared.scales[kChunkLeaves][row]) : sum;
  }

  __device__ __forceinline__ static float4 scaled_sum(float4 a, float4 b, float2 scales) {
    Fold fold;
    fold.a_scale = scales.x;
    fold.b_scale = scales.y;
    return make_float4(fold_value(fold, a.x, b.x),
                       fold_value(fold, a.y, b.y),
                       fold_value(fold, a.z, b.z),
                       fold_value(fold, a.w, b.w));
  }
};

// A state to be appended next, and what comes with it.
struct MergeStep {
  int count;    // states: of chunks from `chunk` on, or of the leaves of that one
  bool leaves;  // which of the two
  bool as_one;
};

// What finish() appends next, from `chunk` to `last`.
template <typename Block>
__device__ __forceinline__ MergeStep
next_step(const Block& block, bool of_chunk, int chunk, int last) {
  if (of_chunk) return {kChunkLeaves, true, false};
  if (block.unit.meets_once) {
    bool is_cut = parts_of_chunk(block, chunk, block.turns.part_leaves) > 1;
    return {is_cut ? kChunkLeaves : 1, is_cut, is_cut};
  }
  if (block.unit.shared == 0) return {min(last + 1 - chunk, kChunkLeaves), false, false};
  // Each lane looks at one of the next chunks.
  int lane = threadIdx.x % kWarpSize;
  bool held = lane < kChunkLeaves && chunk + lane <= last && has_state(block, chunk + lane);
  int count = __ffs(~__ballot_sync(kFullMask, held)) - 1;
  if (count > 0) return {count, false, false};
  return {kChunkLeaves, true, true};
}

// Folds what lies in the workspace: the leaves of the unit's chunk, or the chunks of its sequence,
// those first that groups have reduced. The result is the chunk's state, or the sequence's rows.
template <typename Block>
__device__ __forceinline__ void finish(const Block& block, bool of_chunk) {
  Unit& unit = block.unit;
  int own = unit.begin / kChunkTokens;
  int chunk = of_chunk ? own : unit.shared > 0 ? 0 : unit.low / kChunkTokens;
  int last = of_chunk ? own : (unit.high - 1) / kChunkTokens;
  Merge<Block> merge(block);
  while (chunk <= last) {
    MergeStep step = next_step(block, of_chunk, chunk, last);
    merge.append(step.count, step.as_one, [&](int j, int row) -> StateRow {
      int leaf = step.leaves ? chunk * kChunkLeaves + j : (chunk + j) * kChunkLeaves;
      int end = step.leaves ? leaf + 1 : leaf + kChunkLeaves;
      if (end <= unit.shared) return shared_row(block, leaf, row);
      if (step.leaves && !has_leaf_state(block, leaf)) return {};
      const float* state = step.leaves ? leaf_state(block, leaf) : chunk_state(block, chunk + j);
      return row_of_state<Block>(state, unit.state_rows, row);
    });
    chunk += step.leaves ? 1 : step.count;
  }
  bool is_all = !of_chunk || is_only_chunk(block);
  merge.finish([&](int row, int quad, const StatePart& part) {
    if (is_all) return write_part(block, row, quad, part);
    float* state = chunk_state(block, own);
    reinterpret_cast<float4*>(state)[row * Merge<Block>::kQuads + quad] = part.o;
    if (quad == 0) {
      float2* sums = reinterpret_cast<float2*>(state + unit.state_rows * Block::kValueDim);
      sums[row] = make_float2(part.m, part.l);
    }
  });
}

// Whether all of `arrivals` blocks have written what the caller's has; by every thread.
template <typename Block>
__device__ __forceinline__ bool is_last_to_arrive(const Block& block,
                                                  int32_t* counter,
                                                  int arrivals) {
  __syncthreads();
  if (threadIdx.x == 0) {
    *block.plan.scan =
        count_arrival(counter, arrivals, block.params.error, ErrorCode::kAttentionWorkspace);
  }
  __syncthreads();
  return *block.plan.scan != 0;
}

// The unit's state is written. The last block to arrive at a chunk that was cut folds its leaves,
// and the last to arrive at a sequence its chunks; or all of it, where parts meet once.
template <typename Block>
__device__ __forceinline__ void arrive(const Block& block) {
  Unit& unit = block.unit;
  __syncthreads();
  if (threadIdx.x == 0) {
    unit.first_row -= unit.state_row;  // the whole tile again
    unit.rows = unit.tile_rows;
  }
  __syncthreads();
#pragma unroll 1
  for (int of_chunk = 1; of_chunk >= 0; --of_chunk) {
    int chunk = unit.begin / kChunkTokens;
    int32_t* counter = block.launch.counters + unit.counter;
    int arrivals = unit.arrivals;
    if (of_chunk) {
      if (unit.meets_once || (unit.parts == 1 && !is_boundary(block, chunk))) continue;
      int tail = unit.first_tail + (chunk - unit.first_cut) * unit.sequences;
      counter = block.launch.counters + block.launch.num_counters + tail;
      arrivals = unit.parts;
    }
    if (arrivals > 1 && !is_last_to_arrive(block, counter, arrivals)) return;
    finish(block, of_chunk);
    if (of_chunk && is_only_chunk(block)) return;
  }
}

// As a call: inlined, what a fold needs would take registers of the loop over the tiles.
template <typename Block>
__device__ __noinline__ void call_arrive(const AttentionLaunch* launch) {
  arrive(Block(*launch));
}

}  // namespace specops
