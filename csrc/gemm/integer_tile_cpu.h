// SPDX-License-Identifier: Apache-2.0
// Rows times int8 and int4 weights: tiles of rows and one panel of outputs.
#pragma once

#include "gemm/integer_rows_cpu.h"
#include "gemm/integer_step_cpu.h"

namespace specops::SPECOPS_ISA {
namespace {

#if defined(SPECOPS_AVX512)
constexpr int kIntegerRows = 8;  // of a tile, at most
#else
constexpr int kIntegerRows = 4;
#endif

// So many rows are made integers at once, while every panel passes over them.
constexpr int64_t kIntegerRowsKept = 64;

template <typename Codes>
constexpr int64_t kBlockChunkBytes = 64 * kChunkInputs / Codes::kLineInputs;  // of a block

template <typename Codes>
int64_t panel_bytes(int64_t num_inputs) {
  return weight_chunks(num_inputs) * kPanelBlocks * kBlockChunkBytes<Codes>;
}

// Where the weights of 16 inputs of a block begin, `input` being the first.
template <typename Codes>
SPECOPS_INLINE inline const uint8_t* lines_at(const uint8_t* panel, int64_t block, int64_t input) {
  int64_t chunk = input / kChunkInputs * kPanelBlocks + block;
  return panel + chunk * kBlockChunkBytes<Codes> + input % kChunkInputs / Codes::kLineInputs * 64;
}

// The sums of a piece, inputs `begin` to `end`, of one block.
template <typename Codes, int kRows>
SPECOPS_INLINE inline void sum_piece(const Codes& codes,
                                     const uint8_t* panel,
                                     int64_t block,
                                     int64_t begin,
                                     int64_t end,
                                     const IntegerRows& rows,
                                     Sums (&sums)[kRows]) {
  constexpr int kLines = 16 / Codes::kLineInputs;
  for (int64_t input = begin; input < end; input += 16) {
    const uint8_t* lines = lines_at<Codes>(panel, block, input);
    unrolled<kLines>([&](int line) SPECOPS_INLINE {
      const int16_t* x = rows.x + input + line * Codes::kLineInputs;
      codes.pairs_of(lines + 64 * line, [&](const Quads& pairs, int pair) SPECOPS_INLINE {
        unrolled<kRows>([&](int r) SPECOPS_INLINE {
          add_products(sums[r], pairs, x + r * rows.stride + 2 * pair);
        });
      });
    });
  }
}

// The scales of a block's outputs where an output has one, zeros past the last output.
inline F32x16 output_scales(const WeightParams& weight, int64_t block) {
  int64_t width = weight.num_outputs, first = block * kWeightBlock;
  const float* scales = weight.scales;
  if (is_gated(weight.activation)) {
    width /= 2;
    first = block / 2 * kWeightBlock;
    if (block % 2 != 0) scales += width;
  }
  return load_partial(scales + first, static_cast<int>(min64(width - first, kWeightBlock)));
}

// out[row, n] = bias[n] + sum_k x[row, k] * weight[n, k], of kRows rows and a panel; of gates and ups:
// activation(out[row, n]) * out[row, width + n].
// Cost:    the panel once from memory or cache, from its begin to its end.
// Assumes: weights packed by pack_weight; rows made integers for them; any alignment.
// Order:   a piece's sum is exact, in whatever order; pieces are one chain of fused multiply-adds of
//          float32 in order. So the bits are the same on every instruction set.
// Source:  -
// Threads: none here; callers hand out panels and rows.
template <typename Codes, int kRows>
[[gnu::noinline]] void integer_tile(const GemmParams& params,
                                    const IntegerRows& rows,
                                    int64_t row,
                                    int64_t panel) {
  const WeightParams& weight = params.weight;
  int64_t all_blocks = packed_blocks(weight.num_outputs, weight.activation);
  int64_t first_block = panel * kPanelBlocks;
  int64_t blocks = min64(kPanelBlocks, all_blocks - first_block);
  const auto* data = static_cast<const uint8_t*>(weight.data);
  data += panel * panel_bytes<Codes>(weight.num_inputs);
  Codes codes(weight);
  Pieces pieces(weight);
  int64_t width = weight_chunks(weight.num_inputs) * kChunkInputs;
  int64_t groups = scale_groups(weight.num_inputs, weight.group);
  alignas(64) float totals[kRows * kPanelOutputs] = {};
  for (int64_t piece = 0; piece < pieces.count; ++piece) {
    int64_t begin = piece * pieces.inputs, end = min64(begin + pieces.inputs, width);
    int64_t at = 0;  // of the scales of the panel's outputs
    if (weight.group != 0) at = (panel * groups + begin / weight.group) * kPanelOutputs;
    for (int64_t b = 0; b < blocks; ++b) {
      Sums sums[kRows];
      unrolled<kRows>([&](int r) SPECOPS_INLINE {
        sums[r] = spread_sum(-Codes::kBias * rows.sums[r * rows.pieces + piece]);
      });
      sum_piece<Codes, kRows>(codes, data, b, begin, end, rows, sums);
      int64_t of_block = at + b * kWeightBlock;
      unrolled<kRows>([&](int r) SPECOPS_INLINE {
        float* total = totals + (r * blocks + b) * kWeightBlock;
        F32x16 row_scale = set1(rows.scales[r * rows.pieces + piece]), scale = row_scale;
        if (weight.group != 0) scale = mul(row_scale, load(weight.scales + of_block));
        F32x16 sum = fused(floats(sums[r]), scale, load(total));
        if (weight.offsets != nullptr) {
          F32x16 of_row = set1(static_cast<float>(rows.sums[r * rows.pieces + piece]));
          sum = fused(of_row, mul(row_scale, load(weight.offsets + of_block)), sum);
        }
        store(total, sum);
      });
    }
  }
  if (weight.group == 0) {
    for (int64_t b = 0; b < blocks; ++b) {
      F32x16 scales = output_scales(weight, first_block + b);
      for (int r = 0; r < kRows; ++r) {
        float* total = totals + (r * blocks + b) * kWeightBlock;
        store(total, mul(load(total), scales));
      }
    }
  }
  finish_rows(params, row, first_block, kRows, static_cast<int>(blocks), totals);
}

template <typename Codes, int kRows>
void integer_tile_of(
    const GemmParams& params, const IntegerRows& rows, int64_t row, int count, int64_t panel) {
  if (count == kRows) return integer_tile<Codes, kRows>(params, rows, row, panel);
  if constexpr (kRows > 1) integer_tile_of<Codes, kRows - 1>(params, rows, row, count, panel);
}

// A range of rows and panels, as one thread has it.
template <typename Codes>
void integer_range(const GemmParams& params,
                   int64_t row_begin,
                   int64_t row_end,
                   int64_t panel_begin,
                   int64_t panel_end) {
  for (int64_t kept = row_begin; kept < row_end; kept += kIntegerRowsKept) {
    int64_t count = min64(kIntegerRowsKept, row_end - kept);
    IntegerRows rows = integer_rows_from(params, kept, count);
    int64_t tiles = ceil_div(count, kIntegerRows);
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      for (int64_t t = 0; t < tiles; ++t) {
        int64_t row = part_begin(count, tiles, t);
        int tall = static_cast<int>(part_begin(count, tiles, t + 1) - row);
        integer_tile_of<Codes, kIntegerRows>(params, rows.from(row), kept + row, tall, panel);
      }
    }
  }
}

// fn of the codes of a weight's kind.
template <typename Fn>
void with_codes(const WeightParams& weight, const Fn& fn) {
  if (weight.kind == WeightKind::kInt8) return fn.template operator()<Int8Codes>();
  if (weight.code_values == nullptr) return fn.template operator()<Int4Codes>();
  return fn.template operator()<Int4Table>();
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
