// SPDX-License-Identifier: Apache-2.0
// Product of a range of rows and blocks on one thread.
#pragma once

#include "gemm/gemm_range.h"
#include "gemm/tile_cpu.h"

namespace specops::SPECOPS_ISA {
namespace {

// Size of a panel: the blocks that stay in the L2 cache while all row tiles pass over them.
constexpr int64_t kPanelBytes = 128 << 10;

inline int64_t panel_blocks(int64_t rows, int64_t block_bytes) {
  int64_t most = max_blocks(rows);
  if (rows <= Shape::kMaxRows) return most;  // no block is used twice
  // Small first tiles need two blocks; otherwise there would be too few independent sums.
  int64_t least = Shape::kFillsTiles ? 2 : most;
  return max64(kPanelBytes / block_bytes / most * most, least);
}

// The next panel is prefetched during the last kFetchTiles row tiles. Each of them prefetches a
// share that is proportional to its rows, which spreads the memory requests evenly.
constexpr int64_t kFetchTiles = 4;

// Up to this many rows are converted to float once for all panels. More would evict the panel from
// the cache, so then each tile converts its rows again.
constexpr int64_t kKeptRows = 16;

// Computes one range of rows and blocks, tile by tile.
template <typename S>
void range_of_blocks(const GemmParams& params, const GemmRange& range) {
  int64_t row_begin = range.row_begin, block_begin = range.begin, block_end = range.end;
  int64_t rows = range.row_end - row_begin;
  int64_t row_tiles = ceil_div(rows, Shape::kMaxRows);
  int64_t block_bytes = max64(1, steps_of<S>(params.weight.num_inputs) * S::kBytes);
  int64_t panels = ceil_div(block_end - block_begin, panel_blocks(rows, block_bytes));
  // From fetch_rows rows on, the arithmetic leaves time to prefetch the next panel. With fewer, the
  // hardware prefetcher does better, unless blocks are so short that they end before it starts.
  int64_t fetch_rows = Shape::kFetchRows;
  if (block_bytes <= (16 << 10)) fetch_rows = min64(fetch_rows, 3);
  int64_t fetch_row = tile_begin(rows, row_tiles, max64(row_tiles - kFetchTiles, 0));
  int64_t blocks = packed_blocks(params.weight.num_outputs, params.weight.activation);
  bool keeps = rows <= kKeptRows;
  Rows<S> all{};
  if (keeps) all = rows_from<S>(params, row_begin, rows);
  for (int64_t p = 0; p < panels; ++p) {
    int64_t first = block_begin + part_begin(block_end - block_begin, panels, p);
    int64_t last = block_begin + part_begin(block_end - block_begin, panels, p + 1);
    int64_t to_next = last - first;
    // Do not prefetch past the end: the first panel of the next range may be shorter.
    if (p + 1 == panels) to_next = min64(range.next, blocks - to_next) - first;
    bool fetches = rows >= fetch_rows && to_next >= last - first;
    const char* next_panel = static_cast<const char*>(params.weight.data) + to_next * block_bytes;
    for (int64_t t = 0; t < row_tiles; ++t) {
      int64_t row = tile_begin(rows, row_tiles, t);
      int64_t next_row = tile_begin(rows, row_tiles, t + 1);
      int64_t groups = ceil_div(last - first, Shape::kMaxBlocks[next_row - row]);
      Rows<S> inputs =
          keeps ? all.from(row) : rows_from<S>(params, row_begin + row, next_row - row);
      for (int64_t g = 0; g < groups; ++g) {
        int64_t block = first + part_begin(last - first, groups, g);
        int64_t next = first + part_begin(last - first, groups, g + 1);
        TilePlace at{.row = row_begin + row,
                     .block = block,
                     .rows = static_cast<int>(next_row - row),
                     .blocks = static_cast<int>(next - block),
                     .fetch = {}};
        if (fetches && row >= fetch_row) {
          int64_t share = rows - fetch_row;
          at.fetch = {next_panel + block * block_bytes + (row - fetch_row) * block_bytes / share,
                      ceil_div((next_row - row) * S::kBytes, share)};
        }
        tile_of<S, Shape::kMaxRows>(params, inputs, at);
      }
    }
  }
}

// Computes a range for plain or fp8 weights and rows of one dtype.
template <typename T>
void range_of_rows(const GemmParams& params, const GemmRange& range) {
  if (params.weight.kind == WeightKind::kPlain) return range_of_blocks<Step<T, T>>(params, range);
  range_of_blocks<Step<T, E4M3>>(params, range);
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
