// SPDX-License-Identifier: Apache-2.0
// Requests of append_attention on the CPU that several units reduce. The states of their chunks are
// stored in the workspace; a later unit continues from them, or they are folded at the end.
#pragma once

#include "attention/append_attention/cpu/fold.h"
#include "attention/append_attention/cpu/results.h"
#include "common/parallel.h"

namespace specops::SPECOPS_ISA {
namespace {

// Loads the states that a bundle stored for a request, before the request's own leaves are reduced.
// `result` gets the fold of the complete chunks; `chunk` gets the state of the incomplete chunk
// that the unit continues. A unit that covers a single chunk skips the complete ones. Returns
// whether `result` holds anything.
template <typename T, int D>
bool load_states(const AppendAttentionParams& params,
                 const Unit& unit,
                 const UnitRows<T>& rows,
                 int result,
                 int chunk,
                 Scratch<T, D>& own) {
  constexpr int kColumns = kValueDim<D>;
  const Request& r = *unit.request;
  if (unit.members > 0 || unit.first_leaf != r.own_leaf || r.own_leaf == r.first_leaf) return false;
  int64_t all = r.rows * params.num_kv_heads, floats = all * (kColumns + 2);
  int64_t first_chunk = r.first_leaf / kChunkLeaves, own_chunk = r.own_leaf / kChunkLeaves;
  bool goes_on = r.own_leaf % kChunkLeaves != 0;
  for (int64_t at = unit.partial ? own_chunk : first_chunk; at < own_chunk + goes_on; ++at) {
    float* state = params.workspace + r.partial + (at - first_chunk) * floats;
    int into = at < own_chunk ? result : chunk;
    for (int64_t head = 0; head < unit.num_heads; ++head) {
      int64_t src = (unit.first_head + head) * r.rows, dst = head * rows.count;
      float* row_states[kMaxTile];
      for (int row = 0; row < rows.count; ++row) {
        row_states[row] = state + 2 * all + (src + row) * kColumns;
      }
      fold(own.m[into] + dst,
           own.l[into] + dst,
           own.states[into] + dst * kColumns,
           state + src,
           state + all + src,
           row_states,
           rows.count,
           kColumns);
    }
  }
  return !unit.partial && own_chunk > first_chunk;
}

// Folds the chunk states of the rows [begin, end) of one split request; at most kLanes rows.
template <typename T, int D>
void finish_rows(const AppendAttentionParams& params,
                 const Request& request,
                 int64_t begin,
                 int64_t end) {
  constexpr int kColumns = kValueDim<D>;
  Scratch<T, D>& own = scratch<T, D>();
  int64_t group = params.num_qo_heads / params.num_kv_heads;
  int64_t rows = request.qo_len * params.num_qo_heads;
  int count = static_cast<int>(end - begin);
  for (int i = 0; i < count; ++i) own.l[0][i] = 0.0f;
  for (int64_t chunk = 0; chunk < chunks_of(request); ++chunk) {
    float* state = params.workspace + request.partial + chunk * rows * (kColumns + 2);
    float* src[kLanes];
    for (int i = 0; i < count; ++i) src[i] = state + 2 * rows + (begin + i) * kColumns;
    fold(own.m[0],
         own.l[0],
         own.states[0],
         state + begin,
         state + rows + begin,
         src,
         count,
         kColumns);
  }
  int64_t tile_rows = request.qo_len * group;
  for (int i = 0; i < count; ++i) {
    int64_t head = (begin + i) / tile_rows, local = (begin + i) % tile_rows;
    int64_t qo_row = request.qo_begin + local / group;
    write_row<T, D>(params,
                    qo_row * params.num_qo_heads + head * group + local % group,
                    own.m[0][i],
                    own.l[0][i],
                    own.states[0] + static_cast<int64_t>(i) * kColumns);
  }
}

// Folds the chunk states of all rows of a split request.
template <typename T, int D>
void finish_sequence(const AppendAttentionParams& params, const Request& request) {
  int64_t rows = request.qo_len * params.num_qo_heads;
  int64_t pieces = (rows + kLanes - 1) / kLanes;
  int64_t grain = 65536 / (chunks_of(request) * kLanes * D) + 1;
  parallel_for(pieces, grain, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      int64_t last = (piece + 1) * kLanes < rows ? (piece + 1) * kLanes : rows;
      finish_rows<T, D>(params, request, piece * kLanes, last);
    }
  });
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
