// SPDX-License-Identifier: Apache-2.0
// What a thread of append_attention on the CPU works with: its unit of work, the rows of it, its
// memory.
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
constexpr int kLaneWords = kStateFloats;  // of queries with a row per lane

// What one thread computes at a time: a tile of one request's rows or all rows of a bundle, some KV
// heads, some chunks.
struct Unit {
  const Request* request;         // or the first member of a bundle
  int64_t members;                // of the bundle; 0: the request alone
  int64_t first_row, num_rows;    // within the request, if it is alone
  int64_t first_head, num_heads;  // KV heads
  int64_t first_leaf, last_leaf;  // inclusive
  bool cold;                      // KV is read once, and not expected in this core's cache
  bool partial;                   // the unit's one chunk goes to the workspace, not to out
};

// A request's rows in a unit.
struct Member {
  const Request* request;
  const int32_t* pages;
  int64_t seen_end, end_leaf;   // leaves from end_leaf on are none of this unit's
  int64_t first_seen, all_see;  // first position that any row sees, that all rows see
  int first_row, rows;          // (query row, query head of one KV head), in the unit
};

// The rows of a unit, request by request.
template <typename T>
struct UnitRows {
  Member members[kMaxBundle];
  const T* first_q[kMaxBundle];  // of the unit's first head
  int64_t positions[kMaxBundle], out_rows[kMaxBundle];
  int64_t ends[kMaxBundle];  // of what each sees
  int num_members = 0;
  int count = 0;
};

// The leaf's tokens: four blocks of 16, each at one token stride. A block nobody sees may be absent.
template <typename T>
struct LeafKv {
  const T* k[kLeafBlocks];
  const T* v[kLeafBlocks];
  int64_t stride;
};

// What the rows of a unit see of a leaf: row r the tokens [lo[r], hi[r]) but for those of the bits
// hidden[r]; lo and hi grow with r.
struct LeafView {
  int lo[kMaxBundle], hi[kMaxBundle];
  uint64_t hidden[kMaxBundle];
  bool whole;  // all rows see all tokens
};

// Rows of one tile at one leaf, and what they see of it.
template <typename T>
struct Tile {
  const T* q[kMaxTile];
  const int* lo;
  const int* hi;
  const uint64_t* hidden;
  int rows;
};

// A thread's memory: the scores and weights of a tile at one leaf, and the states of a unit's rows,
// one of the chunk at hand and one of the chunks before it. kWidth: of the widest head.
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
  // Of 8-bit caches: a block of K, a leaf of V, and its scales, of one head.
  alignas(64) T wide_k[kPageBlock * kWidth];
  alignas(64) T wide_v[kLeafTokens * kWidth];
  alignas(64) float k_scales[kLeafTokens];
  alignas(64) float v_scales[kLeafTokens];
  LeafPrefetch prefetch;
};

template <typename T, int D>
using Scratch = ScratchMemory<T, (D > kMaxHeadDim ? D : kMaxHeadDim)>;

// One block per thread and width, made at its first leaf: thread_local arrays of this size would be
// zeroed in every thread that loads the module.
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
