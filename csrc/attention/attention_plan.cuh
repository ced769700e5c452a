// SPDX-License-Identifier: Apache-2.0
// Who computes what of append_attention on CUDA: every block works out the same plan from the
// lengths on the device. Nothing here reaches a bit of the result.
#pragma once

#include "attention/append_attention.h"
#include "common/device.cuh"

namespace specops {

constexpr int kAttentionThreads = 128;
constexpr int kAttentionWarps = kAttentionThreads / kWarpSize;
constexpr int kAttentionBlocksPerSm = 2;
constexpr int kLeafTokens = 256;
constexpr int kChunkLeaves = 8;
constexpr int kChunkTokens = kChunkLeaves * kLeafTokens;
constexpr int kPageBlock = 16;  // tokens that always lie in one page
constexpr int kChunkBlocks = kChunkTokens / kPageBlock;
constexpr int kPlanned = 256;    // requests planned at once
constexpr int kSplitTiles = 16;  // a request of more row tiles is parallel enough: not split
constexpr int kCounters = 8192;  // arrivals of split sequences, first in the workspace

// What a group of requests shares beyond what the wider group around it does: leaves [begin, end).
// Their states lie by slot, KV head and row tile of the group; a chunk that lies inside has one
// slot, other leaves have one each.
struct Group {
  int begin, end;
  int first_row, rows;  // of q: those of all members
  int member;           // one that has rows
  int state;            // of the first slot, in quads
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
  // Units of work per KV head and row tile.
  __device__ __forceinline__ int pieces() const {
    return leafwise != 0 ? end - begin : (end - 1) / kChunkLeaves - begin / kChunkLeaves + 1;
  }
};

// What the launcher adds to the arguments: the workspace cut into its parts.
struct AttentionLaunch {
  AppendAttentionParams params;
  int group;            // query heads of a KV head
  int32_t* counters;    // [num_counters + tail_units], zero between launches
  float* totals;        // [blocks, kTotalFloats]; nullptr: in shared memory
  float* leaf_states;   // [tail_units * kChunkLeaves, leaf_floats]
  float* chunk_states;  // 4 * chunk_capacity floats
  int64_t leaf_floats;  // of the largest tile of one leaf
  int num_counters;     // of sequences; those of chunks that are cut come after them
  int tail_units;       // at most so many chunks of the last wave are cut
  int leaf_cost;        // of a leaf with a state of its own; of others: kLeafCost
  int chunk_capacity;   // in units of four floats
  // With shared prefixes one launch reduces what groups share, and the next one all else.
  Group* groups;         // [num_prefix_levels, batch], by leader; nullptr: nothing is shared
  float* shared_states;  // 4 * shared_capacity floats
  int shared_capacity;
  bool is_shared_launch;
};

// ---- the plan ----

// What it costs to read a leaf. A state to be written and read again costs a quarter of it for 64
// rows of head_dim 128, if L2 gives twice the bandwidth of memory.
constexpr int kLeafCost = 16;

// Into how many parts the chunks of the last wave are cut: `tail` of them for `blocks` blocks. The
// least time counts: of the waves that the parts take, and of their states.
SPECOPS_HOST_DEVICE int parts_of_tail(int tail, int blocks, int leaf_cost) {
  int best = 1, least = kChunkLeaves * kLeafCost;
  for (int parts = 2; tail > 0 && parts <= kChunkLeaves; parts *= 2) {
    int waves = (tail * parts + blocks - 1) / blocks;
    int cost = waves * (kChunkLeaves / parts) * leaf_cost;
    if (cost < least) {
      best = parts;
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
struct Demand {
  int tiles;        // of rows
  int shared;       // leaves before its own ones
  int first_chunk;  // of its own KV that any row sees
  int chunks;
  int slots;        // states of a sequence in the workspace: of chunks, and of each own leaf of a
                    // chunk that begins with shared ones
  int sequences;    // (tile, KV head)
  int state_quads;  // of one tile's state in the workspace, in units of four floats

  __device__ __forceinline__ bool may_split() const {
    return sequences > 0 && (shared > 0 || tiles <= kSplitTiles);
  }
};

template <int kRows>
__device__ __forceinline__ Demand demand_of(const AttentionLaunch& launch,
                                            const Request& request,
                                            int shared) {
  const AppendAttentionParams& params = launch.params;
  int64_t packed = int64_t{request.qo_len} * launch.group;
  Demand demand;
  demand.tiles = static_cast<int>((packed + kRows - 1) / kRows);
  int first = request.valid ? window_begin(params, request.kv_len - request.qo_len) : 0;
  int last = request.valid ? request.kv_len - 1 : 0;
  demand.shared = shared;
  demand.first_chunk = shared > 0 ? shared / kChunkLeaves : first / kChunkTokens;
  demand.chunks = last / kChunkTokens - demand.first_chunk + 1;
  int boundary = shared % kChunkLeaves;
  demand.slots = boundary > 0        ? kChunkLeaves - boundary + demand.chunks - 1
                 : shared > 0        ? demand.chunks
                 : demand.chunks > 1 ? demand.chunks
                                     : 0;
  demand.sequences = demand.tiles * static_cast<int>(params.num_kv_heads);
  int rows = packed < kRows ? static_cast<int>(packed) : kRows;
  demand.state_quads = (rows + 1) / 2 * (static_cast<int>(params.head_dim) + 2) / 2;
  return demand;
}

// Of all its states, at most one more than there are: the sums over a plan stay small.
__device__ __forceinline__ int quads_of(const Demand& demand, int capacity) {
  int64_t quads = int64_t{demand.sequences} * demand.slots * demand.state_quads;
  return static_cast<int>(min(quads, int64_t{capacity} + 1));
}

// Sum over the threads before this one; `total` over all. Two barriers.
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
  for (int i = 0; i < kAttentionWarps; ++i) {
    if (i < warp) before += warp_sums[i];
    total += warp_sums[i];
  }
  return before + sum - value;
}

// Units of work of kPlanned requests, in order: request, chunk, KV head, tile. A request whose
// chunks find no room in the workspace (counter[] < 0) has units of whole sequences.
struct Plan {
  int* unit_end;  // inclusive sums
  int* counter;   // of the request's first sequence
  int* state;     // of its first chunk state, in quads
  int* scan;
};

// `row_end` grows to the end of their rows.
template <int kRows>
__device__ __forceinline__ int make_plan(const AttentionLaunch& launch,
                                         const Plan& plan,
                                         int64_t first_request,
                                         int& used_counters,
                                         int& used_quads,
                                         int* row_end) {
  const AppendAttentionParams& params = launch.params;
  constexpr int kEach = kPlanned / kAttentionThreads;
  Demand demand[kEach];
  int counters = 0, quads = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    int64_t batch_idx = first_request + threadIdx.x * kEach + i;
    demand[i] = {};
    if (batch_idx >= params.batch) continue;
    Request request = load_request(params, batch_idx);
    if (!request.valid && blockIdx.x == 0) {
      report_error(params.error, fault_of(params, batch_idx).code);
    }
    if (request.qo_len == 0) continue;
    atomicMax(row_end, request.qo_begin + request.qo_len);
    int shared = request.valid ? shared_leaves(launch, batch_idx) : 0;
    demand[i] = demand_of<kRows>(launch, request, shared);
    if (!demand[i].may_split()) continue;
    counters += demand[i].sequences;
    quads += quads_of(demand[i], launch.chunk_capacity);
  }
  int all_counters, all_quads, all_units;
  int counter = used_counters + scan_exclusive(counters, plan.scan, all_counters);
  int quad = used_quads + scan_exclusive(quads, plan.scan, all_quads);
  int units = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    int slot = threadIdx.x * kEach + i;
    bool small = demand[i].may_split();
    int need = small ? quads_of(demand[i], launch.chunk_capacity) : 0;
    bool split = small && counter + demand[i].sequences <= launch.num_counters &&
                 quad + need <= launch.chunk_capacity;
    plan.counter[slot] = split ? counter : -1;
    plan.state[slot] = quad;
    if (small) counter += demand[i].sequences;
    quad += need;
    demand[i].chunks = split ? demand[i].chunks : 1;
    units += demand[i].sequences * demand[i].chunks;
  }
  used_counters = min(used_counters + all_counters, launch.num_counters + 1);
  used_quads = min(used_quads + all_quads, launch.chunk_capacity + 1);
  int end = scan_exclusive(units, plan.scan, all_units);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    end += demand[i].sequences * demand[i].chunks;
    plan.unit_end[threadIdx.x * kEach + i] = end;
  }
  __syncthreads();
  return all_units;
}

// ---- groups that share a prefix ----

// What is found out of the groups of a level, by leader: [batch] each, in shared memory.
struct GroupSums {
  int* first_position;  // least kv_len - qo_len of the members with rows
  int* last_position;   // greatest position of a row
  int* members;         // with rows
  int* member;          // the first of them
  int* row_end;
  int* shared;  // leaves, up to this level
  int* before;  // leaves, up to the level before
};
constexpr int kGroupSums = 7;

// Lists the groups and cuts their leaves into units: unit_end of the plan, in order group, piece,
// KV head, tile. Block 0 leaves groups to the next launch. Where the list, the batch or the states
// are too large, nothing is shared.
template <int kRows>
__device__ __forceinline__ int plan_groups(
    const AttentionLaunch& launch, const Plan& plan, Group* list, int* scratch, int scratch_ints) {
  const AppendAttentionParams& params = launch.params;
  int batch = static_cast<int>(params.batch), levels = static_cast<int>(params.num_prefix_levels);
  int heads = static_cast<int>(params.num_kv_heads);
  int thread = threadIdx.x;
  bool leaves_table = blockIdx.x == 0;
  int count = 0;
  if (int64_t{batch} * kGroupSums <= scratch_ints) {
    int* at = scratch;
    GroupSums sums{at,
                   at + batch,
                   at + 2 * batch,
                   at + 3 * batch,
                   at + 4 * batch,
                   at + 5 * batch,
                   at + 6 * batch};
#pragma unroll 1
    for (int level = 0; level < levels; ++level) {
      __syncthreads();
#pragma unroll 1
      for (int b = thread; b < batch; b += kAttentionThreads) {
        sums.first_position[b] = INT32_MAX;
        sums.last_position[b] = sums.members[b] = sums.row_end[b] = 0;
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
        atomicMin(&sums.first_position[leader], position);
        atomicMax(&sums.last_position[leader], position + request.qo_len - 1);
        atomicAdd(&sums.members[leader], 1);
        atomicMin(&sums.member[leader], b);
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
            shared = min(params.prefix_lens[entry], sums.first_position[b]) / kLeafTokens;
            shared = max(shared, before);
            group.member = sums.member[b];
            group.first_row = params.qo_indptr[group.member];
            group.rows = sums.row_end[b] - group.first_row;
          }
          sums.shared[b] = shared;
          group.begin = before;
          group.end = shared;
          group.entry = entry;
          if (leaves_table) launch.groups[entry] = group;
        }
        int found;
        int place = count + scan_exclusive(group.end > group.begin ? 1 : 0, plan.scan, found);
        if (group.end > group.begin && place < kPlanned) list[place] = group;
        count += found;
      }
    }
  }
  __syncthreads();
  // As chunks, or, where those are too few to occupy the machine, as leaves.
  constexpr int kEach = kPlanned / kAttentionThreads;
  bool fits = count > 0 && count <= kPlanned;
  int all_units = 0;
  for (int leafwise = 1; fits && leafwise >= 0; --leafwise) {
    int64_t quads[kEach];
    int units[kEach], all_quads, sum_quads = 0, sum_units = 0, chunk_units = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      int place = thread * kEach + i;
      quads[i] = units[i] = 0;
      if (place >= count) continue;
      Group group = list[place];
      int64_t packed = int64_t{group.rows} * launch.group;
      int64_t tiles = (packed + kRows - 1) / kRows * heads;
      int rows = packed < kRows ? static_cast<int>(packed + 1) / 2 * 2 : kRows;
      group.leafwise = 0;
      chunk_units += group.pieces() * static_cast<int>(tiles);
      group.leafwise = leafwise;
      units[i] = group.pieces() * static_cast<int>(tiles);
      quads[i] = tiles * group.slots() * (rows * (static_cast<int>(params.head_dim) + 2) / 4);
      quads[i] = min(quads[i], int64_t{launch.shared_capacity} + 1);
      sum_quads += static_cast<int>(quads[i]);
      sum_units += units[i];
    }
    int all_chunk_units;
    scan_exclusive(chunk_units, plan.scan, all_chunk_units);
    int state = scan_exclusive(sum_quads, plan.scan, all_quads);
    int end = scan_exclusive(sum_units, plan.scan, all_units);
    bool few = 2 * all_chunk_units < static_cast<int>(gridDim.x);
    if (all_quads > launch.shared_capacity || (leafwise == 1 && !few)) {
      all_units = 0;
      continue;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      int place = thread * kEach + i;
      end += units[i];
      plan.unit_end[place] = end;
      if (place >= count) continue;
      list[place].state = state;
      list[place].leafwise = leafwise;
      state += static_cast<int>(quads[i]);
      if (leaves_table) launch.groups[list[place].entry] = list[place];
    }
    break;
  }
  if (all_units == 0 && leaves_table) {
#pragma unroll 1
    for (int entry = thread; entry < levels * batch; entry += kAttentionThreads) {
      launch.groups[entry] = Group{};
    }
  }
  __syncthreads();
  return all_units;
}

}  // namespace specops
