// SPDX-License-Identifier: Apache-2.0
// Products of a tile of rows and some blocks of outputs, with the sums in registers.
#pragma once

#include "gemm/rows_cpu.h"

namespace specops::SPECOPS_ISA {
namespace {

// Sizes of tiles. kMaxRows: maximum rows of a tile. kFetchRows: number of rows from which tiles
// prefetch weights. kMaxBlocks: how many blocks have sums that fit the registers, by the number of
// rows. kFillsTiles: all tiles but the first are full; otherwise rows are divided evenly.
struct Shape {
#if defined(SPECOPS_AVX512)
  static constexpr int kMaxRows = 8;
  static constexpr int kFetchRows = 6;
  static constexpr int kMaxBlocks[] = {0, 8, 8, 8, 6, 5, 4, 3, 3};
  static constexpr bool kFillsTiles = false;
#elif defined(SPECOPS_AVX2)
  // Sixteen registers: two per sum, two for weights, one for an input. With up to two rows, one for
  // weights.
  static constexpr int kMaxRows = 6;
  static constexpr int kFetchRows = 2;
  static constexpr int kMaxBlocks[] = {0, 6, 2, 2, 1, 1, 1};
  static constexpr bool kFillsTiles = true;  // more rows share each conversion of weights
#elif defined(SPECOPS_NEON)
  // Thirty-two registers: four per sum, eight for weights and their sources, one for inputs.
  static constexpr int kMaxRows = 5;
  static constexpr int kFetchRows = 3;
  static constexpr int kMaxBlocks[] = {0, 5, 2, 1, 1, 1};
  static constexpr bool kFillsTiles = false;
#else
  static constexpr int kMaxRows = 3;
  static constexpr int kFetchRows = 6;
  static constexpr int kMaxBlocks[] = {0, 3, 1, 1};
  static constexpr bool kFillsTiles = false;
#endif
};

// Returns the first row of tile `index` of `count`. An incomplete tile is the first one, because
// the last tile prefetches weights and should take as long as possible.
inline int64_t tile_begin(int64_t rows, int64_t count, int64_t index) {
  if (Shape::kFillsTiles) return max64(0, rows - (count - index) * Shape::kMaxRows);
  return part_begin(rows, count, index);
}

// Returns how many blocks fit the registers together with the rows of the largest tile.
inline int64_t max_blocks(int64_t rows) {
  int64_t even = ceil_div(rows, ceil_div(rows, Shape::kMaxRows));
  return Shape::kMaxBlocks[Shape::kFillsTiles ? min64(rows, Shape::kMaxRows) : even];
}

// True if the weights of all blocks of a step fit the registers at once.
#if defined(SPECOPS_NEON)
constexpr bool kHoldsWeights = false;
#else
constexpr bool kHoldsWeights = true;
#endif

// A prefetch that a tile makes while it computes, so that a later tile finds its weights in the L2
// cache.
struct Fetch {
  const char* from = nullptr;  // first of as many blocks as the tile has; nullptr: no prefetch
  int64_t step_bytes = 0;      // bytes per step in each block
};

// Operands of a tile: its first row of x, and the weights of its first block.
template <typename S>
struct TileInputs {
  Rows<S> rows;
  const char* weights;
  int64_t steps;  // steps per block, which gives the distance between blocks
};

// Adds the products of the steps [begin, end) to the sums, in order.
template <typename S, int kRows, int kBlocks>
SPECOPS_INLINE inline void add_steps(typename S::Sum (&acc)[kRows][kBlocks],
                                     const TileInputs<S>& in,
                                     int64_t begin,
                                     int64_t end,
                                     Fetch fetch) {
  int64_t steps = in.steps, stride = in.rows.stride;
  for (int64_t step = begin; step < end; ++step) {
    const auto* x = in.rows.x + step * S::kInputs;
    auto weights_of = [&](int b, int part) SPECOPS_INLINE {
      return S::weights(in.weights + (b * steps + step) * S::kBytes, part);
    };
    unrolled<kBlocks>([&](int b) SPECOPS_INLINE {
      if (fetch.from != nullptr) {
        // Prefetch to L2: L1 has few miss buffers and would drop the request.
        const char* line = fetch.from + b * steps * S::kBytes + step * fetch.step_bytes;
        __builtin_prefetch(line, 0, 2);
      }
    });
    if constexpr (!kHoldsWeights) {
      // All parts of a block come before the next block; otherwise gcc keeps the words of all
      // blocks for the second part.
      unrolled<kBlocks>([&](int b) SPECOPS_INLINE {
        unrolled<S::kParts>([&](int part) SPECOPS_INLINE {
          auto words = weights_of(b, part);
          unrolled<kRows>([&](int r) SPECOPS_INLINE {
            S::dot(acc[r][b], words, S::input(x + r * stride, part));
          });
        });
      });
#if defined(SPECOPS_AVX2)
    } else if constexpr (kRows <= 2 && S::kGroupSteps == 0) {
      unrolled<S::kParts>([&](int part) SPECOPS_INLINE {
        Held inputs[kRows];
        unrolled<kRows>([&](int r)
                            SPECOPS_INLINE { inputs[r] = hold(S::input(x + r * stride, part)); });
        unrolled<kBlocks>([&](int b) SPECOPS_INLINE {
          auto words = weights_of(b, part);
          unrolled<kRows>([&](int r) SPECOPS_INLINE { add_product(acc[r][b], words, inputs[r]); });
        });
      });
#endif
    } else if constexpr (S::kByBlock) {
      // Block by block, because few registers are left for weights. Inputs are read from L1 again
      // for every block.
      unrolled<S::kParts>([&](int part) SPECOPS_INLINE {
        unrolled<kBlocks>([&](int b) SPECOPS_INLINE {
          auto words = weights_of(b, part);
          unrolled<kRows>([&](int r) SPECOPS_INLINE {
            S::dot(acc[r][b], words, S::input(x + r * stride, part));
          });
        });
      });
    } else {
      decltype(weights_of(0, 0)) words[kBlocks];
      unrolled<kBlocks>([&](int b) SPECOPS_INLINE { words[b] = weights_of(b, 0); });
      unrolled<kRows>([&](int r) SPECOPS_INLINE {
        auto input = S::input(x + r * stride, 0);
        unrolled<kBlocks>([&](int b) SPECOPS_INLINE { S::dot(acc[r][b], words[b], input); });
      });
    }
  }
}

// Computes the sums for plain weights, [rows, blocks, 16]: one chain of additions over all steps.
template <typename S, int kRows, int kBlocks>
SPECOPS_INLINE inline void sum_plain(const GemmParams& params,
                                     const TileInputs<S>& in,
                                     Fetch fetch,
                                     float* sums) {
  using T = typename S::Row;
  // A row of the caller may end within a step; rows that were converted are padded with zeros.
  constexpr bool kCallersRows = std::is_same_v<typename S::Input, T>;
  int64_t num_inputs = params.weight.num_inputs;
  int64_t full_steps = kCallersRows ? num_inputs / S::kInputs : in.steps;
  typename S::Sum acc[kRows][kBlocks] = {};
  add_steps<S, kRows, kBlocks>(acc, in, 0, full_steps, fetch);
  if constexpr (kCallersRows && S::kInputs > 1) {
    if (full_steps < in.steps) {
      // The number of inputs is odd: the weight of the missing input is zero, but the input must
      // not be read from x.
      unrolled<kRows>([&](int r) SPECOPS_INLINE {
        T last[2] = {in.rows.x[r * in.rows.stride + num_inputs - 1], T{}};
        auto input = S::input(last, 0);
        unrolled<kBlocks>([&](int b) SPECOPS_INLINE {
          S::dot(acc[r][b],
                 S::weights(in.weights + (b * in.steps + full_steps) * S::kBytes, 0),
                 input);
        });
      });
    }
  }
  unrolled<kRows>([&](int r) SPECOPS_INLINE {
    unrolled<kBlocks>(
        [&](int b) SPECOPS_INLINE { put(sums + (r * kBlocks + b) * kWeightBlock, acc[r][b]); });
  });
}

// Computes the sums for fp8 weights. The sum of each group of inputs is one chain from zero, which
// is scaled and added to the total of the earlier groups.
template <typename S, int kRows, int kBlocks>
SPECOPS_INLINE inline void sum_groups(
    const GemmParams& params, const TileInputs<S>& in, int64_t block, Fetch fetch, float* sums) {
  const WeightParams& weight = params.weight;
  int64_t groups = scale_groups(weight.num_inputs, weight.group);
  for (int i = 0; i < kRows * kBlocks; ++i) store(sums + i * kWeightBlock, zero());
  for (int64_t begin = 0; begin < in.steps; begin += S::kGroupSteps) {
    int64_t group = weight.group == 0 ? 0 : begin / S::kGroupSteps;
    typename S::Sum acc[kRows][kBlocks] = {};
    add_steps<S, kRows, kBlocks>(acc, in, begin, min64(begin + S::kGroupSteps, in.steps), fetch);
    unrolled<kBlocks>([&](int b) SPECOPS_INLINE {
      F32x16 scales = load(weight.scales + ((block + b) * groups + group) * kWeightBlock);
      scales = mul(scales, set1(kE4M3Unit));
      unrolled<kRows>([&](int r) SPECOPS_INLINE {
        float* sum = sums + (r * kBlocks + b) * kWeightBlock;
        store(sum, fma(acc[r][b], scales, load(sum)));
      });
    });
  }
}

// Computes out[row, n] = bias[n] + sum_k x[row, k] * weight[n, k] for a tile of kRows rows and
// kBlocks blocks; if gated, activation(out[row, n]) * out[row, width + n].
// Cost:    the tile's weights once from memory or cache; kRows * kBlocks dot products per step.
// Assumes: weights packed by pack_weight; any alignment. `fetch` may point anywhere.
// Order:   one accumulator chain per output over the steps in order; for fp8 one per 128 inputs and
//          one over these. This holds for any tile shape: a row's bits depend neither on other rows
//          nor on how rows and blocks are divided.
// Source:  register-tiled outer-product GEMM (Goto and van de Geijn 2008), without its split of K.
// Threads: none here; callers distribute ranges of blocks and rows.
template <typename S, int kRows, int kBlocks>
[[gnu::noinline]] void tile(
    const GemmParams& params, Rows<S> rows, int64_t row, int64_t block, Fetch fetch) {
  int64_t steps = steps_of<S>(params.weight.num_inputs);
  const char* weights = static_cast<const char*>(params.weight.data) + block * steps * S::kBytes;
  TileInputs<S> in{rows, weights, steps};
  float sums[kRows * kBlocks * kWeightBlock];
  if constexpr (S::kGroupSteps > 0) {
    sum_groups<S, kRows, kBlocks>(params, in, block, fetch, sums);
  } else {
    sum_plain<S, kRows, kBlocks>(params, in, fetch, sums);
  }
  finish_rows(params, row, block, kRows, kBlocks, sums);
}

// Position and size of a tile.
struct TilePlace {
  int64_t row, block;
  int rows, blocks;
  Fetch fetch;
};

template <typename S, int kRows, int kBlocks>
void tile_of_blocks(const GemmParams& params, Rows<S> rows, const TilePlace& at) {
  if (at.blocks == kBlocks) {
    return tile<S, kRows, kBlocks>(params, rows, at.row, at.block, at.fetch);
  }
  if constexpr (kBlocks > 1) tile_of_blocks<S, kRows, kBlocks - 1>(params, rows, at);
}

template <typename S, int kRows>
void tile_of(const GemmParams& params, Rows<S> rows, const TilePlace& at) {
  if (at.rows == kRows) {
    return tile_of_blocks<S, kRows, Shape::kMaxBlocks[kRows]>(params, rows, at);
  }
  if constexpr (kRows > 1) tile_of<S, kRows - 1>(params, rows, at);
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
