// SPDX-License-Identifier: Apache-2.0
// Division of the output of linear into ranges that threads take one after another.
#pragma once

#include "common/parallel.h"
#include "dense/linear.h"
#include "gemm/gemm_range.h"
#include "gemm/integer_tile_cpu.h"

namespace specops::SPECOPS_ISA {
namespace {

// Number of ranges of columns (blocks or panels) and of rows; rows are divided only if there are
// too few columns. Work that is too small to wake a thread gets one range, small work one per
// thread, and large work several per thread.
struct Ranges {
  int64_t columns, rows;

  Ranges(int64_t weight_bytes, int64_t num_rows, int64_t row_tiles, int64_t most_columns) {
    // Cost in bytes of cached weights. From 1 to 64 rows, the time grows as (rows + 2) / 3.
    int64_t cost = weight_bytes * (num_rows + 2) / 3;
    constexpr int64_t kInlineCost = 192 << 10;  // about 2 us
    constexpr int64_t kChunkCost = 512 << 10;
    int64_t chunks = 1, threads = num_threads();
    if (cost > kInlineCost) chunks = max64(1, min64(8, cost / kChunkCost / threads)) * threads;
    columns = min64(chunks, most_columns);
    rows = min64(row_tiles, ceil_div(chunks, columns));
  }
};

// Computes the product range by range. The length of a range of columns is a multiple of
// `together`.
inline void run(const LinearParams& params,
                int64_t num_columns,
                int64_t together,
                const Ranges& cut) {
  uint64_t product = next_product();
  int64_t parts = num_columns / together;
  parallel_for(cut.columns * cut.rows, 1, [&](int64_t index, int64_t) {
    int64_t c = index / cut.rows, r = index % cut.rows;
    // If threads are equally fast, this thread's next range is num_threads() ranges later.
    int64_t next = min64((index + num_threads()) / cut.rows, cut.columns);
    gemm_range(params,
               {.row_begin = part_begin(params.rows, cut.rows, r),
                .row_end = part_begin(params.rows, cut.rows, r + 1),
                .begin = together * part_begin(parts, cut.columns, c),
                .end = together * part_begin(parts, cut.columns, c + 1),
                .next = together * part_begin(parts, cut.columns, next),
                .product = product});
  });
}

// Computes the product for int8 and int4 weights. The length of a range of rows is a multiple of
// `row_tile`.
inline void run_panels(const LinearParams& params, int64_t row_tile) {
  int64_t panels = weight_panels(params.weight.num_outputs, params.weight.activation), bytes = 0;
  with_codes(params.weight, [&]<typename Codes>() {
    bytes = panels * panel_bytes<Codes>(params.weight.num_inputs);
  });
  int64_t row_tiles = ceil_div(params.rows, row_tile);
  run(params, panels, 1, Ranges(bytes, params.rows, row_tiles, panels));
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
