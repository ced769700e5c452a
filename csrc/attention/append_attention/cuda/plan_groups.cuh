// SPDX-License-Identifier: Apache-2.0
// Grouping of requests whose shared prefix append_attention on CUDA reduces together. The bits of
// the result do not depend on it.
#pragma once

#include "attention/append_attention/cuda/plan.cuh"

namespace specops {

// Data collected about the groups of a level: arrays [batch], indexed by the group's leader, in
// shared memory.
struct GroupSums {
  int* first_position;  // min over members with rows of kv_len - qo_len, or of their mask's begin
  int* last_position;   // highest position of any row of the group
  int* members;         // number of members with rows
  int* member;          // first member with rows
  int* row_end;
  int* shared;  // leaves shared up to this level
  int* before;  // leaves shared up to the previous level
  int* tiles;   // number of row tiles if each member has tiles of its own
};
constexpr int kGroupSums = 8;
constexpr int kScanInts = 8;  // scratch for scan_exclusive, before the sums

// Number of work items and state memory that the group of one thread needs, if its leaves are
// reduced by chunk or by leaf.
struct GroupNeed {
  int items;
  int float4s;  // size of states, capped at capacity + 1

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

// Returns how many tiles `rows` query rows fill, for one KV head.
__device__ __forceinline__ int64_t row_tiles(const AttentionLaunch& launch,
                                             int rows,
                                             int tile_rows) {
  return (int64_t{rows} * launch.group + tile_rows - 1) / tile_rows;
}

// Returns whether reducing a leaf for the rows of all members together saves time. The gain is that
// fewer row tiles read the leaf; the cost is writing and rereading states. There is no gain if the
// rows of each member fill whole tiles.
__device__ __forceinline__ bool pays(const AttentionLaunch& launch, int member_tiles, int rows) {
  int64_t head_dim = launch.params.head_dim;
  int64_t element = launch.params.dtype == DType::kFloat32 ? 4 : 2;
  int64_t spared = member_tiles - row_tiles(launch, rows, launch.group_rows);
  int64_t states = int64_t{rows} * launch.group * 2 * (value_dim_of(head_dim) + 2);
  return spared * kLeafTokens * read_dim_of(head_dim) * element > states * int64_t{sizeof(float)};
}

// Finds the groups that share leaves, level by level. Fills the table indexed by leader, and a list
// of the first kPlanned groups. Returns the number of groups.
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
        // All rows must see the whole shared part, so the sliding window of the last row must begin
        // at token 0.
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

// Divides the groups' shared leaves into work items for `blocks` blocks: one per chunk or, if the
// chunks are too few to fill the GPU, one per leaf. Returns the number of items; 0 if the states do
// not fit the workspace.
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

// Plans which groups of requests append_attention reduces together in its next two launches. Plans
// no groups if the list, the batch or the states are too large, or if sharing costs more than it
// saves.
// Grid:    one block.
// Block:   kAttentionThreads, one request or group each.
// Smem:    kScanInts integers, and kGroupSums for each request.
// Cost:    a few reads of the lengths per level; latency-bound.
// Assumes: shared memory for the batch; `blocks` is the grid of the shared launch.
// Order:   integers.
// One block per SM is enough, and ptxas must know it: for sm_80 it would spill to fit sixteen.
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
