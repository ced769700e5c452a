// SPDX-License-Identifier: Apache-2.0
// Requests that several units of append_attention on the CPU reduce: the fold of their chunks'
// states, which lie in the workspace.
#pragma once

#include "attention/attention_fold_cpu.h"
#include "attention/attention_results_cpu.h"
#include "common/parallel.h"

namespace specops::SPECOPS_ISA {
namespace {

// Folds the chunk states of one split request's rows [begin, end), at most kLanes of them.
template <typename T, int D>
void finish_rows(const AppendAttentionParams& params,
                 const Request& request,
                 int64_t begin,
                 int64_t end) {
  Scratch<T>& own = scratch<T>();
  int64_t group = params.num_qo_heads / params.num_kv_heads;
  int64_t rows = request.qo_len * params.num_qo_heads;
  int count = static_cast<int>(end - begin);
  for (int i = 0; i < count; ++i) own.l[0][i] = 0.0f;
  for (int64_t chunk = 0; chunk < chunks_of(request); ++chunk) {
    float* state = params.workspace + request.partial + chunk * rows * (D + 2);
    float* src[kLanes];
    for (int i = 0; i < count; ++i) src[i] = state + 2 * rows + (begin + i) * D;
    fold(own.m[0], own.l[0], own.states[0], state + begin, state + rows + begin, src, count, D);
  }
  int64_t tile_rows = request.qo_len * group;
  for (int i = 0; i < count; ++i) {
    int64_t head = (begin + i) / tile_rows, local = (begin + i) % tile_rows;
    int64_t qo_row = request.qo_begin + local / group;
    write_row<T, D>(params,
                    qo_row * params.num_qo_heads + head * group + local % group,
                    own.m[0][i],
                    own.l[0][i],
                    own.states[0] + static_cast<int64_t>(i) * D);
  }
}

// All rows of a split request.
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
