// SPDX-License-Identifier: Apache-2.0
// Division of the work of append_attention on CUDA. Every block derives the same plan from the
// lengths on the device. The bits of the result do not depend on the plan.
#pragma once

#include "attention/append_attention/append_attention.h"
#include "common/device.cuh"

namespace specops {

constexpr int kAttentionThreads = 128;
constexpr int kAttentionWarps = kAttentionThreads / kWarpSize;
constexpr int kLeafTokens = 256;
constexpr int kChunkLeaves = 8;
constexpr int kChunkTokens = kChunkLeaves * kLeafTokens;
constexpr int kPageBlock = 16;  // tokens that always lie in one page
constexpr int kChunkBlocks = kChunkTokens / kPageBlock;
constexpr int kPlanned = 128;    // requests, or groups, planned at once: one per thread
constexpr int kSplitTiles = 16;  // requests with more row tiles fill the GPU without splitting
constexpr int kSmallTiles = 64;  // the same limit for tiles of 16 rows
constexpr int kCounters =
    8192;  // arrival counters of split sequences, at the start of the workspace

// A group of requests and the leaves [begin, end) that they share in addition to the leaves of the
// enclosing, wider group. The states of these leaves are ordered by slot, KV head and row tile of
// the group. A chunk that lies entirely inside has one slot; each other leaf has a slot of its own.
struct Group {
  int begin, end;
  int first_row, rows;  // range of rows of q of all members
  int member;           // a member that has rows
  int state;            // offset of the first slot, in float4s
  int leafwise;         // 1 if every leaf has a slot, even in whole chunks
  int entry;            // level * batch + leader

  __device__ __forceinline__ int head_leaves() const {  // leaves before the first whole chunk
    int rest = (kChunkLeaves - begin % kChunkLeaves) % kChunkLeaves;
    return min(rest, end - begin);
  }
  __device__ __forceinline__ int whole_chunks() const {
    return end / kChunkLeaves - (begin + head_leaves()) / kChunkLeaves;
  }
  __device__ __forceinline__ bool holds_chunk(int chunk) const {
    return leafwise == 0 && chunk * kChunkLeaves >= begin && (chunk + 1) * kChunkLeaves <= end;
  }
  __device__ __forceinline__ int slot_of_chunk(int chunk) const {
    return head_leaves() + chunk - (begin + head_leaves()) / kChunkLeaves;
  }
  __device__ __forceinline__ int slot_of_leaf(int leaf) const {
    if (leafwise != 0 || leaf - begin < head_leaves()) return leaf - begin;
    return head_leaves() + whole_chunks() + leaf % kChunkLeaves;
  }
  __device__ __forceinline__ int slots() const {
    if (leafwise != 0 || end - begin == head_leaves()) return end - begin;
    return head_leaves() + whole_chunks() + end % kChunkLeaves;
  }
  // Returns the number of work items per KV head and row tile.
  __device__ __forceinline__ int splits() const {
    return leafwise != 0 ? end - begin : (end - 1) / kChunkLeaves - begin / kChunkLeaves + 1;
  }
};

// Groups that share leaves, and their work items in order: group, split, KV head, row tile.
struct GroupList {
  Group groups[kPlanned];
  int item_end[kPlanned];  // inclusive sums
  int items;
  int unused[3];  // pads the struct to a multiple of 16 bytes
};

// Kernel arguments, including the parts of the workspace.
struct AttentionLaunch {
  AppendAttentionParams params;
  int group;            // query heads per KV head
  int tile_rows;        // rows per tile of a request: the tile height of the kernel
  int group_rows;       // rows per tile of a group, in the shared launch
  int32_t* counters;    // [num_counters + tail_chunks], zero between launches
  float* totals;        // [blocks, kTotalFloats]; nullptr: in shared memory
  float* leaf_states;   // [tail_chunks * kChunkLeaves, leaf_floats]
  float* chunk_states;  // 4 * chunk_capacity floats
  int64_t leaf_floats;  // state of one leaf of the largest tile
  int num_counters;     // counters of sequences; those of split chunks follow
  int tail_chunks;      // most chunks of the last wave that may be split
  int leaf_cost;        // cost of a leaf whose state is stored; otherwise kLeafCost
  int least_share;      // smallest fraction of a full wave's time that any wave takes
  int chunk_capacity;   // in float4s
  // With shared prefixes, a first launch reduces the leaves that groups share, and the next one
  // reduces the rest.
  Group* groups;  // [num_prefix_levels, batch], by leader; nullptr: nothing is shared
  GroupList* group_list;
  float* shared_states;  // 4 * shared_capacity floats
  int shared_capacity;
  bool is_shared_launch;
};

// ---- the plan ----

// Cost of reading a leaf, in the unit of this cost model. Writing and rereading a state of 64 rows
// of head_dim 128 costs a quarter of it, assuming that L2 has twice the bandwidth of memory.
constexpr int kLeafCost = 16;
// Cost of starting a work item: finding it and filling the ring of tiles while other blocks of the
// SM run.
constexpr int kStartCost = 3;

// Time of a full wave; least_share is in the same unit. A wave of few blocks is faster than a full
// one, because blocks share memory bandwidth, but not below least_share: three blocks per SM are
// more than saturate the memory.
constexpr int kWholeWave = 64;
SPECOPS_HOST_DEVICE int least_share_of_wave(int blocks_per_sm) {
  return blocks_per_sm > 2 ? kWholeWave * 2 / 3 : kWholeWave;
}

// Returns into how many splits to divide each of the `tail` chunks of the last wave, if `blocks`
// blocks run at once. The result minimizes the total time of the waves, including the costs of
// storing states and of starting work items.
SPECOPS_HOST_DEVICE int splits_of_tail(int tail, int blocks, int leaf_cost, int least_share) {
  int best = 1, least = INT32_MAX;
  for (int splits = 1; tail > 0 && splits <= kChunkLeaves; splits *= 2) {
    int waves = tail * splits / blocks, rest = tail * splits % blocks;
    int share = rest == 0 ? 0 : rest * kWholeWave / blocks;
    if (rest != 0 && share < least_share) share = least_share;
    int leaves = (kChunkLeaves / splits) * (splits == 1 ? kLeafCost : leaf_cost);
    int cost = (waves * kWholeWave + share) * (leaves + kStartCost);
    if (cost < least) {
      best = splits;
      least = cost;
    }
  }
  return best;
}

// One request's entries of the index arrays. An inconsistent request is marked invalid and has
// zeros.
struct Request {
  int qo_begin, qo_len, kv_begin, kv_len;
  bool valid;
};

__device__ __forceinline__ Request load_request(const AppendAttentionParams& params,
                                                int64_t batch_idx) {
  Request request;
  ErrorCode code = find_fault(params, batch_idx).code;
  request.qo_begin = params.qo_indptr[batch_idx];
  bool has_rows = code != kAttentionQoIndptr;
  request.qo_len = has_rows ? params.qo_indptr[batch_idx + 1] - request.qo_begin : 0;
  request.kv_begin = params.kv_indptr[batch_idx];
  request.kv_len = params.kv_lens[batch_idx];
  request.valid = code == ErrorCode::kNone;
  return request;
}

// Returns the first token that a row at `position` sees.
__device__ __forceinline__ int window_begin(const AppendAttentionParams& params, int position) {
  if (params.sliding_window == 0 || position < params.sliding_window) return 0;
  return position - static_cast<int>(params.sliding_window) + 1;
}

// Returns the end of the tokens that a row at `position` sees, in a request of kv_len tokens.
__device__ __forceinline__ int seen_end(const AppendAttentionParams& params,
                                        int position,
                                        int kv_len) {
  return params.is_causal ? position + 1 : kv_len;
}

// Returns the end of the tokens that all rows of a request from `position` on see.
__device__ __forceinline__ int all_see_end(const AppendAttentionParams& params,
                                           const Request& request,
                                           int64_t batch_idx,
                                           int position) {
  int end = seen_end(params, position, request.kv_len);
  if (params.mask == nullptr) return end;
  return min(end, static_cast<int>(mask_begin(params, batch_idx, request.kv_len - request.qo_len)));
}

// Returns the first request of batch_idx's group on a level.
__device__ __forceinline__ int leader_of(const AppendAttentionParams& params,
                                         int64_t level,
                                         int64_t batch_idx) {
  int leader = params.prefix_leaders[level * params.batch + batch_idx];
  return leader >= 0 && leader <= batch_idx ? leader : static_cast<int>(batch_idx);
}

// Returns how many leaves of the request are reduced as part of groups.
__device__ __forceinline__ int shared_leaves(const AttentionLaunch& launch, int64_t batch_idx) {
  if (launch.groups == nullptr) return 0;
  int64_t level = launch.params.num_prefix_levels - 1;
  int leader = leader_of(launch.params, level, batch_idx);
  return launch.groups[level * launch.params.batch + leader].end;
}

// Properties of one request on which the plan depends.
struct RequestWork {
  int tiles;        // row tiles
  int shared;       // leaves shared with other requests, before its own
  int first_chunk;  // first chunk of the request's own leaves that any row sees
  int chunks;
  int slots;          // states per sequence in the workspace: of chunks, and of each own leaf of a
                      // chunk that begins with shared leaves
  int sequences;      // number of sequences; a sequence is a (tile, KV head)
  int state_float4s;  // size of one tile's state in the workspace
  bool may_split;
};

template <int kRows>
__device__ __forceinline__ RequestWork work_of(const AttentionLaunch& launch,
                                               const Request& request,
                                               int shared) {
  const AppendAttentionParams& params = launch.params;
  int64_t packed = int64_t{request.qo_len} * launch.group;
  RequestWork work;
  work.tiles = static_cast<int>((packed + kRows - 1) / kRows);
  int first = request.valid ? window_begin(params, request.kv_len - request.qo_len) : 0;
  int last = request.valid ? request.kv_len - 1 : 0;
  work.shared = shared;
  work.first_chunk = shared > 0 ? shared / kChunkLeaves : first / kChunkTokens;
  work.chunks = last / kChunkTokens - work.first_chunk + 1;
  int boundary = shared % kChunkLeaves;
  work.slots = boundary > 0      ? kChunkLeaves - boundary + work.chunks - 1
               : shared > 0      ? work.chunks
               : work.chunks > 1 ? work.chunks
                                 : 0;
  work.sequences = work.tiles * static_cast<int>(params.num_kv_heads);
  int most_tiles = kRows == 16 ? kSmallTiles : kSplitTiles;
  work.may_split = work.sequences > 0 && (shared > 0 || work.tiles <= most_tiles);
  int rows = packed < kRows ? static_cast<int>(packed) : kRows;
  work.state_float4s = (rows + 1) / 2 * (static_cast<int>(value_dim_of(params.head_dim)) + 2) / 2;
  return work;
}

// Returns the number of float4s of all states of a request, capped at capacity + 1 so that sums
// over a plan do not overflow.
__device__ __forceinline__ int float4s_of(const RequestWork& work, int capacity) {
  int64_t float4s = int64_t{work.sequences} * work.slots * work.state_float4s;
  return static_cast<int>(min(float4s, int64_t{capacity} + 1));
}

// Returns the exclusive prefix sum of `value` over threads, and in `total` the sum over all
// threads. Contains two barriers.
template <int kWarps = kAttentionWarps>
__device__ __forceinline__ int scan_exclusive(int value, int* warp_sums, int& total) {
  int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  int sum = value;
#pragma unroll
  for (int step = 1; step < kWarpSize; step *= 2) {
    int other = __shfl_up_sync(kFullMask, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();
  if (lane == kWarpSize - 1) warp_sums[warp] = sum;
  __syncthreads();
  int before = 0;
  total = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) before += warp_sums[i];
    total += warp_sums[i];
  }
  return before + sum - value;
}

// Work items of kPlanned requests, in the order request, chunk, KV head, tile. If the chunk states
// of a request do not fit the workspace, counter[] is negative and its work items are whole
// sequences.
struct Plan {
  int* item_end;  // inclusive sums
  int* counter;   // counter of the request's first sequence
  int* state;     // offset of the request's first chunk state, in float4s
  int* scan;
};

// Plans kPlanned requests and returns the number of work items. Raises `row_end` to the end of the
// requests' rows. Threads beyond kPlanned plan no request.
template <int kRows, int kThreads>
__device__ __forceinline__ int make_plan(const AttentionLaunch& launch,
                                         const Plan& plan,
                                         int64_t first_request,
                                         int& used_counters,
                                         int& used_float4s,
                                         int* row_end) {
  static_assert(kPlanned == kAttentionThreads);
  constexpr int kWarps = kThreads / kWarpSize;
  const AppendAttentionParams& params = launch.params;
  int64_t batch_idx = first_request + threadIdx.x;
  bool plans = kThreads == kPlanned || threadIdx.x < kPlanned;
  RequestWork work{};
  if (plans && batch_idx < params.batch) {
    Request request = load_request(params, batch_idx);
    if (!request.valid && blockIdx.x == 0) {
      report_error(params.error, find_fault(params, batch_idx).code);
    }
    if (request.qo_len > 0) {
      atomicMax(row_end, request.qo_begin + request.qo_len);
      int shared = request.valid ? shared_leaves(launch, batch_idx) : 0;
      work = work_of<kRows>(launch, request, shared);
    }
  }
  bool small = work.may_split;
  int counters = small ? work.sequences : 0;
  int float4s = small ? float4s_of(work, launch.chunk_capacity) : 0;
  int all_counters, all_float4s, all_items;
  int counter = used_counters + scan_exclusive<kWarps>(counters, plan.scan, all_counters);
  int float4_index = used_float4s + scan_exclusive<kWarps>(float4s, plan.scan, all_float4s);
  bool split = small && counter + counters <= launch.num_counters &&
               float4_index + float4s <= launch.chunk_capacity;
  int items = work.sequences * (split ? work.chunks : 1);
  used_counters = min(used_counters + all_counters, launch.num_counters + 1);
  used_float4s = min(used_float4s + all_float4s, launch.chunk_capacity + 1);
  int before = scan_exclusive<kWarps>(items, plan.scan, all_items);
  if (plans) {
    plan.counter[threadIdx.x] = split ? counter : -1;
    plan.state[threadIdx.x] = float4_index;
    plan.item_end[threadIdx.x] = before + items;
  }
  __syncthreads();
  return all_items;
}

}  // namespace specops
