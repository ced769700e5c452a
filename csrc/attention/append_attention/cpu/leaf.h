// SPDX-License-Identifier: Apache-2.0
// Processing of one leaf for the rows of a unit, and of the end of a chunk, in append_attention on
// the CPU. States are folded in a fixed order.
#pragma once

#include <type_traits>

#include "attention/append_attention/cpu/fold.h"
#include "attention/append_attention/cpu/lanes.h"
#include "attention/append_attention/cpu/loads.h"
#include "attention/append_attention/cpu/tile.h"

namespace specops::SPECOPS_ISA {
namespace {

// Returns a bit mask of the tokens of a leaf that the attention mask hides from row `out_row` of
// the output.
inline uint64_t hidden_tokens(const AppendAttentionParams& params,
                              const Request& request,
                              int64_t out_row,
                              int64_t base) {
  if (params.mask == nullptr) return 0;
  int64_t row = out_row / params.num_qo_heads;
  int64_t begin = mask_begin(params, request.batch_idx, request.kv_len - request.qo_len);
  uint64_t hidden = 0;
  for (int token = 0; token < kLeafTokens && begin < base + kLeafTokens; ++token) {
    hidden |= uint64_t{!mask_allows(params, row, base + token - begin)} << token;
  }
  return hidden;
}

// Computes which tokens the rows [first, last) see of the leaf that begins at token `base`.
template <typename T>
void load_view(const AppendAttentionParams& params,
               const UnitRows<T>& rows,
               const Request& request,
               int64_t base,
               int first,
               int last,
               LeafView& view) {
  view.whole = true;
  for (int row = first; row < last; ++row) {
    int64_t seen = window_begin(params, rows.positions[row]);
    int64_t end = rows.ends[row] - base;
    view.lo[row] = static_cast<int>(seen > base ? seen - base : 0);
    view.hi[row] = static_cast<int>(end < kLeafTokens ? end : kLeafTokens);
    view.hidden[row] = hidden_tokens(params, request, rows.out_rows[row], base);
    bool all = view.lo[row] == 0 && view.hi[row] == kLeafTokens && view.hidden[row] == 0;
    view.whole = view.whole && all;
  }
}

// Loads a leaf of the unit into L2 and plans the prefetch of the next leaf, to be spread over the
// arithmetic of `rows` rows.
template <typename T, int D, typename Stored>
void read_leaf(const AppendAttentionParams& params,
               const Unit& unit,
               const Member& member,
               const LeafKv<Stored>& kv,
               int64_t base,
               int rows,
               bool in_lanes,
               LeafPrefetch& prefetch) {
  bool is_first = member.first_row == 0;
  if (is_first && prefetch.is_of(base)) {
    prefetch.load_rest();
  } else {
    load_leaf(find_lines<Stored, D>(params, unit, kv));
  }
  // Prefetch only if the arithmetic takes longer than the memory transfer. It does not for 16-bit
  // or 32-bit elements with few rows: there, with several threads, spread prefetches use memory
  // bandwidth worse than one burst.
  bool has_time = in_lanes || !std::is_same_v<T, Stored>;
  if (!is_first || !has_time) return;
  int64_t places = in_lanes ? lane_places<D>(rows) : prefetch_places(rows);
  plan_prefetch<Stored, D>(
      params, unit, member, base + kLeafTokens, unit.num_heads * places, prefetch);
}

// Returns one head of a leaf. For 8-bit caches, v points to the buffer in which V will be widened.
template <typename T, int D, typename Stored>
LeafKv<T> head_of(const LeafKv<Stored>& kv, int64_t head, Scratch<T, D>& own) {
  LeafKv<T> out{};
  out.stride = std::is_same_v<T, Stored> ? kv.stride : D;
  for (int block = 0; block < kLeafBlocks; ++block) {
    if constexpr (!std::is_same_v<T, Stored>) {
      out.v[block] = own.wide_v + block * kPageBlock * D;
    } else if (kv.k[block] != nullptr) {
      out.k[block] = kv.k[block] + head * kHeadStride<D>;
      out.v[block] = kv.v[block] + head * kHeadStride<D>;
    }
  }
  return out;
}

// Folds one leaf into the chunk state of the rows [first, last), all of which read it from the
// pages of `member`. `chunk`: index of the scratch state of the chunk. kScaled: 8-bit caches.
template <typename T, int D, bool kScaled>
void fold_leaf(const AppendAttentionParams& params,
               const Unit& unit,
               const UnitRows<T>& rows,
               const LaneQueries& queries,
               const Member& member,
               int64_t base,
               int first,
               int last,
               int chunk,
               Scratch<T, D>& own) {
  constexpr int kColumns = kValueDim<D>;
  int64_t group = params.num_qo_heads / params.num_kv_heads;
  using Stored = std::conditional_t<kScaled, uint8_t, T>;
  LeafKv<Stored> kv;
  load_table<Stored, D>(params, unit, member, base, kv);
  LeafView view;
  load_view(params, rows, *member.request, base, first, last, view);
  bool in_lanes = queries.are_for(view, last - first);
  if (unit.cold) {
    read_leaf<T, D>(params, unit, member, kv, base, last - first, in_lanes, own.prefetch);
  }
  for (int64_t head = 0; head < unit.num_heads; ++head) {
    [[maybe_unused]] RawHead raw;
    if constexpr (kScaled) load_raw_head<T, D>(params, kv, head, raw, own);
    LeafKv<T> head_kv = head_of<T, D>(kv, head, own);
    for (int begin = first; begin < last; begin += kMaxTile) {
      int count = last - begin < kMaxTile ? last - begin : kMaxTile;
      int64_t at = head * rows.count + begin;
      float* m = own.m[chunk] + at;
      float* l = own.l[chunk] + at;
      float* o = own.states[chunk] + at * kColumns;
      if constexpr (kHasLanes<T>) {
        if (queries.are_for(view, count)) {
          const uint32_t* q = queries.words + head * D / 2 * queries.stride + begin;
          fold_lanes<T, D, kScaled>(
              q, queries.stride, count, head_kv, raw, params.sm_scale, m, l, o, own);
          continue;
        }
      }
      Tile<T> tile;
      tile.lo = view.lo + begin;
      tile.hi = view.hi + begin;
      tile.hidden = view.hidden + begin;
      tile.rows = count;
      float* dst[kMaxTile];
      for (int row = 0; row < count; ++row) {
        tile.q[row] = rows.first_q[begin + row] + head * group * D;
        dst[row] = (l[row] == 0.0f ? o : own.leaf_o) + row * kColumns;
      }
      reduce_leaf<T, D, kScaled>(
          tile, head_kv, raw, params.sm_scale, own.leaf_m, own.leaf_l, dst, own);
      fold(m, l, o, own.leaf_m, own.leaf_l, dst, count, kColumns);
    }
  }
}

// Folds the state of the chunk into the state of the result.
template <typename T, int D>
void fold_chunk(int64_t unit_rows, int result, int chunk, Scratch<T, D>& own) {
  constexpr int kColumns = kValueDim<D>;
  for (int64_t row = 0; row < unit_rows; row += kMaxTile) {
    int count = static_cast<int>(unit_rows - row < kMaxTile ? unit_rows - row : kMaxTile);
    float* src[kMaxTile];
    for (int i = 0; i < count; ++i) src[i] = own.states[chunk] + (row + i) * kColumns;
    fold(own.m[result] + row,
         own.l[result] + row,
         own.states[result] + row * kColumns,
         own.m[chunk] + row,
         own.l[chunk] + row,
         src,
         count,
         kColumns);
  }
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
