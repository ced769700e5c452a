// SPDX-License-Identifier: Apache-2.0
// Where a block of append_attention on CUDA has what in shared memory, and how the rows of a tile
// lie there.
#pragma once

#include "attention/attention_plan.cuh"
#include "attention/kv_element.h"
#include "common/device.cuh"

namespace specops {

// Tiles of 16 rows at once: as many as let all fit 99 KiB, and no more than the bandwidth of memory
// needs. Kernels for fewer rows have half as many, down to one.
template <typename T, int kHeadDim>
constexpr int kMostRowTiles = kHeadDim * sizeof(T) > 512                     ? 1
                              : sizeof(T) == 4 || kHeadDim * sizeof(T) > 256 ? 2
                                                                             : 4;

// What an SM has for blocks, each of which takes 1 KiB beside what it asks for (sm_90, sm_100).
constexpr int kSmSharedBytes = 228 << 10, kBlockSharedBytes = 1 << 10;

// Sizes that follow from the element type, that of the caches, and head_dim. A tile lies in shared
// memory as it does in the cache; elements of 8-bit caches are widened to T in registers.
template <typename T, int kHeadDim, int kTiles, typename Cache = T>
struct AttentionShape {
  static constexpr bool kScaled = kIsScaled<Cache>;
  static constexpr bool kIsLatent = kHeadDim == kLatentKeyDim;  // a tile of K is that of V as well
  static constexpr int kValueDim = static_cast<int>(value_dim_of(kHeadDim));
  static constexpr int kQueryBytes = kHeadDim * static_cast<int>(sizeof(T));  // of a row
  static constexpr int kQueryVectors = kQueryBytes / 16;
  static constexpr int kTile = kQueryBytes <= 256 ? 64 : 32;  // tokens
  static constexpr int kRowTiles = kTiles;
  static constexpr int kRows = 16 * kRowTiles;
  // Whether the loop over tiles of KV has registers for its addresses beside the states.
  static constexpr bool kSparesRegisters = kRowTiles == 1 && kHeadDim != 256;
  static constexpr int kScoreTiles = kTile / kAttentionWarps / 8;    // of 8 tokens, per warp
  static constexpr int kOutTiles = kValueDim / kAttentionWarps / 8;  // of 8 columns, per warp
  // A token of a tile: vectors of 16 bytes that it fills, and places that it has for them.
  static constexpr int kCacheBytes = kHeadDim * static_cast<int>(sizeof(Cache));
  static constexpr int kFilled = kCacheBytes / 16;
  static constexpr int kVectors = (kFilled + 3) / 4 * 4;
  static constexpr int kRowBytes = kVectors * 16;
  static constexpr int kTileBytes = kTile * kRowBytes;
  // Threads that copy one row of a tile, and rows that all copy at once.
  static constexpr int kCopyLanes = kVectors % 16 == 0 ? 16 : kVectors % 8 == 0 ? 8 : 4;
  static constexpr int kCopyRows = kAttentionThreads / kCopyLanes;
  static constexpr int kProbVectors = kTile * static_cast<int>(sizeof(T)) / 16;
  static constexpr int kTilesPerChunk = kChunkTokens / kTile;

  // Shared memory.
  static constexpr int kQueries = 0;
  static constexpr int kProbs = kQueries + kRows * kQueryBytes;
  static constexpr int kMaxima = kProbs + kRows * kProbVectors * 16;  // float [kRows, warps]
  static constexpr int kSums = kMaxima + kRows * kAttentionWarps * 4;
  static constexpr int kRunning = kSums + kRows * kAttentionWarps * 4;  // float [2, kRows]
  static constexpr int kLaneSums = kRunning + 2 * kRows * 4;
  static constexpr int kChunkSums = kLaneSums + 2 * kRowTiles * kAttentionThreads * 4;
  // float2 [2, kRows]
  static constexpr int kSeen = kChunkSums + 2 * kRows * 8;     // int2 [kRows]
  static constexpr int kTable = kSeen + kRows * 8;             // int [2, kChunkBlocks]
  static constexpr int kPlan = kTable + 2 * kChunkBlocks * 4;  // int [3, kPlanned]
  static constexpr int kScan = kPlan + 3 * kPlanned * 4;       // int [8]
  static constexpr int kUnit = kScan + 32;
  static constexpr int kTurns = kUnit + 256;
  static constexpr int kStamps = kTurns + 48;  // of the stamped kernel, where others have a gap
  static constexpr int kRing = (kStamps + 32 + 127) / 128 * 128;  // tiles of K and V

  // Whether an SM has the shared memory for three blocks with so many tiles in their rings.
  static constexpr bool fits_three(int tiles) {
    return 3 * (kRing + tiles * kTileBytes + kBlockSharedBytes) <= kSmSharedBytes;
  }
  // Three blocks hide more latency than two, where there are registers for three.
  static constexpr bool kWantsThree =
      kRowTiles == 1 || (kRowTiles == 2 && sizeof(T) == 2 && kHeadDim <= 128);
  // The ring has kStages tiles of K, then as many of V; where that is too much for three blocks, half
  // as many, or three slots that K and V take in turns. Latents take two in turns.
  static constexpr int kMostStages = kTileBytes <= 8 << 10 ? 4 : kTileBytes <= 16 << 10 ? 2 : 1;
  static constexpr bool kHalves =
      kWantsThree && !fits_three(2 * kMostStages) && kMostStages == 4 && fits_three(4);
  static constexpr bool kThreeSlots =
      kWantsThree && !fits_three(2 * kMostStages) && kMostStages == 2 && fits_three(3);
  static constexpr int kStages = kThreeSlots ? 1 : kHalves ? kMostStages / 2 : kMostStages;
  static constexpr int kSlots = kThreeSlots ? 3 : 2 * kStages;
  static constexpr int kSharedBytes = kRing + kSlots * kTileBytes;  // then totals
  static constexpr int kBlocksPerSm = kWantsThree && fits_three(kSlots) ? 3 : 2;

  // The running total of a sequence that one block owns: thread-private float4, thread innermost.
  static constexpr int kTotalFloats = kAttentionThreads * 4 * kRowTiles * (kOutTiles + 1);
};

// Rows of a tile in shared memory are rotated by XOR, so that eight rows read at one vector of 16
// bytes hit all banks: vector v of a row lies at v ^ twist(row).
template <int kVectors>
__device__ __forceinline__ int twist(int row) {
  static_assert(kVectors % 4 == 0);
  return kVectors % 8 == 0 ? row & 7 : (row >> 1) & 3;
}
// Its offset in bytes.
template <int kVectors>
__device__ __forceinline__ int place_of(int row, int vector) {
  return (row * kVectors + (vector ^ twist<kVectors>(row))) * 16;
}

// `x`, of which the compiler then knows nothing: it would else keep every address that follows from
// a thread's index in registers all along, and spill the states.
__device__ __forceinline__ int opaque(int x) {
  uint32_t word = x;
  ptx::forget(word);
  return static_cast<int>(word);
}
__device__ __forceinline__ unsigned thread_index() { return opaque(threadIdx.x); }

// The same in the loop over the tiles of KV, where a form has no registers to spare.
template <typename Block>
__device__ __forceinline__ int opaque_in_loop(int x) {
  return Block::Shape::kSparesRegisters ? x : opaque(x);
}
template <typename Block>
__device__ __forceinline__ unsigned thread_index_in_loop() {
  return opaque_in_loop<Block>(threadIdx.x);
}

// The place of a lane's row, from which the vectors 2, 4, .. after its own are one XOR away: lanes
// begin at vector 0 or 1.
template <int kVectors>
struct LanePlace {
  static constexpr bool kPowerOfTwo = (kVectors & (kVectors - 1)) == 0;
  int row, vector;

  __device__ __forceinline__ LanePlace(int at_row, int at_vector)
      : row(at_row * kVectors * 16),
        vector(opaque((at_vector ^ twist<kVectors>(at_row)) * 16 + (kPowerOfTwo ? row : 0))) {}

  __device__ __forceinline__ int after(int vectors) const {
    return kPowerOfTwo ? vector ^ vectors * 16 : row + (vector ^ vectors * 16);
  }
};

}  // namespace specops
