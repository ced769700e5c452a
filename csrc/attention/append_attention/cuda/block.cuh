// SPDX-License-Identifier: Apache-2.0
// Shared memory layout of an append_attention block on CUDA, including the rows of a tile.
#pragma once

#include "attention/append_attention/append_attention.h"
#include "attention/append_attention/cuda/plan.cuh"
#include "attention/kv_element.h"
#include "common/device.cuh"
#include "common/stamps.cuh"

namespace specops {

// Largest number of 16-row tiles per block: as many as fit 99 KiB of shared memory, but no more
// than make the kernel compute-bound. Kernels for fewer rows halve this number, down to one.
// Latents use one or four tiles: four need more than 99 KiB, so devices with less shared memory use
// only one (append_attention.cu).
template <typename T, int kHeadDim>
constexpr int kMostRowTiles = kHeadDim == kLatentKeyDim                      ? 4
                              : kHeadDim * sizeof(T) > 512                   ? 1
                              : sizeof(T) == 4 || kHeadDim * sizeof(T) > 256 ? 2
                                                                             : 4;
template <int kHeadDim, int kTiles>
constexpr int kNextRowTiles = (kHeadDim == kLatentKeyDim ? 4 : 2) * kTiles;

// Shared memory of an SM, and the 1 KiB that the hardware adds to the shared memory of each block
// (sm_90, sm_100).
constexpr int kSmSharedBytes = 228 << 10, kBlockSharedBytes = 1 << 10;

// Constants of a kernel, derived from the element type, the cache element type and head_dim. A tile
// has the same layout in shared memory as in the cache; elements of 8-bit caches are widened to T
// in registers.
template <typename T, int kHeadDim, int kTiles, typename Cache = T>
struct AttentionShape {
  static constexpr bool kScaled = kIsScaled<Cache>;
  static constexpr bool kIsLatent = kHeadDim == kLatentKeyDim;  // a tile of K is also the tile of V
  static constexpr int kValueDim = static_cast<int>(value_dim_of(kHeadDim));
  static constexpr int kQueryBytes = kHeadDim * static_cast<int>(sizeof(T));  // per row
  static constexpr int kQueryVectors = kQueryBytes / 16;
  static constexpr int kTile = kQueryBytes <= 256 ? 64 : 32;  // tokens
  static constexpr int kRowTiles = kTiles;
  static constexpr int kRows = 16 * kRowTiles;
  // True for 64 rows of latents. Their state fills the registers of twice as many threads, so the
  // state of the chunk is kept in memory, and each warp scores only some of the rows.
  static constexpr bool kIsWide = kIsLatent && kRowTiles == 4;
  static constexpr int kThreads = kIsWide ? 2 * kAttentionThreads : kAttentionThreads;
  static constexpr int kWarps = kThreads / kWarpSize;
  // True if registers remain, besides the states, for the addresses of the loop over KV tiles.
  static constexpr bool kSparesRegisters = kRowTiles == 1 && kHeadDim != 256;
  // kTokenWarps warps share the tokens of a tile when scores are computed; the other warps score
  // other rows.
  static constexpr int kTokenWarps = kIsWide ? 2 : kWarps;
  static constexpr int kScoreRowTiles = kRowTiles * kTokenWarps / kWarps;  // 16-row tiles per warp
  static constexpr int kScoreTiles = kTile / kTokenWarps / 8;              // 8-token tiles per warp
  static constexpr int kOutTiles = kValueDim / kWarps / 8;  // 8-column tiles per warp
  // The sum of a row's weights in a tile is kept in kSumParts partial sums, and each warp has
  // kSumsOfWarp of them.
  static constexpr int kSumParts = 4;
  static constexpr int kSumsOfWarp = kSumParts / kTokenWarps;
  // Number of 16-byte vectors that the data of a token fills (kFilled), and that the token occupies
  // including padding (kVectors).
  static constexpr int kCacheBytes = kHeadDim * static_cast<int>(sizeof(Cache));
  static constexpr int kFilled = kCacheBytes / 16;
  static constexpr int kVectors = (kFilled + 3) / 4 * 4;
  static constexpr int kRowBytes = kVectors * 16;
  static constexpr int kTileBytes = kTile * kRowBytes;
  // True for float32 heads of 512, whose tiles have 64 KiB. 99 KiB hold neither a second tile nor
  // the queries beside it. So K and V take turns in one slot, and queries stay in global memory.
  static constexpr bool kOneSlot = kTileBytes == 64 << 10;
  // Number of threads that copy one row of a tile, and number of rows that all threads copy at
  // once.
  static constexpr int kCopyLanes = kVectors % 16 == 0 ? 16 : kVectors % 8 == 0 ? 8 : 4;
  static constexpr int kCopyRows = kThreads / kCopyLanes;
  static constexpr int kProbVectors = kTile * static_cast<int>(sizeof(T)) / 16;
  static constexpr int kTilesPerChunk = kChunkTokens / kTile;

  // Offsets in shared memory, in bytes.
  static constexpr int kQueries = 0;
  static constexpr int kProbs = kQueries + (kOneSlot ? 0 : kRows * kQueryBytes);
  static constexpr int kMaxima = kProbs + kRows * kProbVectors * 16;  // float [kRows, kTokenWarps]
  static constexpr int kSums = kMaxima + kRows * kTokenWarps * 4;     // float [kRows, kSumParts]
  static constexpr int kRunning = kSums + kRows * kSumParts * 4;      // float [2, kRows]
  static constexpr int kRescales = kRunning + 2 * kRows * 4;          // float [kRows], if kIsWide
  static constexpr int kLaneSums = kRescales + (kIsWide ? kRows * 4 : 0);
  static constexpr int kChunkSums =
      kLaneSums + 2 * kScoreRowTiles * kSumsOfWarp * kThreads * 4;  // float2 [2, kRows]
  static constexpr int kSeen = kChunkSums + 2 * kRows * 8;          // int2 [kRows]
  static constexpr int kTable = kSeen + kRows * 8;                  // int [2, kChunkBlocks]
  static constexpr int kPlan = kTable + 2 * kChunkBlocks * 4;       // int [3, kPlanned]
  static constexpr int kScan = kPlan + 3 * kPlanned * 4;            // int [8]
  static constexpr int kItem = kScan + 32;
  static constexpr int kCursor = kItem + 256;
  static constexpr int kStamps = kCursor + 48;  // used by the stamped kernel; a gap in others
  static constexpr int kRing = (kStamps + 32 + 127) / 128 * 128;  // tiles of K and V

  // Returns whether an SM has shared memory for three blocks with this many tiles in their rings.
  static constexpr bool fits_three(int tiles) {
    return 3 * (kRing + tiles * kTileBytes + kBlockSharedBytes) <= kSmSharedBytes;
  }
  // Three blocks hide more latency than two, if registers suffice.
  static constexpr bool kWantsThree =
      (kRowTiles == 1 && kValueDim < 512) || (kRowTiles == 2 && sizeof(T) == 2 && kHeadDim <= 128);
  // The ring has kStages tiles of K, then as many of V. If that is too much for three blocks, it
  // has half as many, or three slots that K and V use in turn. Latents use two slots in turn, or
  // three, so that warps may still multiply one tile while others score the next.
  static constexpr int kMostStages = kTileBytes <= 8 << 10 ? 4 : kTileBytes <= 16 << 10 ? 2 : 1;
  static constexpr bool kHalves =
      kWantsThree && !fits_three(2 * kMostStages) && kMostStages == 4 && fits_three(4);
  static constexpr bool kThreeSlots =
      kWantsThree && !fits_three(2 * kMostStages) && kMostStages == 2 && fits_three(3);
  static constexpr int kStages = kThreeSlots ? 1 : kHalves ? kMostStages / 2 : kMostStages;
  static constexpr int kSlots = kThreeSlots || kIsWide ? 3 : kOneSlot ? 1 : 2 * kStages;
  // kAhead: how many tiles ahead of scoring the copy of a tile starts. kWaitsLate: whether the wait
  // for the copy is delayed until the tile is scored.
  static constexpr int kAhead = kIsLatent ? kSlots - 1 : kStages;
  static constexpr bool kWaitsLate = kThreeSlots || (kIsLatent && !kIsWide);
  static constexpr int kSharedBytes = kRing + kSlots * kTileBytes;  // followed by totals
  static constexpr int kBlocksPerSm = kIsWide ? 1 : kWantsThree && fits_three(kSlots) ? 3 : 2;

  // Layout of the running total of a sequence that one block owns: float4s of each thread, with the
  // thread as the innermost index. If kIsWide, the outputs of the chunk follow in the same layout.
  static constexpr int kChunkFloat4s = kRowTiles * (kOutTiles + 1);
  static constexpr int kTotalFloats =
      kThreads * 4 * (kChunkFloat4s + (kIsWide ? kRowTiles * kOutTiles : 0));
};

// Rows of a tile are permuted by XOR in shared memory, so that reading one 16-byte vector of eight
// rows hits all banks: vector v of a row is stored at v ^ twist(row).
template <int kVectors>
__device__ __forceinline__ int twist(int row) {
  static_assert(kVectors % 4 == 0);
  return kVectors % 8 == 0 ? row & 7 : (row >> 1) & 3;
}
// Returns the byte offset of a vector of a row.
template <int kVectors>
__device__ __forceinline__ int place_of(int row, int vector) {
  return (row * kVectors + (vector ^ twist<kVectors>(row))) * 16;
}

// Returns `x` as a value that the compiler cannot analyze. Without this, the compiler would keep
// every address derived from the thread index in registers for the whole kernel, and spill the
// states.
__device__ __forceinline__ int opaque(int x) {
  uint32_t word = x;
  ptx::forget(word);
  return static_cast<int>(word);
}
__device__ __forceinline__ unsigned thread_index() { return opaque(threadIdx.x); }

// Returns opaque(x), for use inside the loop over KV tiles; returns x itself in forms that have
// registers to spare.
template <typename Block>
__device__ __forceinline__ int opaque_in_loop(int x) {
  return Block::Shape::kSparesRegisters ? x : opaque(x);
}
template <typename Block>
__device__ __forceinline__ unsigned thread_index_in_loop() {
  return opaque_in_loop<Block>(threadIdx.x);
}

// Position of a lane's vector in a permuted row. The lane starts at vector 0 or 1, and the vectors
// 2, 4, .. after it are one XOR away; in long rows, vectors beyond a full permutation period are a
// constant away. The offset is opaque, so that one register serves all of these vectors instead of
// one register each.
template <int kVectors>
struct LanePlace {
  static constexpr bool kPowerOfTwo = (kVectors & (kVectors - 1)) == 0;
  static constexpr int kTurn = kVectors % 8 == 0 ? 8 : 4;
  int row, vector;

  __device__ __forceinline__ LanePlace(int at_row, int at_vector)
      : row(at_row * kVectors * 16),
        vector(opaque((at_vector ^ twist<kVectors>(at_row)) * 16 + (kPowerOfTwo ? row : 0))) {}

  __device__ __forceinline__ int after(int vectors) const {
    if constexpr (kPowerOfTwo) return vector ^ vectors * 16;
    return row + (vector ^ vectors % kTurn * 16) + vectors / kTurn * kTurn * 16;
  }
};

// ---- working set of a block ----

// Working set of an append_attention block on CUDA: its work item, cursor and shared memory. The
// functions of the other files take it as the argument `block`.

// Work of one block at a time: a tile of rows, the tokens to reduce for it, and the destination of
// the resulting state. It is stored in shared memory, because in registers it would displace the
// state of 64 rows.
struct WorkItem {
  Request request;
  int first_row;  // first packed row of the tile: query row * group + query head in its group
  int rows;
  int head;                  // KV head
  int low, high;             // range of tokens that any row of the tile sees
  int begin, end;            // range of this work item: whole leaves clipped to [low, high)
  int load_begin, load_end;  // range of tokens that are loaded
  // Some row of the tile does not see all tokens of the KV tiles that end after seen_end or begin
  // before seen_begin.
  int seen_begin, seen_end;
  bool many_queries;
  bool valid;  // false if there is nothing to do
  // A state in the workspace has [state_rows, value_dim] outputs, then [state_rows] pairs (m, l).
  // The tile's rows begin at state_row.
  int state_row, state_rows;
  int tile_rows;        // rows of the tile before narrow() reduced the item to one query
  float* state;         // nullptr: the work item finishes the sequence and writes to out
  int64_t leaf_stride;  // if not 0, every leaf has its own state, this many floats apart
  // Division of the sequence of this tile and head: each chunk before first_cut is one item, and
  // later chunks are split. first_tail is the index of chunk first_cut among all split chunks.
  int splits;    // nonempty splits of this item's chunk
  int arrivals;  // number of chunks of the sequence; 0: no block waits for this state
  // True if the sequence has few chunks and all are split. The splits then count one arrival at the
  // sequence, instead of one at the chunk and one at the sequence.
  bool meets_once;
  int first_cut, first_tail;
  int64_t batch_idx;
  int shared, first_chunk;  // the request's shared leaves; first chunk of its own leaves
  int sequences, sequence;  // number of sequences of the request; index of this sequence
  int counter;
  int chunk_float4, state_float4s;  // start of the request's chunk states, and their size
};

// Position of a block in the work items of a plan; in shared memory.
struct WorkCursor {
  int64_t first_request;
  int now, end;                 // work items; from tail_begin on they are splits of chunks
  int tail_begin;               // first work item that is a split
  int split_leaves;             // leaves per split of a chunk
  int counters, float4s, base;  // start values for the next plan
  int row_end;                  // end of the rows of all requests
};

// kExact = false is for a benchmark that measures the cost of exactness: a chunk is reduced in one
// state from end to end, without folding its leaves. Launch it with tail_chunks = 0 and without
// shared prefixes. The library does not instantiate it. kIsStamped records phase times
// (common/stamps.cuh).
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
  static constexpr int kScoreRowTiles = Shape::kScoreRowTiles;
  static constexpr int kScoreTiles = Shape::kScoreTiles;
  static constexpr int kStages = Shape::kStages;
  static constexpr int kLeaf = kExact ? kLeafTokens : kChunkTokens;
  static constexpr bool kStamped = kIsStamped;

  const AttentionLaunch& launch;
  const AppendAttentionParams& params;
  unsigned char* smem;
  Plan plan;
  WorkItem& item;
  WorkCursor& cursor;

  static_assert(sizeof(WorkItem) <= 256 && sizeof(WorkCursor) <= 48);

  __device__ __forceinline__ AttentionBlock(const AttentionLaunch& given)
      : launch(given),
        params(given.params),
        smem(shared_memory()),
        item(*reinterpret_cast<WorkItem*>(smem + Shape::kItem)),
        cursor(*reinterpret_cast<WorkCursor*>(smem + Shape::kCursor)) {
    int* ints = reinterpret_cast<int*>(smem + Shape::kPlan);
    plan = {
        ints, ints + kPlanned, ints + 2 * kPlanned, reinterpret_cast<int*>(smem + Shape::kScan)};
  }

  __device__ __forceinline__ int group() const { return launch.group; }
  __device__ __forceinline__ static int leaf_of(int tile) {
    return static_cast<int>(static_cast<unsigned>(tile) * kTile / kLeaf);
  }
  // Return the first and the last KV tile of the item.
  __device__ __forceinline__ int first_tile() const {
    return static_cast<int>(static_cast<unsigned>(item.begin) / kTile);
  }
  __device__ __forceinline__ int last_tile() const {
    return static_cast<int>(static_cast<unsigned>(item.end - 1) / kTile);
  }

  // Maps a packed row to its row of q and out (row and query head).
  __device__ __forceinline__ int64_t out_row_of(int row) const {
    int packed = item.first_row + row;
    int query = packed / group(), head = packed % group();
    return (int64_t{item.request.qo_begin} + query) * params.num_qo_heads + item.head * group() +
           head;
  }

  // Returns whether some row of the tile does not see some token of this KV tile.
  __device__ __forceinline__ bool partly_seen(int tile) const {
    return (tile + 1) * kTile > item.seen_end || tile * kTile < item.seen_begin;
  }

  // ---- shared memory ----

  __device__ __forceinline__ unsigned char* k_slot(int tile) const {
    int slot = tile & (kStages - 1);
    if constexpr (Shape::kIsLatent) slot = static_cast<unsigned>(tile) % Shape::kSlots;
    if constexpr (Shape::kThreeSlots) slot = static_cast<int>(2u * tile % 3);
    return smem + Shape::kRing + slot * Shape::kTileBytes;
  }
  __device__ __forceinline__ unsigned char* v_slot(int tile) const {
    if constexpr (Shape::kIsLatent || Shape::kOneSlot) return k_slot(tile);
    int slot = kStages + (tile & (kStages - 1));
    if constexpr (Shape::kThreeSlots) slot = static_cast<int>((2u * tile + 1) % 3);
    return smem + Shape::kRing + slot * Shape::kTileBytes;
  }

  // Returns the running maxima of a leaf after a tile, one per row. Double-buffered like
  // chunk_sums.
  __device__ __forceinline__ float* running(int tile) const {
    return reinterpret_cast<float*>(smem + Shape::kRunning) + (tile & 1) * Shape::kRows;
  }

  // Returns the factors by which a row's outputs are scaled before a tile is added; used if
  // kIsWide. They pass through memory, because the warps that hold the outputs are not the warps
  // that compute the scores.
  __device__ __forceinline__ float* rescales() const {
    return reinterpret_cast<float*>(smem + Shape::kRescales);
  }

  // Return the index of a warp among those that share the tokens of a tile, and the first row that
  // the warp scores.
  __device__ __forceinline__ static int token_warp(int warp) {
    return Shape::kIsWide ? warp % Shape::kTokenWarps : warp;
  }
  __device__ __forceinline__ static int first_score_row(int warp) {
    return Shape::kIsWide ? warp / Shape::kTokenWarps * 16 * kScoreRowTiles : 0;
  }

  // Returns the lanes' parts of a leaf's sums of weights: [2 * row tiles * parts, threads].
  __device__ __forceinline__ float* lane_sums() const {
    return reinterpret_cast<float*>(smem + Shape::kLaneSums);
  }

  // Returns m and l of each row of the chunk before leaf `leaf`. They are in shared memory, because
  // all threads of a row need the same values and registers are scarce. Double-buffered, so that a
  // thread may read while another one writes.
  __device__ __forceinline__ float2* chunk_sums(int leaf) const {
    return reinterpret_cast<float2*>(smem + Shape::kChunkSums) + (leaf & 1) * Shape::kRows;
  }

  __device__ __forceinline__ float4* total_of_block(int thread) const {
    float* base = launch.totals == nullptr
                      ? reinterpret_cast<float*>(smem + Shape::kSharedBytes)
                      : launch.totals + int64_t{blockIdx.x} * Shape::kTotalFloats;
    return reinterpret_cast<float4*>(base) + thread;
  }
  __device__ __forceinline__ float4* chunk_of_block(int thread) const {
    return reinterpret_cast<float4*>(launch.totals + int64_t{blockIdx.x} * Shape::kTotalFloats) +
           Shape::kChunkFloat4s * Shape::kThreads + thread;
  }
};

// ---- phase stamps ----

// These functions do something only in the append_attention kernel that records phase times.

using AttentionStamps = Stamps<AttentionPhase, kAttentionPhases>;
static_assert(AttentionStamps::kWords == kAttentionStampWords && sizeof(AttentionStamps) <= 32);

template <typename Block>
__device__ __forceinline__ AttentionStamps& stamps_of(const Block& block) {
  return *reinterpret_cast<AttentionStamps*>(block.smem + Block::Shape::kStamps);
}

template <typename Block>
__device__ __forceinline__ void begin_stamps(const Block& block) {
  if constexpr (Block::kStamped) stamps_of(block).begin(block.params.stamps);
}

// Attributes the time since the last stamp to `phase`.
template <typename Block>
__device__ __forceinline__ void stamp(const Block& block, AttentionPhase phase) {
  if constexpr (Block::kStamped) stamps_of(block).mark(phase);
}

template <typename Block>
__device__ __forceinline__ void end_stamps(const Block& block) {
  if constexpr (Block::kStamped) {
    stamp(block, AttentionPhase::kItem);
    stamps_of(block).end(block.params.stamps);
  }
}

}  // namespace specops
