// SPDX-License-Identifier: Apache-2.0
// Working set of an append_attention thread on the CPU: its unit of work, the unit's rows and its
// scratch memory.
#pragma once

#include <cstdlib>

#include "attention/append_attention/cpu/element.h"
#include "attention/append_attention/cpu/plan.h"
#include "attention/append_attention/cpu/prefetch.h"

namespace specops::SPECOPS_ISA {
namespace {

constexpr int kLeafBlocks = kLeafTokens / kPageBlock;
constexpr int kMaxHeadDim = 256;
constexpr int kMaxUnitRows = kStateFloats / 64;
constexpr int kLaneWords = kStateFloats;  // words for queries with a row per lane

// The work of one thread at a time: a tile of one request's rows or all rows of a bundle, for some
// KV heads and some chunks.
struct Unit {
  const Request* request;         // the request, or the first member of a bundle
  int64_t members;                // members of the bundle; 0: the request alone
  int64_t first_row, num_rows;    // rows within the request, if it is alone
  int64_t first_head, num_heads;  // KV heads
  int64_t first_leaf, last_leaf;  // inclusive
  bool cold;                      // KV is read once, and probably not in this core's cache
  bool partial;                   // the unit's only chunk goes to the workspace, not to out
};

// Rows of one request in a unit.
struct Member {
  const Request* request;
  const int32_t* pages;
  int64_t seen_end, end_leaf;   // the unit does not read leaves from end_leaf on
  int64_t first_seen, all_see;  // first position that any row sees; from which all rows see
  int first_row, rows;          // packed rows (query row, query head of one KV head) in the unit
};

// Rows of a unit, request by request.
template <typename T>
struct UnitRows {
  Member members[kMaxBundle];
  const T* first_q[kMaxBundle];  // for the unit's first head
  int64_t positions[kMaxBundle], out_rows[kMaxBundle];
  int64_t ends[kMaxBundle];  // end of the positions that each row sees
  int num_members = 0;
  int count = 0;
};

// Tokens of a leaf: four blocks of 16, each with the same token stride. Blocks that no row sees may
// be absent.
template <typename T>
struct LeafKv {
  const T* k[kLeafBlocks];
  const T* v[kLeafBlocks];
  int64_t stride;
};

// Visibility of a leaf: row r sees the tokens [lo[r], hi[r]) except those with a bit in hidden[r];
// lo and hi grow with r.
struct LeafView {
  int lo[kMaxBundle], hi[kMaxBundle];
  uint64_t hidden[kMaxBundle];
  bool whole;  // all rows see all tokens
};

// Rows of one tile at one leaf, and the tokens they see.
template <typename T>
struct Tile {
  const T* q[kMaxTile];
  const int* lo;
  const int* hi;
  const uint64_t* hidden;
  int rows;
};

// Scratch memory of a thread: scores and weights of a tile at one leaf, and two states of a unit's
// rows, for the current chunk and for the chunks before it. kWidth: width of the widest head.
template <typename T, int kWidth>
struct ScratchMemory {
  alignas(64) float scores[kMaxTile * kLeafTokens];
  alignas(64) typename Element<T>::Prob probs[kMaxTile * kLeafTokens];
  alignas(64) float leaf_o[kMaxTile * kWidth];
  alignas(64) float wide_q[kMaxTile * kWidth];
  alignas(64) float states[2][kStateFloats];
  float leaf_m[kMaxTile], leaf_l[kMaxTile];
  float m[2][kMaxUnitRows], l[2][kMaxUnitRows];
  alignas(64) T packed_k[kPageBlock * kWidth];
  alignas(64) T packed_v[kLeafTokens * kWidth];
  alignas(64) uint32_t lane_q[kLaneWords];
  // 8-bit caches: widened block of K and leaf of V of one head, and the leaf's scales.
  alignas(64) T wide_k[kPageBlock * kWidth];
  alignas(64) T wide_v[kLeafTokens * kWidth];
  alignas(64) float k_scales[kLeafTokens];
  alignas(64) float v_scales[kLeafTokens];
  LeafPrefetch prefetch;
};

template <typename T, int D>
using Scratch = ScratchMemory<T, (D > kMaxHeadDim ? D : kMaxHeadDim)>;

// One block per thread and width, allocated at the thread's first leaf: thread_local arrays of this
// size would be zeroed in every thread that loads the module.
struct Arena {
  void* memory = nullptr;
  ~Arena() { std::free(memory); }
};
template <size_t kBytes>
thread_local Arena arena;

template <typename T, int D>
Scratch<T, D>& scratch() {
  constexpr size_t kBytes = sizeof(Scratch<float, D>);
  static_assert(sizeof(Scratch<T, D>) <= kBytes);
  void*& memory = arena<kBytes>.memory;
  if (memory == nullptr) memory = std::aligned_alloc(64, kBytes);
  return *static_cast<Scratch<T, D>*>(memory);
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
