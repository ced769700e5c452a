// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "dense/linear_ranges_cpu.h"
#include "gemm/tiles_cpu.h"

namespace specops::avx512_bf16 {
void linear_cpu(const LinearParams& params);  // for float32 and fp8, which AMX tiles do not support
}

namespace specops::SPECOPS_ISA {
namespace {

constexpr int64_t kSteps = 16;    // steps per tile, of two inputs each
constexpr int64_t kMaxRows = 32;  // rows of two tiles
constexpr int64_t kWords = kSteps * kWeightBlock;

// The inputs of the current rows after the last whole tile, padded with zeros.
struct Tail {
  alignas(64) bfloat16 x[kMaxRows * 2 * kSteps];
};

inline void fill_tail(const LinearParams& params, int64_t row, int64_t rows, Tail& tail) {
  int64_t first = params.weight.num_inputs / (2 * kSteps) * (2 * kSteps);
  std::memset(tail.x, 0, sizeof(tail.x));
  const auto* x = static_cast<const bfloat16*>(params.x) + row * params.x_stride + first;
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(tail.x + r * 2 * kSteps,
                x + r * params.x_stride,
                static_cast<size_t>(params.weight.num_inputs - first) * sizeof(bfloat16));
  }
}

// Configures the AMX tiles: 0 to 3 hold sums, 4 and 5 inputs, 6 and 7 weights.
inline void configure(int64_t rows) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = kTileRowBytes;
    config.rows[tile] = kTileRows;
  }
  if (rows <= kTileRows) {
    for (int tile : {0, 1, 2, 3, 4}) config.rows[tile] = static_cast<uint8_t>(rows);
  } else {
    for (int tile : {2, 3, 5}) config.rows[tile] = static_cast<uint8_t>(rows - kTileRows);
  }
  configure_tiles(config);
}

// Adds the products of one tile of inputs. The rows of x are `stride` bytes apart, and the blocks
// are `words` words apart.
template <int kHigh, int kBlocks>
inline void add_products(const bfloat16* x, int64_t stride, const uint32_t* w, int64_t words) {
  load_tile<4>(x, stride);
  if constexpr (kHigh == 2) {
    load_tile<5>(reinterpret_cast<const char*>(x) + kTileRows * stride, stride);
  }
  auto block = [&]<int kBlock>() {
    if constexpr (kBlock < kBlocks) {
      constexpr int kWeights = 6 + kBlock % 2;
      load_tile<kWeights>(w + kBlock * words, kTileRowBytes);
      dot_tiles<kBlock, 4, kWeights>();
      if constexpr (kHigh == 2) dot_tiles<2 + kBlock, 5, kWeights>();
    }
  };
  block.template operator()<0>();
  block.template operator()<1>();
  block.template operator()<2>();
  block.template operator()<3>();
}

// Computes out[row, n] = bias[n] + sum_k x[row, k] * weight[n, k] for kHigh row tiles and kBlocks
// blocks of outputs.
// Cost:    the weights once from memory or cache; a tile product is 1 KiB of weights and 16 rows.
// Assumes: tiles configured for `rows`; weights packed by pack_weight, which lays out 16 steps of a
//          block as a tile of weights; any alignment.
// Order:   each 32 inputs are one tile product: the even inputs form one chain of fused
//          multiply-adds from 0, the odd ones another; their sum is added to the total. Missing
//          inputs of the last 32 are zeros. So a row's bits depend only on the row.
// Source:  TDPBF16PS, Intel SDM volume 2.
// Threads: none here.
template <int kHigh, int kBlocks>
void tile(const LinearParams& params, const Tail& tail, int64_t row, int64_t rows, int64_t block) {
  int64_t steps = (params.weight.num_inputs + 1) / 2;
  int64_t full = params.weight.num_inputs / (2 * kSteps);
  const auto* x = static_cast<const bfloat16*>(params.x) + row * params.x_stride;
  const auto* w = static_cast<const uint32_t*>(params.weight.data) + block * steps * kWeightBlock;
  zero_tile<0>();
  zero_tile<1>();
  zero_tile<2>();
  zero_tile<3>();
  for (int64_t t = 0; t < full; ++t) {
    add_products<kHigh, kBlocks>(
        x + t * 2 * kSteps, params.x_stride * 2, w + t * kWords, steps * kWeightBlock);
  }
  if (full * kSteps < steps) {
    alignas(64) uint32_t rest[kBlocks * kWords] = {};
    for (int b = 0; b < kBlocks; ++b) {
      std::memcpy(rest + b * kWords,
                  w + (b * steps + full * kSteps) * kWeightBlock,
                  static_cast<size_t>((steps - full * kSteps) * kWeightBlock) * 4);
    }
    add_products<kHigh, kBlocks>(tail.x, kTileRowBytes, rest, kWords);
  }
  constexpr int64_t kStride = kBlocks * kWeightBlock;
  alignas(64) float sums[kHigh * kTileRows * kStride];
  store_tile<0>(sums, kStride * 4);
  if constexpr (kBlocks > 1) store_tile<1>(sums + kWeightBlock, kStride * 4);
  if constexpr (kHigh == 2) {
    store_tile<2>(sums + kTileRows * kStride, kStride * 4);
    if constexpr (kBlocks > 1)
      store_tile<3>(sums + kTileRows * kStride + kWeightBlock, kStride * 4);
  } else {
    if constexpr (kBlocks > 2) store_tile<2>(sums + 2 * kWeightBlock, kStride * 4);
    if constexpr (kBlocks > 3) store_tile<3>(sums + 3 * kWeightBlock, kStride * 4);
  }
  auto* end = is_gated(params.weight.activation) ? finish_gated<bfloat16> : finish<bfloat16>;
  end(params, row, block, static_cast<int>(rows), kBlocks, sums);
}

// Calls tile() with the template arguments for a number of rows and blocks.
void tile_of(const LinearParams& params,
             const Tail& tail,
             int64_t row,
             int64_t rows,
             int64_t at,
             int blocks) {
  if (rows > kTileRows) {
    return blocks == 2 ? tile<2, 2>(params, tail, row, rows, at)
                       : tile<2, 1>(params, tail, row, rows, at);
  }
  switch (blocks) {
    case 4:
      return tile<1, 4>(params, tail, row, rows, at);
    case 3:
      return tile<1, 3>(params, tail, row, rows, at);
    case 2:
      return tile<1, 2>(params, tail, row, rows, at);
    default:
      return tile<1, 1>(params, tail, row, rows, at);
  }
}

// Size in bytes of a panel: the blocks that stay in L2 while all row tiles pass over them.
constexpr int64_t kPanelBytes = 512 << 10;

void run_range(const LinearParams& params,
               int64_t row_begin,
               int64_t row_end,
               int64_t block_begin,
               int64_t block_end) {
  int64_t block_bytes = max64(1, (params.weight.num_inputs + 1) / 2) * 64;
  int64_t panel = max64(kPanelBytes / block_bytes / 4, 1) * 4;
  Tail tail;
  for (int64_t first = block_begin; first < block_end; first += panel) {
    int64_t last = min64(first + panel, block_end);
    for (int64_t row = row_begin; row < row_end; row += kMaxRows) {
      int64_t rows = min64(kMaxRows, row_end - row);
      int64_t most = rows > kTileRows ? 2 : 4;
      configure(rows);
      if (params.weight.num_inputs % (2 * kSteps) != 0) fill_tail(params, row, rows, tail);
      for (int64_t block = first; block < last; block += most) {
        int blocks = static_cast<int>(min64(most, last - block));
        tile_of(params, tail, row, rows, block, blocks);
      }
    }
  }
  release_tiles();  // so that the system need not save them when this thread stops
}

// Computes the product in ranges as in linear_ranges_cpu.h. A range never separates a block of
// gates from the block of its ups.
void run_tiles(const LinearParams& params) {
  int64_t together = is_gated(params.weight.activation) ? 2 : 1;
  int64_t blocks = packed_blocks(params.weight.num_outputs, params.weight.activation);
  int64_t row_tiles = ceil_div(params.rows, kMaxRows);
  int64_t bytes = blocks * ((params.weight.num_inputs + 1) / 2) * 64;
  int64_t cost = bytes * row_tiles;  // a row tile takes about as long as its weights
  int64_t threads = num_threads();
  constexpr int64_t kInlineCost = 192 << 10;
  constexpr int64_t kChunkCost = 512 << 10;
  int64_t chunks = 1;
  if (cost > kInlineCost) chunks = max64(1, min64(8, cost / kChunkCost / threads)) * threads;
  int64_t columns = max64(1, min64(chunks, ceil_div(blocks, 4)));
  int64_t row_ranges = max64(1, min64(row_tiles, ceil_div(chunks, columns)));
  parallel_for(columns * row_ranges, 1, [&](int64_t index, int64_t) {
    int64_t c = index / row_ranges, r = index % row_ranges;
    run_range(params,
              min64(params.rows, kMaxRows * part_begin(row_tiles, row_ranges, r)),
              min64(params.rows, kMaxRows * part_begin(row_tiles, row_ranges, r + 1)),
              together * part_begin(blocks / together, columns, c),
              together * part_begin(blocks / together, columns, c + 1));
  });
}

}  // namespace

void linear_cpu(const LinearParams& params) {
  if (is_in_panels(params.weight.kind)) return run_panels(params, kIntegerRowsKept);
  bool has_tiles = params.weight.kind == WeightKind::kPlain && params.dtype == DType::kBFloat16;
  if (!has_tiles) return avx512_bf16::linear_cpu(params);
  run_tiles(params);
}

}  // namespace specops::SPECOPS_ISA
