// SPDX-License-Identifier: Apache-2.0
// Working set of one append_attention thread on the CPU: its unit of work, the rows of that unit,
// and scratch memory.
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
constexpr int kLaneWords = kStateFloats;  // words for the queries of LaneQueries (one row per lane)

// Work that one thread does without interruption: one tile of a request's rows, or all rows of a
// bundle, for a range of KV heads and a range of leaves.
struct Unit {
  const Request* request;         // the unit's request, or the first member of its bundle
  int64_t members;                // number of members of the bundle; 0: the unit has one request
  int64_t first_row, num_rows;    // rows within the request, if the unit has only one
  int64_t first_head, num_heads;  // KV heads
  int64_t first_leaf, last_leaf;  // inclusive
  bool cold;                      // KV is read once and is probably not in this core's cache
  bool partial;                   // the unit's only chunk goes to the workspace, not to out
};

// Rows of one request in a unit.
struct Member {
  const Request* request;
  const int32_t* pages;
  int64_t seen_end, end_leaf;   // end of the tokens and of the leaves that the unit reads
  int64_t first_seen, all_see;  // first token that any row sees; first that all see
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

// Addresses of a leaf's tokens: four blocks of 16 tokens, all with the same token stride. Blocks
// that no row sees may be absent.
template <typename T>
struct LeafKv {
  const T* k[kLeafBlocks];
  const T* v[kLeafBlocks];
  int64_t stride;
};

// Visibility of a leaf's tokens: row r sees the tokens [lo[r], hi[r]) except those with a bit in
// hidden[r]. lo and hi do not decrease with r.
struct LeafView {
  int lo[kMaxBundle], hi[kMaxBundle];
  uint64_t hidden[kMaxBundle];
  bool whole;  // all rows see all tokens
};

// The rows of one tile at one leaf, and which tokens they see.
template <typename T>
struct Tile {
  const T* q[kMaxTile];
  const int* lo;
  const int* hi;
  const uint64_t* hidden;
  int rows;
};

// Scratch memory of a thread: scores and weights of a tile at one leaf, and two states of a unit's
// rows, one for the current chunk and one for the chunks before it. kWidth: head_dim of the widest
// compiled head.
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
  // For 8-bit caches: the widened elements of a block of K and of a leaf of V, for one head, and
  // the scales of the leaf.
  alignas(64) T wide_k[kPageBlock * kWidth];
  alignas(64) T wide_v[kLeafTokens * kWidth];
  alignas(64) float k_scales[kLeafTokens];
  alignas(64) float v_scales[kLeafTokens];
  LeafPrefetch prefetch;
};

template <typename T, int D>
using Scratch = ScratchMemory<T, (D > kMaxHeadDim ? D : kMaxHeadDim)>;

// Scratch memory is allocated once per thread and head width, at the thread's first leaf.
// thread_local arrays of this size would be zeroed in every thread that loads the module.
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
