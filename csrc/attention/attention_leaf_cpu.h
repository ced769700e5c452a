// SPDX-License-Identifier: Apache-2.0
// A leaf of the rows of a unit, and the end of a chunk, in append_attention on the CPU: folds of
// states, in the one order there is.
#pragma once

#include <type_traits>

#include "attention/attention_fold_cpu.h"
#include "attention/attention_loads_cpu.h"
#include "attention/attention_tile_cpu.h"

namespace specops::SPECOPS_ISA {
namespace {

// Which tokens of a leaf the mask hides from a row of out.
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

// chunk = chunk, then one leaf, of the rows [first, last), which all read it from where this member
// does. `chunk`: which of the scratch states. kScaled: the caches are of 8 bits.
template <typename T, int D, bool kScaled>
void fold_leaf(const AppendAttentionParams& params,
               const Unit& unit,
               const UnitRows<T>& rows,
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
  LeafKv<T> head_kv;
  [[maybe_unused]] RawHead raw;
  Tile<T> tile;
  load_table<Stored, D>(params, unit, member, base, kv);
  if (unit.cold) {
    if (first == 0 && own.prefetch.is_of(base)) {
      own.prefetch.load_rest();
    } else {
      load_leaf(find_lines<Stored, D>(params, unit, kv));
    }
    // Not of wider elements: their arithmetic is shorter than their way from memory, which several
    // threads then use less well than in one go.
    if (kScaled && first == 0) {
      int64_t places = unit.num_heads * prefetch_places(last - first);
      plan_prefetch<Stored, D>(params, unit, member, base + kLeafTokens, places, own.prefetch);
    }
  }
  head_kv.stride = kScaled ? D : kv.stride;
  int tile_rows = last - first <= kMaxTile ? last - first : kWholeTile;
  for (int64_t head = 0; head < unit.num_heads; ++head) {
    if constexpr (kScaled) load_raw_head<T, D>(params, kv, head, raw, own);
    for (int block = 0; block < kLeafBlocks; ++block) {
      if constexpr (kScaled) {
        head_kv.k[block] = nullptr;
        head_kv.v[block] = own.wide_v + block * kPageBlock * D;
      } else {
        head_kv.k[block] = kv.k[block] == nullptr ? nullptr : kv.k[block] + head * kHeadStride<D>;
        head_kv.v[block] = kv.v[block] == nullptr ? nullptr : kv.v[block] + head * kHeadStride<D>;
      }
    }
    for (int begin = first; begin < last; begin += tile_rows) {
      tile.rows = last - begin < tile_rows ? last - begin : tile_rows;
      int64_t at = head * rows.count + begin;
      float* m = own.m[chunk] + at;
      float* l = own.l[chunk] + at;
      float* o = own.states[chunk] + at * kColumns;
      float* dst[kMaxTile];
      for (int row = 0; row < tile.rows; ++row) {
        int64_t seen = window_begin(params, rows.positions[begin + row]);
        int64_t end = rows.ends[begin + row] - base;
        tile.lo[row] = static_cast<int>(seen > base ? seen - base : 0);
        tile.hi[row] = static_cast<int>(end < kLeafTokens ? end : kLeafTokens);
        tile.hidden[row] = hidden_tokens(params, *member.request, rows.out_rows[begin + row], base);
        tile.q[row] = rows.first_q[begin + row] + head * group * D;
        dst[row] = (l[row] == 0.0f ? o : own.leaf_o) + row * kColumns;
      }
      reduce_leaf<T, D, kScaled>(
          tile, head_kv, raw, params.sm_scale, own.leaf_m, own.leaf_l, dst, own);
      fold(m, l, o, own.leaf_m, own.leaf_l, dst, tile.rows, kColumns);
    }
  }
}

// result = result, then the chunk.
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
