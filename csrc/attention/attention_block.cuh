// SPDX-License-Identifier: Apache-2.0
// What a block of append_attention on CUDA works with: its unit of work, its turns, its shared
// memory. The functions of the other files take it as `block`.
#pragma once

#include "attention/append_attention.h"
#include "attention/attention_plan.cuh"
#include "attention/attention_shape.cuh"
#include "common/device.cuh"

namespace specops {

// A tile of rows and the tokens one block reduces for it; what becomes of its state. In shared
// memory: as registers its fields would not leave room for the state of 64 rows.
struct Unit {
  Request request;
  int first_row;  // of the tile, packed: query row * group + query head of the KV head
  int rows;
  int head;                  // KV head
  int low, high;             // tokens that any row of the tile sees
  int begin, end;            // those of this unit, whole leaves cut to [low, high)
  int load_begin, load_end;  // those that are read
  // Tiles of KV that end after seen_end or begin before seen_begin have tokens some row of the tile
  // does not see.
  int seen_begin, seen_end;
  bool many_queries;
  bool valid;  // else there is nothing to do
  // A state in the workspace: [state_rows, value_dim] outputs, then [state_rows] of (m, l). The tile
  // begins at state_row.
  int state_row, state_rows;
  int tile_rows;        // rows before the unit was narrowed
  float* state;         // nullptr: the unit finishes the sequence and writes to out
  int64_t leaf_stride;  // not 0: every leaf has a state of its own, so many floats apart
  // How the sequence of this tile and head is split: chunks before first_cut are one unit each, the
  // others are cut into parts; first_tail is the number of chunk first_cut among the chunks so cut.
  int parts;     // of the unit's chunk that are not empty
  int arrivals;  // chunks of the sequence; 0: nobody waits for the state
  // Instead the parts of all its chunks, which are few and cut throughout, arrive at the sequence.
  bool meets_once;
  int first_cut, first_tail;
  int64_t batch_idx;
  int shared, first_chunk;  // of the request
  int sequences, sequence;  // of the request; this one
  int counter;
  int chunk_quad, state_quads;  // where the request's chunk states begin, and their size
};

// A block's way through the units of a plan, in shared memory too.
struct Turns {
  int64_t first_request;
  int now, end;               // turns; from tail_begin on they are parts of chunks
  int tail_begin;             // units
  int part_leaves;            // of a part of a chunk that is cut
  int counters, quads, base;  // for the next plan
  int row_end;                // of all requests
};

// kExact = false is for a bench to price exactness: a chunk runs from end to end in one state,
// without the folds of its leaves. Launch it with tail_units = 0 and no prefixes; the product has
// no instance. kIsStamped keeps time (attention_stamps.cuh).
template <typename T,
          int kDim,
          int kTiles,
          bool kExact = true,
          bool kIsStamped = false,
          typename KvElement = T>
struct AttentionBlock {
  using Element = T;
  using Cache = KvElement;
  using Shape = AttentionShape<T, kDim, kTiles, KvElement>;
  static constexpr int kHeadDim = kDim;
  static constexpr int kValueDim = Shape::kValueDim;
  static constexpr int kRowTiles = Shape::kRowTiles;
  static constexpr int kTile = Shape::kTile;
  static constexpr int kOutTiles = Shape::kOutTiles;
  static constexpr int kScoreTiles = Shape::kScoreTiles;
  static constexpr int kStages = Shape::kStages;
  static constexpr int kLeaf = kExact ? kLeafTokens : kChunkTokens;
  static constexpr bool kStamped = kIsStamped;

  const AttentionLaunch& launch;
  const AppendAttentionParams& params;
  unsigned char* smem;
  Plan plan;
  Unit& unit;
  Turns& turns;

  static_assert(sizeof(Unit) <= 256 && sizeof(Turns) <= 48);

  __device__ __forceinline__ AttentionBlock(const AttentionLaunch& given)
      : launch(given),
        params(given.params),
        smem(shared_memory()),
        unit(*reinterpret_cast<Unit*>(smem + Shape::kUnit)),
        turns(*reinterpret_cast<Turns*>(smem + Shape::kTurns)) {
    int* ints = reinterpret_cast<int*>(smem + Shape::kPlan);
    plan = {
        ints, ints + kPlanned, ints + 2 * kPlanned, reinterpret_cast<int*>(smem + Shape::kScan)};
  }

  __device__ __forceinline__ int group() const { return launch.group; }
  __device__ __forceinline__ static int leaf_of(int tile) {
    return static_cast<int>(static_cast<unsigned>(tile) * kTile / kLeaf);
  }
  // The first tile of the unit, and its last.
  __device__ __forceinline__ int first_tile() const {
    return static_cast<int>(static_cast<unsigned>(unit.begin) / kTile);
  }
  __device__ __forceinline__ int last_tile() const {
    return static_cast<int>(static_cast<unsigned>(unit.end - 1) / kTile);
  }

  // Packed row -> row of q and out, query head of the KV head.
  __device__ __forceinline__ int64_t item_of(int row) const {
    int packed = unit.first_row + row;
    int query = packed / group(), head = packed % group();
    return (int64_t{unit.request.qo_begin} + query) * params.num_qo_heads + unit.head * group() +
           head;
  }

  // Whether some row of the tile does not see some token of this tile of KV.
  __device__ __forceinline__ bool partly_seen(int tile) const {
    return (tile + 1) * kTile > unit.seen_end || tile * kTile < unit.seen_begin;
  }

  // ---- shared memory ----

  __device__ __forceinline__ unsigned char* k_slot(int tile) const {
    int slot = tile & (kStages - 1);
    if constexpr (Shape::kIsLatent) slot = tile & 1;
    if constexpr (Shape::kThreeSlots) slot = static_cast<int>(2u * tile % 3);
    return smem + Shape::kRing + slot * Shape::kTileBytes;
  }
  __device__ __forceinline__ unsigned char* v_slot(int tile) const {
    if constexpr (Shape::kIsLatent) return k_slot(tile);
    int slot = kStages + (tile & (kStages - 1));
    if constexpr (Shape::kThreeSlots) slot = static_cast<int>((2u * tile + 1) % 3);
    return smem + Shape::kRing + slot * Shape::kTileBytes;
  }

  // The running maximum of a leaf after a tile, by row, in turns like chunk_sums.
  __device__ __forceinline__ float* running(int tile) const {
    return reinterpret_cast<float*>(smem + Shape::kRunning) + (tile & 1) * Shape::kRows;
  }

  // Each lane's share of the sums of weights of a leaf: [2 * row tiles, threads].
  __device__ __forceinline__ float* lane_sums() const {
    return reinterpret_cast<float*>(smem + Shape::kLaneSums);
  }

  // m and l of the chunk before leaf `leaf`, by row: in shared memory, as every thread of a row
  // needs the same and registers are short. In turns, so that a thread may read while another
  // writes.
  __device__ __forceinline__ float2* chunk_sums(int leaf) const {
    return reinterpret_cast<float2*>(smem + Shape::kChunkSums) + (leaf & 1) * Shape::kRows;
  }

  __device__ __forceinline__ float4* total_of_block(int thread) const {
    float* base = launch.totals == nullptr
                      ? reinterpret_cast<float*>(smem + Shape::kSharedBytes)
                      : launch.totals + int64_t{blockIdx.x} * Shape::kTotalFloats;
    return reinterpret_cast<float4*>(base) + thread;
  }
};

}  // namespace specops
