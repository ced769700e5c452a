// SPDX-License-Identifier: Apache-2.0
// Output of append_attention on CUDA: rows of out and lse, states for a later fold, and zeros for
// rows that see no token.
#pragma once

#include "attention/append_attention/cuda/block.cuh"
#include "attention/append_attention/cuda/state.cuh"
#include "attention/append_attention/cuda/tile.cuh"
#include "common/device.cuh"

namespace specops {

constexpr float kLn2 = 0.6931471805599453f;

template <typename T>
__device__ __forceinline__ void store_pair(T* out, float x, float y) {
  if constexpr (sizeof(T) == 2) {
    *reinterpret_cast<uint32_t*>(out) = ptx::pack2<T>(x, y);
  } else {
    *reinterpret_cast<float2*>(out) = make_float2(x, y);
  }
}

template <typename T>
__device__ __forceinline__ void store_one(T* out, float x) {
  if constexpr (sizeof(T) == 2) {
    *reinterpret_cast<uint16_t*>(out) = static_cast<uint16_t>(ptx::pack2<T>(x, 0.0f));
  } else {
    *out = x;
  }
}

template <typename Block>
__device__ __forceinline__ void write_lse(const Block& block, int64_t out_row, float m, float l) {
  if (block.params.lse == nullptr) return;
  block.params.lse[out_row] = l == 0.0f ? -INFINITY : __fmul_rn(__fadd_rn(m, log2f(l)), kLn2);
}

// Applies `map` to the thread's part `o` of a row and stores the result in the row at `out`.
template <typename Block, typename Out, typename Map>
__device__ __forceinline__ void store_share(Out* out,
                                            const float (&o)[Block::kOutTiles][4],
                                            int half,
                                            Map map) {
  unsigned thread = thread_index();
  int lane = thread % kWarpSize, warp = thread / kWarpSize;
#pragma unroll
  for (int n = 0; n < Block::kOutTiles; ++n) {
    float x = map(o[n][2 * half]), y = map(o[n][2 * half + 1]);
    if constexpr (Block::Shape::kScaled) {
      store_one(out + column_of_byte<Block>(warp, lane, n, 0), x);
      store_one(out + column_of_byte<Block>(warp, lane, n, 1), y);
    } else {
      store_pair(out + (warp * Block::kOutTiles + n) * 8 + 2 * (lane % 4), x, y);
    }
  }
}

// Returns the factor by which a row's outputs must finally be multiplied. If the head has a sink,
// the function first folds it into m and l, after all tokens; a sink of -inf changes nothing.
template <typename Block>
__device__ __forceinline__ float finish_sums(const Block& block, int row, float& m, float& l) {
  if (block.params.sinks == nullptr) return inverse(l);
  int head = block.item.head * block.group() + (block.item.first_row + row) % block.group();
  Fold fold = fold_sums(m, l, __fdiv_rn(block.params.sinks[head], kLn2), 1.0f);
  m = fold.m;
  l = fold.l;
  return __fmul_rn(fold.a_scale, inverse(l));
}

template <typename Block>
__device__ __forceinline__ void write_rows(const Block& block,
                                           int tile,
                                           const Outputs<Block>& sum) {
  using T = typename Block::Element;
  WorkItem& item = block.item;
  const float2* sums = block.chunk_sums(block.leaf_of(tile) + 1);
  float* state = item.state;
  if (item.leaf_stride != 0) {
    state += (block.leaf_of(tile) - item.begin / Block::kLeaf) * item.leaf_stride;
  }
  unsigned thread = thread_index();
  int lane = thread % kWarpSize, warp = thread / kWarpSize;
#pragma unroll
  for (int i = 0; i < Block::kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int row = 16 * i + lane / 4 + 8 * half;
      if (row >= item.rows) continue;
      float m = sums[row].x, l = sums[row].y;
      bool writes_sums = warp == 0 && lane % 4 == 0;
      if (state != nullptr) {
        int place = item.state_row + row;
        store_share<Block>(
            state + place * Block::kValueDim, sum.o[i], half, [](float x) { return x; });
        if (writes_sums) {
          reinterpret_cast<float2*>(state + item.state_rows * Block::kValueDim)[place] =
              make_float2(m, l);
        }
        continue;
      }
      int64_t out_row = block.out_row_of(row);
      T* out = static_cast<T*>(block.params.out) + out_row * Block::kValueDim;
      float scale = finish_sums(block, row, m, l);
      store_share<Block>(out, sum.o[i], half, [scale](float x) { return finished(x, scale); });
      if (writes_sums) write_lse(block, out_row, m, l);
    }
  }
}

template <typename Block>
__device__ __forceinline__ void write_part(const Block& block,
                                           int row,
                                           int column4,
                                           const StatePart& total) {
  using T = typename Block::Element;
  int64_t out_row = block.out_row_of(row);
  float m = total.m, l = total.l;
  float scale = finish_sums(block, row, m, l);
  T* out = static_cast<T*>(block.params.out) + out_row * Block::kValueDim + 4 * column4;
  store_pair(out, finished(total.o.x, scale), finished(total.o.y, scale));
  store_pair(out + 2, finished(total.o.z, scale), finished(total.o.w, scale));
  if (column4 == 0) write_lse(block, out_row, m, l);
}

// Writes zeros and -inf for the rows of an inconsistent request.
template <typename Block>
__device__ __forceinline__ void write_zeros(const Block& block) {
  using T = typename Block::Element;
#pragma unroll 1
  for (int i = threadIdx.x; i < block.item.rows * (Block::kValueDim / 2);
       i += Block::Shape::kThreads) {
    int64_t out_row = block.out_row_of(i / (Block::kValueDim / 2));
    int column = i % (Block::kValueDim / 2) * 2;
    store_pair(static_cast<T*>(block.params.out) + out_row * Block::kValueDim + column, 0.0f, 0.0f);
    if (column == 0) write_lse(block, out_row, 0.0f, 0.0f);
  }
}

// Writes zeros and -inf for rows that belong to no request.
template <typename Block>
__device__ __forceinline__ void zero_padding(const Block& block) {
  using T = typename Block::Element;
  int64_t used = block.cursor.row_end;
  int64_t first = used * block.params.num_qo_heads * (Block::kValueDim / 2);
  int64_t last = block.params.rows * block.params.num_qo_heads * (Block::kValueDim / 2);
  int64_t step = int64_t{gridDim.x} * Block::Shape::kThreads;
#pragma unroll 1
  for (int64_t i = first + int64_t{blockIdx.x} * Block::Shape::kThreads + threadIdx.x; i < last;
       i += step) {
    store_pair(static_cast<T*>(block.params.out) + 2 * i, 0.0f, 0.0f);
    if (i % (Block::kValueDim / 2) == 0) write_lse(block, i / (Block::kValueDim / 2), 0.0f, 0.0f);
  }
}

// ---- states in the workspace ----

// The functions below locate the states of sequences that several blocks of append_attention on
// CUDA reduce, and the states of shared prefixes, in the workspace.

// One row of a state: its outputs and its (m, l). If outs is null, the state does not exist.
struct StateRow {
  const float* outs = nullptr;
  const float2* sums = nullptr;
};

template <typename Block>
__device__ __forceinline__ StateRow row_of_state(const float* state, int rows, int row) {
  return {state + row * Block::kValueDim,
          reinterpret_cast<const float2*>(state + rows * Block::kValueDim) + row};
}

// ---- states of a single sequence: of its chunks, and of the leaves of split chunks ----

template <typename Block>
__device__ __forceinline__ float* slot_state(const Block& block, int slot) {
  WorkItem& item = block.item;
  int64_t index = int64_t{slot} * item.sequences + item.sequence;
  return block.launch.chunk_states + 4 * (item.chunk_float4 + index * item.state_float4s);
}

// Returns whether a chunk begins with leaves that a group reduced. Each other leaf of such a chunk
// has a slot of its own, and the state of the chunk later overwrites the last of them.
template <typename Block>
__device__ __forceinline__ bool is_boundary(const Block& block, int chunk) {
  return block.item.shared % kChunkLeaves != 0 && chunk == block.item.first_chunk;
}

template <typename Block>
__device__ __forceinline__ float* chunk_state(const Block& block, int chunk) {
  int slot = chunk - block.item.first_chunk;
  if (block.item.shared % kChunkLeaves != 0)
    slot += kChunkLeaves - 1 - block.item.shared % kChunkLeaves;
  return slot_state(block, slot);
}

template <typename Block>
__device__ __forceinline__ float* leaf_state(const Block& block, int leaf) {
  WorkItem& item = block.item;
  if (is_boundary(block, leaf / kChunkLeaves)) return slot_state(block, leaf - item.shared);
  int64_t tail = item.first_tail + int64_t{leaf / kChunkLeaves - item.first_cut} * item.sequences;
  return block.launch.leaf_states +
         (tail * kChunkLeaves + leaf % kChunkLeaves) * block.launch.leaf_floats;
}

// Returns the number of nonempty splits of a chunk of the sequence.
template <typename Block>
__device__ __forceinline__ int splits_of_chunk(const Block& block, int chunk, int split_leaves) {
  WorkItem& item = block.item;
  int first = max(max(item.low / kLeafTokens, item.shared), chunk * kChunkLeaves);
  int last = min((item.high - 1) / kLeafTokens, chunk * kChunkLeaves + kChunkLeaves - 1);
  return last / split_leaves - first / split_leaves + 1;
}

// Returns whether a leaf of the item's chunk has a state in the workspace. The split that contains
// the first leaf of the chunk stores one state for all of its leaves, at the place of the first
// leaf.
template <typename Block>
__device__ __forceinline__ bool has_leaf_state(const Block& block, int leaf) {
  WorkItem& item = block.item;
  if (leaf > (item.high - 1) / kLeafTokens) return false;
  if (is_boundary(block, leaf / kChunkLeaves)) return leaf >= item.shared;
  int first = max(item.low / kLeafTokens, leaf / kChunkLeaves * kChunkLeaves);
  int split_leaves = block.cursor.split_leaves;
  return leaf == first || (leaf > first && leaf / split_leaves != first / split_leaves);
}

// Returns whether the item's chunk is the only one of its sequence.
template <typename Block>
__device__ __forceinline__ bool is_only_chunk(const Block& block) {
  return block.item.arrivals == 1 && block.item.shared == 0;
}

// ---- states of groups ----

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

// Returns the distance in floats between slots of a group.
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
      .groups[level * block.params.batch + leader_of(block.params, level, block.item.batch_idx)];
}

// Returns the group that reduced `leaf` for the item's request.
template <typename Block>
__device__ __forceinline__ const Group& group_of(const Block& block, int leaf) {
  int64_t level = block.params.num_prefix_levels - 1;
  for (; level > 0; --level) {
    const Group& group = group_at(block, level);
    if (leaf >= group.begin) return group;
  }
  return group_at(block, 0);
}

// Returns whether a chunk of the item's request is stored as a single state, by the request or by a
// group.
template <typename Block>
__device__ __forceinline__ bool has_state(const Block& block, int chunk) {
  if ((chunk + 1) * kChunkLeaves > block.item.shared) return true;
  return group_of(block, chunk * kChunkLeaves).holds_chunk(chunk);
}

// Returns the row of the work item in the state that a group stored for a leaf or for the chunk of
// the leaf.
template <typename Block>
__device__ __forceinline__ StateRow shared_row(const Block& block, int leaf, int row) {
  const Group& group = group_of(block, leaf);
  int most = block.launch.group_rows;
  int chunk = leaf / kChunkLeaves;
  int slot = group.holds_chunk(chunk) ? group.slot_of_chunk(chunk) : group.slot_of_leaf(leaf);
  int packed = block.item.first_row + row;
  packed += (block.item.request.qo_begin - group.first_row) * block.group();
  const float* state = group_state(block, group, slot, block.item.head, packed / most);
  return row_of_state<Block>(state, group_state_rows(block, group), packed % most);
}

// ---- folding states ----

// When several blocks of append_attention on CUDA reduce a chunk or a sequence, the last of them to
// finish folds the states in the workspace: the leaves of the chunk, or the chunks of the sequence.

// Running fold of a tile of rows. How two states combine depends only on their (m, l). Each step
// therefore first computes the factors of all of its states, with one thread per row; then all
// threads apply the factors to the outputs. If the outputs exceed the registers, each of two passes
// handles half of the columns.
template <typename Block>
struct Merge {
  using Shape = typename Block::Shape;
  static constexpr int kPasses = Shape::kIsWide ? 2 : 1;
  static constexpr int kFloat4s = Block::kValueDim / 4 / kPasses;
  // Column whose thread writes the (m, l) of a row. It is in the last pass, because the result may
  // overwrite one of the states.
  static constexpr int kSumsFloat4 = (kPasses - 1) * kFloat4s;
  static constexpr int kOwn = Shape::kRows * kFloat4s / Shape::kThreads;  // float4s per thread
  static constexpr int kOwnAtOnce = kOwn % 2 == 0 ? 2 : 1;
  static_assert(Shape::kRows * kFloat4s % Shape::kThreads == 0);

  // Stored in the memory of the ring of tiles, which is idle during the fold.
  struct Shared {
    const float* outs[kChunkLeaves][Shape::kRows];
    float2 sums[kChunkLeaves][Shape::kRows];
    float2 scales[kChunkLeaves + 1][Shape::kRows];  // (a_scale, b_scale); the last: for as_one
    float2 result[Shape::kRows];
  };
  static_assert(sizeof(Shared) <= Shape::kSharedBytes - Shape::kRing);

  Shared& shared;
  int rows, first_float4;
  float m, l;  // for row threadIdx.x
  float4 outs[kOwn];

  __device__ __forceinline__ Merge(const Block& block, int pass)
      : shared(*reinterpret_cast<Shared*>(block.smem + Shape::kRing)),
        rows(block.item.rows),
        first_float4(pass * kFloat4s),
        m(-INFINITY),
        l(0.0f) {
#pragma unroll
    for (float4& out : outs) out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }

  // Appends `count` states, at most kChunkLeaves. locate(j, row) returns row `row` of the j-th
  // state. If as_one is true, the states are first folded into an empty state, and the result is
  // appended as one state.
  template <typename Locate>
  __device__ __forceinline__ void append(int count, bool as_one, const Locate& locate) {
    __syncthreads();  // all threads have applied the previous step
#pragma unroll 1
    for (int i = threadIdx.x; i < kChunkLeaves * rows; i += Shape::kThreads) {
      int row = i / kChunkLeaves, j = i % kChunkLeaves;
      StateRow state;
      if (j < count) state = locate(j, row);
      shared.outs[j][row] = state.outs;
      shared.sums[j][row] = state.outs == nullptr ? make_float2(-INFINITY, 0.0f) : *state.sums;
    }
    __syncthreads();
#pragma unroll
    for (int first = 0; first < kOwn; first += kOwnAtOnce) {
      if (first * Shape::kThreads >= rows * kFloat4s) break;
      float4 x[kOwnAtOnce][kChunkLeaves];
#pragma unroll
      for (int i = 0; i < kOwnAtOnce; ++i) load(first + i, x[i]);
      if (first == 0) {
        if (static_cast<int>(threadIdx.x) < rows) find_scales(as_one);
        __syncthreads();
      }
#pragma unroll
      for (int i = 0; i < kOwnAtOnce; ++i) apply(first + i, as_one, x[i]);
    }
  }

  // Calls write(row, column4, part) for each part of the folded result.
  template <typename Write>
  __device__ __forceinline__ void finish(const Write& write) {
    if (static_cast<int>(threadIdx.x) < rows) shared.result[threadIdx.x] = make_float2(m, l);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      int index = i * Shape::kThreads + threadIdx.x;
      if (index >= rows * kFloat4s) break;
      StatePart part;
      part.m = shared.result[index / kFloat4s].x;
      part.l = shared.result[index / kFloat4s].y;
      part.o = outs[i];
      write(index / kFloat4s, first_float4 + index % kFloat4s, part);
    }
  }

 private:
  __device__ __forceinline__ void load(int i, float4 (&x)[kChunkLeaves]) const {
    int index = i * Shape::kThreads + threadIdx.x;
    bool mine = index < rows * kFloat4s;
#pragma unroll
    for (int j = 0; j < kChunkLeaves; ++j) {
      const float* from = mine ? shared.outs[j][index / kFloat4s] : nullptr;
      x[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (from != nullptr)
        x[j] = reinterpret_cast<const float4*>(from)[first_float4 + index % kFloat4s];
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

  __device__ __forceinline__ void apply(int i, bool as_one, const float4 (&x)[kChunkLeaves]) {
    int index = i * Shape::kThreads + threadIdx.x;
    if (index >= rows * kFloat4s) return;
    int row = index / kFloat4s;
    float4 sum = as_one ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : outs[i];
#pragma unroll
    for (int j = 0; j < kChunkLeaves; ++j) sum = scaled_sum(sum, x[j], shared.scales[j][row]);
    outs[i] = as_one ? scaled_sum(outs[i], sum, shared.scales[kChunkLeaves][row]) : sum;
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

// One step of finish(): which states to append next.
struct MergeStep {
  int count;    // number of states: chunks from `chunk` on, or leaves of `chunk`
  bool leaves;  // true if the states are leaves
  bool as_one;
};

// Returns the next step of finish(), which folds the chunks from `chunk` to `last`.
template <typename Block>
__device__ __forceinline__ MergeStep
next_step(const Block& block, bool of_chunk, int chunk, int last) {
  if (of_chunk) return {kChunkLeaves, true, false};
  if (block.item.meets_once) {
    bool is_cut = splits_of_chunk(block, chunk, block.cursor.split_leaves) > 1;
    return {is_cut ? kChunkLeaves : 1, is_cut, is_cut};
  }
  if (block.item.shared == 0) return {min(last + 1 - chunk, kChunkLeaves), false, false};
  // Each lane checks one of the next chunks.
  int lane = threadIdx.x % kWarpSize;
  bool held = lane < kChunkLeaves && chunk + lane <= last && has_state(block, chunk + lane);
  int count = __ffs(~__ballot_sync(kFullMask, held)) - 1;
  if (count > 0) return {count, false, false};
  return {kChunkLeaves, true, true};
}

// Folds states from the workspace and writes the result: either the leaves of the item's chunk into
// the state of the chunk, or all chunks of its sequence, including those that groups reduced, into
// the rows of out.
template <typename Block>
__device__ __forceinline__ void finish(const Block& block, bool of_chunk, int pass) {
  WorkItem& item = block.item;
  int own = item.begin / kChunkTokens;
  int chunk = of_chunk ? own : item.shared > 0 ? 0 : item.low / kChunkTokens;
  int last = of_chunk ? own : (item.high - 1) / kChunkTokens;
  Merge<Block> merge(block, pass);
  while (chunk <= last) {
    MergeStep step = next_step(block, of_chunk, chunk, last);
    merge.append(step.count, step.as_one, [&](int j, int row) -> StateRow {
      int leaf = step.leaves ? chunk * kChunkLeaves + j : (chunk + j) * kChunkLeaves;
      int end = step.leaves ? leaf + 1 : leaf + kChunkLeaves;
      if (end <= item.shared) return shared_row(block, leaf, row);
      if (step.leaves && !has_leaf_state(block, leaf)) return {};
      const float* state = step.leaves ? leaf_state(block, leaf) : chunk_state(block, chunk + j);
      return row_of_state<Block>(state, item.state_rows, row);
    });
    chunk += step.leaves ? 1 : step.count;
  }
  bool is_all = !of_chunk || is_only_chunk(block);
  merge.finish([&](int row, int column4, const StatePart& part) {
    if (is_all) return write_part(block, row, column4, part);
    float* state = chunk_state(block, own);
    reinterpret_cast<float4*>(state)[row * (Block::kValueDim / 4) + column4] = part.o;
    if (column4 == Merge<Block>::kSumsFloat4) {
      float2* sums = reinterpret_cast<float2*>(state + item.state_rows * Block::kValueDim);
      sums[row] = make_float2(part.m, part.l);
    }
  });
}

// Counts the arrival of this block and returns whether all `arrivals` blocks have now written their
// states. All threads call it.
template <typename Block>
__device__ __forceinline__ bool is_last_to_arrive(const Block& block,
                                                  int32_t* counter,
                                                  int arrivals) {
  __syncthreads();
  if (threadIdx.x == 0) {
    *block.plan.scan = count_arrival(counter, arrivals, block.params.error, kAttentionWorkspace);
  }
  __syncthreads();
  return *block.plan.scan != 0;
}

// Counts the arrival of this block after it has written the item's state. The last block to arrive
// at a split chunk folds the leaves of the chunk, and the last to arrive at a sequence folds its
// chunks. With meets_once, the last block to arrive at the sequence folds both.
template <typename Block>
__device__ __forceinline__ void arrive(const Block& block) {
  WorkItem& item = block.item;
  __syncthreads();
  if (threadIdx.x == 0) {
    item.first_row -= item.state_row;  // undo the narrowing to one query: select the whole tile
    item.rows = item.tile_rows;
  }
  __syncthreads();
#pragma unroll 1
  for (int of_chunk = 1; of_chunk >= 0; --of_chunk) {
    int chunk = item.begin / kChunkTokens;
    int32_t* counter = block.launch.counters + item.counter;
    int arrivals = item.arrivals;
    if (of_chunk) {
      if (item.meets_once || (item.splits == 1 && !is_boundary(block, chunk))) continue;
      int tail = item.first_tail + (chunk - item.first_cut) * item.sequences;
      counter = block.launch.counters + block.launch.num_counters + tail;
      arrivals = item.splits;
    }
    if (arrivals > 1 && !is_last_to_arrive(block, counter, arrivals)) return;
#pragma unroll 1
    for (int pass = 0; pass < Merge<Block>::kPasses; ++pass) finish(block, of_chunk, pass);
    if (of_chunk && is_only_chunk(block)) return;
  }
}

// Calls arrive() without inlining it: the fold would otherwise take registers from the loop over
// the tiles.
template <typename Block>
__device__ __noinline__ void call_arrive(const AttentionLaunch* launch) {
  arrive(Block(*launch));
}

}  // namespace specops
