// SPDX-License-Identifier: Apache-2.0
// Loads from memory in append_attention on the CPU: the queries of a unit, the page table, and K
// and V before the arithmetic needs them.
#pragma once

#include "attention/append_attention/cpu/block.h"

namespace specops::SPECOPS_ISA {
namespace {

// Sets up the rows of a unit and the addresses of their queries.
template <typename T, int D>
void load_queries(const AppendAttentionParams& params, const Unit& unit, UnitRows<T>& rows) {
  int64_t group = params.num_qo_heads / params.num_kv_heads;
  bool bundled = unit.members > 0;
  for (const Request* r = unit.request; rows.num_members < (bundled ? unit.members : 1); ++r) {
    if (bundled && !r->is_bundled) continue;
    int64_t first_row = bundled ? 0 : unit.first_row;
    int64_t num_rows = bundled ? r->qo_len : unit.num_rows;
    int64_t position = r->kv_len - r->qo_len + first_row;
    Member& member = rows.members[rows.num_members++];
    member.request = r;
    member.pages = params.kv_indices + params.kv_indptr[r->batch_idx];
    int64_t last_position = position + num_rows - 1;
    member.seen_end = seen_end(params, last_position, r->kv_len);
    member.end_leaf = bundled ? r->own_leaf : (member.seen_end - 1) / kLeafTokens + 1;
    member.first_seen = window_begin(params, position);
    member.all_see = window_begin(params, last_position);
    member.first_row = rows.count;
    member.rows = static_cast<int>(num_rows * group);
    for (int64_t row = r->qo_begin + first_row; row < r->qo_begin + first_row + num_rows; ++row) {
      for (int64_t i = 0; i < group; ++i, ++rows.count) {
        int64_t head = unit.first_head * group + i;
        rows.first_q[rows.count] =
            static_cast<const T*>(params.q) + row * params.q_stride + head * D;
        rows.positions[rows.count] = position;
        rows.ends[rows.count] = seen_end(params, position, r->kv_len);
        rows.out_rows[rows.count] = row * params.num_qo_heads + head;
      }
      ++position;
    }
  }
}

// Finds the addresses of a leaf's tokens, for the unit's first head. Blocks outside the range that
// the member's rows see may have no page.
template <typename T, int D>
void load_table(const AppendAttentionParams& params,
                const Unit& unit,
                const Member& member,
                int64_t base,
                LeafKv<T>& kv) {
  int page_bits = params.page_size == 16 ? 4 : params.page_size == 32 ? 5 : 6;
  kv.stride = kHeadStride<D> == 0 ? D : params.num_kv_heads * D;
  for (int block = 0; block < kLeafBlocks; ++block) {
    int64_t token = base + block * kPageBlock;
    bool used = token < member.seen_end && token + kPageBlock > member.first_seen;
    kv.k[block] = kv.v[block] = nullptr;
    if (!used) continue;
    int64_t page = member.pages[token >> page_bits];
    int64_t slot = (page << page_bits) + (token & (params.page_size - 1));
    int64_t offset = slot * kv.stride + unit.first_head * kHeadStride<D>;
    kv.k[block] = static_cast<const T*>(params.k_cache) + offset;
    kv.v[block] = static_cast<const T*>(params.v_cache) + offset;
  }
}

// Returns the cache lines of a leaf that a unit reads. All heads of a token are adjacent in memory;
// a latent cache has one head and no V.
template <typename T, int D>
LeafLines find_lines(const AppendAttentionParams& params, const Unit& unit, const LeafKv<T>& kv) {
  constexpr bool kIsLatent = kHeadStride<D> == 0;
  bool joined = kIsLatent || unit.num_heads == params.num_kv_heads;
  int64_t heads = kIsLatent ? 1 : unit.num_heads;
  LeafLines lines;
  lines.pieces = joined ? 1 : kPageBlock;
  lines.step = kv.stride * static_cast<int64_t>(sizeof(T));
  lines.bytes = (joined ? kPageBlock : 1) * heads * D * static_cast<int64_t>(sizeof(T));
  for (int block = 0; block < kLeafBlocks; ++block) {
    if (kv.k[block] == nullptr) continue;
    lines.blocks[lines.num_blocks++] = reinterpret_cast<const char*>(kv.k[block]);
    if (kIsLatent) continue;
    lines.blocks[lines.num_blocks++] = reinterpret_cast<const char*>(kv.v[block]);
  }
  return lines;
}

// Reads one leaf of K and V into L2, for all heads of the unit, before the arithmetic needs it.
// Reading one head with a stride of one token would never trigger the hardware prefetcher, and
// prefetch instructions are dropped when the miss buffers are full. All blocks are read side by
// side, so that while one stream starts a new page, the others hide its latency.
inline void load_leaf(const LeafLines& lines) {
  for (int64_t begin = 0; begin < lines.pieces * lines.step; begin += lines.step) {
    for (int64_t at = begin; at < begin + lines.bytes; at += LeafLines::kLine) {
      for (int block = 0; block < lines.num_blocks; ++block) {
        (void)*static_cast<const volatile char*>(lines.blocks[block] + at);
      }
    }
  }
}

// Plans the prefetch of the unit's next leaf, which begins at token `base`, to be spread over
// `places` calls of issue().
template <typename T, int D>
void plan_prefetch(const AppendAttentionParams& params,
                   const Unit& unit,
                   const Member& member,
                   int64_t base,
                   int64_t places,
                   LeafPrefetch& prefetch) {
  prefetch.clear();
  if (base > unit.last_leaf * kLeafTokens || base >= member.end_leaf * kLeafTokens) return;
  LeafKv<T> kv;
  load_table<T, D>(params, unit, member, base, kv);
  prefetch.begin(find_lines<T, D>(params, unit, kv), base, places);
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
