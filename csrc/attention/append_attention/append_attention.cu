// SPDX-License-Identifier: Apache-2.0
#include <stdexcept>
#include <string>

#include "attention/append_attention/cuda/block.cuh"
#include "attention/append_attention/cuda/form.h"
#include "attention/append_attention/cuda/plan_groups.cuh"
#include "common/launch.cuh"

namespace specops {
namespace {

// Bounds on the workspace for chunk states; within them it fits requests with equally many rows.
constexpr int64_t kMinStateFloats = int64_t{256} << 10;
// The upper bound, 252 MiB, keeps the plan's sums over kPlanned requests below 2^31 float4s. A request
// whose states do not fit is not split: one SM then reads all of a head's tokens. States take 3 % of
// the memory of the keys and values that they stand for.
constexpr int64_t kMaxStateFloats = int64_t{63} << 20;
static_assert(kPlanned * (kMaxStateFloats / 4 + 1) <= INT32_MAX);

constexpr int64_t kGroupFloats = sizeof(Group) / sizeof(float);
constexpr int64_t kListFloats = sizeof(GroupList) / sizeof(float);

// Larger batches, of more than about 3,000 requests, do not share prefixes.
constexpr int64_t kMostPlanBytes = 96 << 10;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Layout of the workspace after the counters: running totals, leaf states, chunk states.
struct Sizes {
  int64_t totals;        // floats
  int64_t leaf;          // floats per leaf state
  int64_t tail_chunks;   // chunks that may be split
  int leaf_cost;         // cost of a leaf that stores its state
  int64_t chunk_states;  // floats
};

// Returns the most rows a tile may have. 64 rows of latents need more shared memory than some
// devices have.
using WideShape = AttentionShape<bfloat16, kLatentKeyDim, 4>;
int64_t most_rows_of(int64_t head_dim, CudaStream stream) {
  if (head_dim == kLatentKeyDim && max_shared_bytes(stream) < WideShape::kSharedBytes) return 16;
  if (head_dim == 512) return 16;
  return head_dim > 128 && head_dim != kLatentKeyDim ? 32 : 64;
}

// Returns workspace sizes that also suffice for tiles with fewer rows.
Sizes workspace_sizes(const AttentionWorkspaceParams& shape, CudaStream stream) {
  int sms = num_sms(stream);
  int64_t most_rows = most_rows_of(shape.head_dim, stream);
  int64_t value_dim = value_dim_of(shape.head_dim);
  bool is_wide = shape.head_dim == kLatentKeyDim && most_rows > 16;
  int64_t group = shape.num_qo_heads / shape.num_kv_heads;
  Sizes sizes;
  int64_t row_tiles = kBlocksOfHighTiles * most_rows / 16;
  row_tiles = row_tiles > kMostBlocksPerSm ? row_tiles : kMostBlocksPerSm;
  sizes.totals = int64_t{sms} * (is_wide ? WideShape::kTotalFloats
                                         : kAttentionThreads * row_tiles * (value_dim / 8 + 4));
  int64_t rows = ceil_div(shape.rows, shape.batch < 1 ? 1 : shape.batch) * group;
  int64_t tile_rows = rows <= 16 ? 16 : rows <= 32 && !is_wide ? 32 : 64;
  tile_rows = tile_rows < most_rows ? tile_rows : most_rows;
  rows = rows < tile_rows ? rows : tile_rows;
  // With fewer rows a state costs less relative to the leaf's K and V, so splitting pays sooner.
  sizes.leaf_cost = kLeafCost + static_cast<int>(kLeafCost / 4 * rows / 64);
  // Find the largest number of chunks in the last wave that may still be split. Assume that every
  // wave takes as long as a full one; with more chunks in the last wave, none is split.
  int blocks_per_sm = tile_rows <= 32 ? kMostBlocksPerSm : kBlocksOfHighTiles;
  if (is_wide && tile_rows > 16) blocks_per_sm = WideShape::kBlocksPerSm;
  int blocks = sms * blocks_per_sm, tail = blocks - 1;
  while (tail > 0 && splits_of_tail(tail, blocks, sizes.leaf_cost, kWholeWave) == 1) --tail;
  sizes.tail_chunks = tail < kCounters / 2 ? tail : kCounters / 2;
  int64_t most = shape.rows * group < tile_rows ? shape.rows * group : tile_rows;
  sizes.leaf = ceil_div(most, 2) * 2 * (value_dim + 2);
  int64_t chunks = ceil_div(shape.tokens, kChunkTokens) + shape.batch;
  int64_t row_heads = ceil_div(shape.rows, shape.batch < 1 ? 1 : shape.batch) * shape.num_qo_heads;
  // Twice the states, because shared prefixes need states as well. Computed in floating point,
  // because the shapes need not belong to a real batch and might overflow an integer.
  double floats = 2.0 * chunks * (row_heads + shape.num_kv_heads) * (value_dim + 2) +
                  4.0 * shape.batch * kGroupFloats + kListFloats;
  floats = floats > kMinStateFloats ? floats : kMinStateFloats;
  sizes.chunk_states = static_cast<int64_t>(floats < kMaxStateFloats ? floats : kMaxStateFloats);
  return sizes;
}

// Returns the bytes of shared memory of plan_groups_kernel.
int64_t plan_bytes(int64_t batch) { return (kScanInts + kGroupSums * batch) * sizeof(int); }

AttentionForm form_of(const AppendAttentionParams& params, int64_t rows, int64_t most_rows) {
  if (params.cache_dtype == DType::kInt8) return attention_form_int8(params, rows, most_rows);
  if (params.cache_dtype == DType::kFloat8E4M3) return attention_form_e4m3(params, rows, most_rows);
  if (params.dtype == DType::kBFloat16) return attention_form_bf16(params, rows, most_rows);
  if (params.dtype == DType::kFloat16) return attention_form_f16(params, rows, most_rows);
  return attention_form_f32(params, rows, most_rows);
}

// Returns the number of blocks that run at once, limited by the shared memory of an SM on this
// device. A larger grid would take two waves where the plan counts on one.
int blocks_of(const AttentionForm& form, size_t bytes, int sms, CudaStream stream) {
  int fit = sm_shared_bytes(stream) / (static_cast<int>(bytes) + kBlockSharedBytes);
  return sms * (fit < 1 ? 1 : fit < form.blocks_per_sm ? fit : form.blocks_per_sm);
}

void start(const AttentionForm& form,
           const AttentionLaunch& launch_params,
           size_t bytes,
           int blocks,
           CudaStream stream) {
  const AppendAttentionParams& params = launch_params.params;
  if (params.stamps != nullptr && params.stamped_blocks < blocks) {
    throw std::invalid_argument("append_attention: phase stamps must have a row for each of " +
                                std::to_string(blocks) + " blocks, got " +
                                std::to_string(params.stamped_blocks));
  }
  launch(form.kernel, blocks, form.threads, bytes, stream, launch_params);
}

void run(AttentionLaunch launch_params, const Sizes& sizes, int sms, CudaStream stream) {
  const AppendAttentionParams& params = launch_params.params;
  int64_t rows = params.rows * launch_params.group;
  // Requests usually have equally many rows; one with more rows gets more tiles.
  int64_t batch = params.batch < 1 ? 1 : params.batch;
  // 64 rows of latents keep the states of their chunks in the workspace.
  bool has_room = params.head_dim != kLatentKeyDim || launch_params.totals != nullptr;
  int64_t most_rows = has_room ? most_rows_of(params.head_dim, stream) : 16;
  AttentionForm form =
      form_of(params, ceil_div(params.rows, batch) * launch_params.group, most_rows);
  size_t bytes = form.shared_bytes + (launch_params.totals == nullptr ? form.total_bytes : 0);
  if (bytes > static_cast<size_t>(max_shared_bytes(stream))) {
    throw std::invalid_argument("append_attention: workspace must have at least " +
                                std::to_string(kCounters + sizes.totals) +
                                " elements on this device, got " +
                                std::to_string(params.workspace_size));
  }
  launch_params.tile_rows = form.rows;
  launch_params.least_share = least_share_of_wave(form.blocks_per_sm);
  if (launch_params.groups != nullptr) {
    AttentionForm shared = form_of(params, rows, most_rows);
    launch_params.group_rows = shared.rows;
    int blocks = blocks_of(shared, shared.shared_bytes, sms, stream);
    launch(plan_groups_kernel,
           1,
           kAttentionThreads,
           plan_bytes(params.batch),
           stream,
           launch_params,
           blocks);
    launch_params.is_shared_launch = true;
    start(shared, launch_params, shared.shared_bytes, blocks, stream);
    launch_params.is_shared_launch = false;
  }
  start(form, launch_params, bytes, blocks_of(form, bytes, sms, stream), stream);
}

}  // namespace

void attention_workspace_size_cuda(const AttentionWorkspaceParams& params, CudaStream stream) {
  Sizes sizes = workspace_sizes(params, stream);
  *params.floats =
      kCounters + sizes.totals + sizes.tail_chunks * kChunkLeaves * sizes.leaf + sizes.chunk_states;
  *params.zeros = kCounters;
}

void append_attention_cuda(const AppendAttentionParams& params, CudaStream stream) {
  int sms = num_sms(stream);
  Sizes sizes = workspace_sizes({.rows = params.rows,
                                 .batch = params.batch,
                                 .num_qo_heads = params.num_qo_heads,
                                 .num_kv_heads = params.num_kv_heads,
                                 .head_dim = params.head_dim,
                                 .tokens = params.num_indices * params.page_size,
                                 .floats = nullptr,
                                 .zeros = nullptr},
                                stream);
  // If a part does not fit the workspace, it is not split; totals then live in shared memory.
  AttentionLaunch launch_params{};
  launch_params.params = params;
  launch_params.group = static_cast<int>(params.num_qo_heads / params.num_kv_heads);
  launch_params.leaf_floats = sizes.leaf;
  launch_params.leaf_cost = sizes.leaf_cost;
  float* next = params.workspace;
  int64_t left = params.workspace == nullptr ? 0 : params.workspace_size;
  if (left >= kCounters) {
    launch_params.counters = reinterpret_cast<int32_t*>(next);
    launch_params.num_counters = static_cast<int>(kCounters - sizes.tail_chunks);
    next += kCounters;
    left -= kCounters;
    if (left >= sizes.totals) {
      launch_params.totals = next;
      next += sizes.totals;
      left -= sizes.totals;
    }
    int64_t tail_chunks = left / (kChunkLeaves * sizes.leaf);
    tail_chunks = tail_chunks < sizes.tail_chunks ? tail_chunks : sizes.tail_chunks;
    launch_params.tail_chunks = static_cast<int>(tail_chunks);
    launch_params.leaf_states = next;
    next += tail_chunks * kChunkLeaves * sizes.leaf;
    left -= tail_chunks * kChunkLeaves * sizes.leaf;
    left = left < kMaxStateFloats ? left : kMaxStateFloats;
    int64_t table = params.num_prefix_levels * params.batch * kGroupFloats;
    if (table > 0 && left > table + kListFloats && plan_bytes(params.batch) <= kMostPlanBytes) {
      launch_params.groups = reinterpret_cast<Group*>(next);
      launch_params.group_list = reinterpret_cast<GroupList*>(next + table);
      next += table + kListFloats;
      left -= table + kListFloats;
      launch_params.shared_states = next;
      launch_params.shared_capacity = static_cast<int>(left / 2 / 4);
      next += int64_t{4} * launch_params.shared_capacity;
      left -= int64_t{4} * launch_params.shared_capacity;
    }
    launch_params.chunk_states = next;
    launch_params.chunk_capacity = static_cast<int>(left / 4);
  }
  run(launch_params, sizes, sms, stream);
}

}  // namespace specops
