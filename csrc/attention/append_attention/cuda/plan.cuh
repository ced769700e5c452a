// SPDX-License-Identifier: Apache-2.0
// Who computes what of append_attention on CUDA: every block works out the same plan from the
// lengths on the device. Nothing here reaches a bit of the result.
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
constexpr int kPlanned = 128;    // requests, or groups, planned at once: one a thread
constexpr int kSplitTiles = 16;  // a request of more row tiles is parallel enough: not split
constexpr int kSmallTiles = 64;  // the same of tiles of 16 rows
constexpr int kCounters = 8192;  // arrivals of split sequences, first in the workspace

// What a group of requests shares beyond what the wider group around it does: leaves [begin, end).
// Their states lie by slot, KV head and row tile of the group; a chunk that lies inside has one
// slot, other leaves have one each.
struct Group {
  int begin, end;
  int first_row, rows;  // of q: those of all members
  int member;           // one that has rows
  int state;            // of the first slot, in float4s
  int leafwise;         // no chunk has a slot of its own
  int entry;            // level * batch + leader

  __device__ __forceinline__ int head_leaves() const {  // before the first whole chunk
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
  // Work items per KV head and row tile.
  __device__ __forceinline__ int splits() const {
    return leafwise != 0 ? end - begin : (end - 1) / kChunkLeaves - begin / kChunkLeaves + 1;
  }
};

// The groups that share something, and the work items they make, in order: group, split, KV head,
// row tile.
struct GroupList {
  Group groups[kPlanned];
  int item_end[kPlanned];  // inclusive sums
  int items;
  int unused[3];  // a multiple of 16 bytes
};

// What the launcher adds to the arguments: the workspace cut into its parts.
struct AttentionLaunch {
  AppendAttentionParams params;
  int group;            // query heads of a KV head
  int tile_rows;        // of a tile of a request's rows: what the kernel is for
  int group_rows;       // the same of a group's rows, in the shared launch
  int32_t* counters;    // [num_counters + tail_chunks], zero between launches
  float* totals;        // [blocks, kTotalFloats]; nullptr: in shared memory
  float* leaf_states;   // [tail_chunks * kChunkLeaves, leaf_floats]
  float* chunk_states;  // 4 * chunk_capacity floats
  int64_t leaf_floats;  // of the largest tile of one leaf
  int num_counters;     // of sequences; those of chunks that are cut come after them
  int tail_chunks;      // at most so many chunks of the last wave are cut
  int leaf_cost;        // of a leaf with a state of its own; of others: kLeafCost
  int least_share;      // of a wave's time, however few its blocks
  int chunk_capacity;   // in float4s
  // With shared prefixes one launch reduces what groups share, and the next one all else.
  Group* groups;  // [num_prefix_levels, batch], by leader; nullptr: nothing is shared
  GroupList* group_list;
  float* shared_states;  // 4 * shared_capacity floats
  int shared_capacity;
  bool is_shared_launch;
};

// ---- the plan ----

// What it costs to read a leaf. A state to be written and read again costs a quarter of it for 64
// rows of head_dim 128, if L2 gives twice the bandwidth of memory.
constexpr int kLeafCost = 16;
// What it costs to begin a work item: to find it, and to fill the ring, beside other blocks of the SM.
constexpr int kStartCost = 3;

// A wave of few blocks takes less time than one of all, which share the bandwidth of memory, but no
// less than this share, in units of 1 / kWholeWave: three blocks an SM are more than memory needs.
constexpr int kWholeWave = 64;
SPECOPS_HOST_DEVICE int least_share_of_wave(int blocks_per_sm) {
  return blocks_per_sm > 2 ? kWholeWave * 2 / 3 : kWholeWave;
}

// Into how many splits the chunks of the last wave are cut: `tail` of them for `blocks` blocks. The
// least time counts: of the waves that the splits take, of their states and of their beginnings.
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

// What the index arrays say of a request; one that contradicts itself is invalid and yields zeros.
struct Request {
  int qo_begin, qo_len, kv_begin, kv_len;
  bool valid;
};

__device__ __forceinline__ Request load_request(const AppendAttentionParams& params,
                                                int64_t batch_idx) {
  Request request;
  ErrorCode code = fault_of(params, batch_idx).code;
  request.qo_begin = params.qo_indptr[batch_idx];
  bool has_rows = code != ErrorCode::kAttentionQoIndptr;
  request.qo_len = has_rows ? params.qo_indptr[batch_idx + 1] - request.qo_begin : 0;
  request.kv_begin = params.kv_indptr[batch_idx];
  request.kv_len = params.kv_lens[batch_idx];
  request.valid = code == ErrorCode::kNone;
  return request;
}

// First token a row at `position` sees.
__device__ __forceinline__ int window_begin(const AppendAttentionParams& params, int position) {
  if (params.sliding_window == 0 || position < params.sliding_window) return 0;
  return position - static_cast<int>(params.sliding_window) + 1;
}

// Behind the last token that it sees, of a request of so many.
__device__ __forceinline__ int seen_end(const AppendAttentionParams& params,
                                        int position,
                                        int kv_len) {
  return params.is_causal ? position + 1 : kv_len;
}

// Behind the last token that all rows of a request see which stand at `position` or after it.
__device__ __forceinline__ int all_see_end(const AppendAttentionParams& params,
                                           const Request& request,
                                           int64_t batch_idx,
                                           int position) {
  int end = seen_end(params, position, request.kv_len);
  if (params.mask == nullptr) return end;
  return min(end, static_cast<int>(mask_begin(params, batch_idx, request.kv_len - request.qo_len)));
}

// The first request of the one's group on a level.
__device__ __forceinline__ int leader_of(const AppendAttentionParams& params,
                                         int64_t level,
                                         int64_t batch_idx) {
  int leader = params.prefix_leaders[level * params.batch + batch_idx];
  return leader >= 0 && leader <= batch_idx ? leader : static_cast<int>(batch_idx);
}

// Leaves of the request that groups reduce for it.
__device__ __forceinline__ int shared_leaves(const AttentionLaunch& launch, int64_t batch_idx) {
  if (launch.groups == nullptr) return 0;
  int64_t level = launch.params.num_prefix_levels - 1;
  int leader = leader_of(launch.params, level, batch_idx);
  return launch.groups[level * launch.params.batch + leader].end;
}

// A request's share of the plan.
struct RequestWork {
  int tiles;        // of rows
  int shared;       // leaves before its own ones
  int first_chunk;  // of its own KV that any row sees
  int chunks;
  int slots;          // states of a sequence in the workspace: of chunks, and of each own leaf of a
                      // chunk that begins with shared ones
  int sequences;      // (tile, KV head)
  int state_float4s;  // of one tile's state in the workspace
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

// Of all its states, at most one more than there are: the sums over a plan stay small.
__device__ __forceinline__ int float4s_of(const RequestWork& work, int capacity) {
  int64_t float4s = int64_t{work.sequences} * work.slots * work.state_float4s;
  return static_cast<int>(min(float4s, int64_t{capacity} + 1));
}

// Sum over the threads before this one; `total` over all. Two barriers.
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

// Work items of kPlanned requests, in order: request, chunk, KV head, tile. A request whose
// chunks find no room in the workspace (counter[] < 0) has work items of whole sequences.
struct Plan {
  int* item_end;  // inclusive sums
  int* counter;   // of the request's first sequence
  int* state;     // of its first chunk state, in float4s
  int* scan;
};

// `row_end` grows to the end of their rows. Threads beyond kPlanned have no request.
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
      report_error(params.error, fault_of(params, batch_idx).code);
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

// ---- groups that share a prefix ----

// Which groups of requests that share a prefix append_attention on CUDA reduces together. Nothing
// here reaches a bit of the result.

// What is found out of the groups of a level, by leader: [batch] each, in shared memory.
struct GroupSums {
  int* first_position;  // least kv_len - qo_len of the members with rows, or begin of their masks
  int* last_position;   // greatest position of a row
  int* members;         // with rows
  int* member;          // the first of them
  int* row_end;
  int* shared;  // leaves, up to this level
  int* before;  // leaves, up to the level before
  int* tiles;   // of rows, if every member has its own
};
constexpr int kGroupSums = 8;
constexpr int kScanInts = 8;  // before them, for scan_exclusive

// What one thread's group needs, as chunks or as leaves.
struct GroupNeed {
  int items;
  int float4s;  // of states, at most one more than there are

  __device__ __forceinline__ GroupNeed(const AttentionLaunch& launch, const Group& group) {
    int tile_rows = launch.group_rows;
    int64_t packed = int64_t{group.rows} * launch.group;
    int64_t tiles = (packed + tile_rows - 1) / tile_rows * launch.params.num_kv_heads;
    int rows = packed < tile_rows ? static_cast<int>(packed + 1) / 2 * 2 : tile_rows;
    items = group.splits() * static_cast<int>(tiles);
    int64_t floats = rows * (value_dim_of(launch.params.head_dim) + 2);
    float4s = static_cast<int>(
        min(tiles * group.slots() * (floats / 4), int64_t{launch.shared_capacity} + 1));
  }
};

// Tiles of so many query rows, for one KV head.
__device__ __forceinline__ int64_t row_tiles(const AttentionLaunch& launch,
                                             int rows,
                                             int tile_rows) {
  return (int64_t{rows} * launch.group + tile_rows - 1) / tile_rows;
}

// Whether a leaf is better reduced for the rows of all members of a group: the tiles of rows that
// then need not read it, against states that are written and read again. Tiles full of one member's
// rows gain nothing.
__device__ __forceinline__ bool pays(const AttentionLaunch& launch, int member_tiles, int rows) {
  int64_t head_dim = launch.params.head_dim;
  int64_t element = launch.params.dtype == DType::kFloat32 ? 4 : 2;
  int64_t spared = member_tiles - row_tiles(launch, rows, launch.group_rows);
  int64_t states = int64_t{rows} * launch.group * 2 * (value_dim_of(head_dim) + 2);
  return spared * kLeafTokens * read_dim_of(head_dim) * element > states * int64_t{sizeof(float)};
}

// Finds the groups that share something, level by level: the table by leader, and those of the
// first kPlanned in a list. Returns how many there are.
__device__ __forceinline__ int find_groups(const AttentionLaunch& launch,
                                           const GroupSums& sums,
                                           int* scan) {
  const AppendAttentionParams& params = launch.params;
  int batch = static_cast<int>(params.batch), levels = static_cast<int>(params.num_prefix_levels);
  int thread = threadIdx.x;
  int count = 0;
#pragma unroll 1
  for (int level = 0; level < levels; ++level) {
    __syncthreads();
#pragma unroll 1
    for (int b = thread; b < batch; b += kAttentionThreads) {
      sums.first_position[b] = INT32_MAX;
      sums.last_position[b] = sums.members[b] = sums.row_end[b] = sums.tiles[b] = 0;
      sums.member[b] = INT32_MAX;
      sums.before[b] = level == 0 ? 0 : sums.shared[leader_of(params, level - 1, b)];
    }
    __syncthreads();
#pragma unroll 1
    for (int b = thread; b < batch; b += kAttentionThreads) {
      Request request = load_request(params, b);
      if (request.qo_len == 0) continue;
      int leader = leader_of(params, level, b);
      int position = request.valid ? request.kv_len - request.qo_len : 0;
      int all_see = request.valid ? all_see_end(params, request, b, position) : 0;
      atomicMin(&sums.first_position[leader], min(position, all_see));
      atomicMax(&sums.last_position[leader], position + request.qo_len - 1);
      atomicAdd(&sums.members[leader], 1);
      atomicMin(&sums.member[leader], b);
      atomicAdd(&sums.tiles[leader],
                static_cast<int>(row_tiles(launch, request.qo_len, launch.tile_rows)));
      atomicMax(&sums.row_end[leader], request.qo_begin + request.qo_len);
    }
    __syncthreads();
#pragma unroll 1
    for (int first = 0; first < batch; first += kAttentionThreads) {
      int b = first + thread;
      Group group{};
      if (b < batch) {
        int entry = level * batch + b;
        int before = sums.before[b], shared = before;
        // A window must not cut into what is shared: every row sees all of it.
        if (sums.members[b] > 1 && window_begin(params, sums.last_position[b]) == 0) {
          group.member = sums.member[b];
          group.first_row = params.qo_indptr[group.member];
          group.rows = sums.row_end[b] - group.first_row;
          if (pays(launch, sums.tiles[b], group.rows)) {
            shared = min(params.prefix_lens[entry], sums.first_position[b]) / kLeafTokens;
            shared = max(shared, before);
          }
        }
        sums.shared[b] = shared;
        group.begin = before;
        group.end = shared;
        group.entry = entry;
        launch.groups[entry] = group;
      }
      int found;
      int place = count + scan_exclusive(group.end > group.begin ? 1 : 0, scan, found);
      if (group.end > group.begin && place < kPlanned) launch.group_list->groups[place] = group;
      count += found;
    }
  }
  __syncthreads();
  return count;
}

// Cuts what the groups share into work items for `blocks` blocks: as chunks, or, where those are too few
// to occupy the machine, as leaves. Returns how many; 0: there is no room for their states.
__device__ __forceinline__ int cut_groups(const AttentionLaunch& launch,
                                          int count,
                                          int blocks,
                                          int* scan) {
  int place = threadIdx.x;
  Group group{};
  if (place < count) group = launch.group_list->groups[place];
  int chunk_items;
  scan_exclusive(place < count ? GroupNeed(launch, group).items : 0, scan, chunk_items);
#pragma unroll 1
  for (int leafwise = 2 * chunk_items < blocks ? 1 : 0; leafwise >= 0; --leafwise) {
    group.leafwise = leafwise;
    int items = 0, float4s = 0, all_items, all_float4s;
    if (place < count) {
      GroupNeed need(launch, group);
      items = need.items;
      float4s = need.float4s;
    }
    group.state = scan_exclusive(float4s, scan, all_float4s);
    int end = scan_exclusive(items, scan, all_items) + items;
    if (all_float4s > launch.shared_capacity) continue;
    launch.group_list->item_end[place] = end;
    if (place < count) {
      launch.group_list->groups[place] = group;
      launch.groups[group.entry] = group;
    }
    return all_items;
  }
  return 0;
}

// Plans which groups of requests append_attention reduces together, for its two launches to come.
// Where the list, the batch or the states are too large, nothing is shared; nor where it would cost more
// than it saves.
// Grid:    one block.
// Block:   kAttentionThreads, a request or a group each.
// Smem:    kScanInts integers, and kGroupSums for each request.
// Cost:    a few reads of the lengths, level by level; latency.
// Assumes: the shared memory for the batch; `blocks` are those of the shared launch.
// Order:   integers.
// One block an SM is enough, and ptxas must be told: for sm_80 it would spill to fit sixteen.
__global__ void __launch_bounds__(kAttentionThreads, 1)
    plan_groups_kernel(const __grid_constant__ AttentionLaunch launch, int blocks) {
  wait_for_previous_kernel();
  int* ints = reinterpret_cast<int*>(shared_memory());
  int* scan = ints;
  int batch = static_cast<int>(launch.params.batch);
  int* at = ints + kScanInts;
  GroupSums sums{at,
                 at + batch,
                 at + 2 * batch,
                 at + 3 * batch,
                 at + 4 * batch,
                 at + 5 * batch,
                 at + 6 * batch,
                 at + 7 * batch};
  int count = find_groups(launch, sums, scan);
  int items = 0;
  if (count > 0 && count <= kPlanned) items = cut_groups(launch, count, blocks, scan);
  if (threadIdx.x == 0) launch.group_list->items = items;
  if (items > 0) return;
  int entries = static_cast<int>(launch.params.num_prefix_levels) * batch;
#pragma unroll 1
  for (int entry = threadIdx.x; entry < entries; entry += kAttentionThreads) {
    launch.groups[entry] = Group{};
  }
}

}  // namespace specops
