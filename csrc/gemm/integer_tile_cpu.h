// SPDX-License-Identifier: Apache-2.0
// Rows times int8 and int4 weights: tiles of rows and one panel of outputs.
#pragma once

#include "gemm/integer_rows_cpu.h"
#include "gemm/integer_step_cpu.h"

namespace specops::SPECOPS_ISA {
namespace {

#if defined(SPECOPS_AVX512) || defined(SPECOPS_NEON)
constexpr int kIntegerRows = 8;  // of a tile, at most
#else
constexpr int kIntegerRows = 5;
#endif

// So many rows are made integers at once, while every panel passes over them.
constexpr int64_t kIntegerRowsKept = 64;

// So far ahead of what is read a panel is fetched.
constexpr int64_t kIntegerFetch = 8 << 10;

constexpr int kPanelParts = kPanelOutputs / kPartOutputs;
constexpr int kLineParts = kWeightBlock / kPartOutputs;

template <typename Kind>
constexpr int64_t kBlockChunkBytes = 64 * kChunkInputs / Kind::kLineInputs;  // of a block

template <typename Kind>
constexpr int64_t kPanelChunkBytes = kPanelBlocks * kBlockChunkBytes<Kind>;

template <typename Kind>
int64_t panel_bytes(int64_t num_inputs) {
  return weight_chunks(num_inputs) * kPanelChunkBytes<Kind>;
}

// Of how many parts the sums of a piece are made at once: a few rows' alone would wait for each other,
// and parts share the integers that they load. Many have no registers.
constexpr int parts_at_once(int rows, bool narrow) {
#if defined(SPECOPS_AVX512) || defined(SPECOPS_NEON)
  return rows <= (narrow ? 4 : 2) ? 4 : 2;
#else
  return narrow && rows == 1 ? 4 : 2;
#endif
}

// The sums of a piece: inputs `begin` to `end` of kParts parts from `part` on.
template <typename Kind, typename Product, int kRows, int kParts>
SPECOPS_INLINE inline void sum_piece(const Kind& kind,
                                     const uint8_t* panel,
                                     int part,
                                     int64_t begin,
                                     int64_t end,
                                     const typename Product::Integer* x,
                                     int64_t stride,
                                     typename Product::Acc (&acc)[kRows][kParts]) {
  constexpr int kLines = kChunkInputs / Kind::kLineInputs;
  const uint8_t* chunk = panel + begin / kChunkInputs * kPanelChunkBytes<Kind>;
  for (int64_t input = begin; input < end; input += kChunkInputs) {
    unrolled<kLines>([&](int line) SPECOPS_INLINE {
      Codes lines[kParts];
      unrolled<kParts>([&](int p) SPECOPS_INLINE {
        int block = (part + p) / kLineParts, within = (part + p) % kLineParts;
        const uint8_t* at = chunk + block * kBlockChunkBytes<Kind> + 64 * line;
        if (within == 0) __builtin_prefetch(at + kIntegerFetch, 0, 3);
        lines[p] = load_codes(at + within * 4 * kPartOutputs);
      });
      unrolled<Kind::kLineInputs / 4>([&](int quad) SPECOPS_INLINE {
        Codes quads[kParts];
        unrolled<kParts>([&](int p) SPECOPS_INLINE { quads[p] = kind.quad(lines[p], quad); });
        const auto* own = x + input + line * Kind::kLineInputs + 4 * quad;
        Product::template add<kRows, kParts>(quads, own, stride, acc);
      });
    });
    chunk += kPanelChunkBytes<Kind>;
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
template <typename Kind, typename Product, int kRows>
[[gnu::noinline]] void integer_tile(const GemmParams& params,
                                    const IntegerRows<typename Product::Integer>& rows,
                                    int64_t row,
                                    int64_t panel) {
  constexpr int kParts = parts_at_once(kRows, Product::kIsNarrow);
  const WeightParams& weight = params.weight;
  const auto* data = static_cast<const uint8_t*>(weight.data);
  data += panel * panel_bytes<Kind>(weight.num_inputs);
  Kind kind(weight);
  Pieces pieces(weight);
  int64_t width = weight_chunks(weight.num_inputs) * kChunkInputs;
  int64_t groups = scale_groups(weight.num_inputs, weight.group);
  bool grouped = weight.group != 0, shifted = weight.offsets != nullptr;
  Floats totals[kRows][kPanelParts] = {};
  for (int64_t piece = 0; piece < pieces.count; ++piece) {
    int64_t begin = piece * pieces.inputs, end = min64(begin + pieces.inputs, width);
    const float* scales = weight.scales;
    const float* offsets = weight.offsets;
    if (grouped) {
      int64_t at = (panel * groups + begin / weight.group) * kPanelOutputs;
      scales += at;
      if (shifted) offsets += at;
    }
    unrolled<kPanelParts / kParts>([&](int turn) SPECOPS_INLINE {
      int part = turn * kParts;
      typename Product::Acc acc[kRows][kParts];
      unrolled<kRows>([&](int r) SPECOPS_INLINE {
        int32_t start = -Kind::kBias * rows.sums[r * rows.pieces + piece];
        unrolled<kParts>([&](int p) SPECOPS_INLINE { acc[r][p] = Product::begin(start); });
      });
      sum_piece<Kind, Product, kRows, kParts>(
          kind, data, part, begin, end, rows.x, rows.stride, acc);
      unrolled<kParts>([&](int p) SPECOPS_INLINE {
        Floats scale{}, offset{};
        if (grouped) scale = load_floats(scales + (part + p) * kPartOutputs);
        if (shifted) offset = load_floats(offsets + (part + p) * kPartOutputs);
        unrolled<kRows>([&](int r) SPECOPS_INLINE {
          int32_t of_row = rows.sums[r * rows.pieces + piece];
          Floats step = spread_float(rows.scales[r * rows.pieces + piece]);
          Floats sum = floats(Product::sums(acc[r][p], -Kind::kBias * of_row));
          Floats& total = totals[r][part + p];
          total = fused(sum, grouped ? times(step, scale) : step, total);
          if (shifted) {
            total = fused(spread_float(static_cast<float>(of_row)), times(step, offset), total);
          }
        });
      });
    });
  }
  int64_t first_block = panel * kPanelBlocks;
  int64_t all_blocks = packed_blocks(weight.num_outputs, weight.activation);
  int64_t blocks = min64(kPanelBlocks, all_blocks - first_block);
  alignas(64) float sums[kRows * kPanelOutputs];
  for (int r = 0; r < kRows; ++r) {
    float* of_row = sums + r * blocks * kWeightBlock;
    for (int p = 0; p < blocks * kLineParts; ++p) {
      store_floats(of_row + p * kPartOutputs, totals[r][p]);
    }
    for (int64_t b = 0; b < blocks && !grouped; ++b) {
      F32x16 scaled = mul(load(of_row + b * kWeightBlock), output_scales(weight, first_block + b));
      store(of_row + b * kWeightBlock, scaled);
    }
  }
  finish_rows(params, row, first_block, kRows, static_cast<int>(blocks), sums);
}

template <typename Kind, typename Product, int kRows>
void integer_tile_of(const GemmParams& params,
                     const IntegerRows<typename Product::Integer>& rows,
                     int64_t row,
                     int count,
                     int64_t panel) {
  if (count == kRows) return integer_tile<Kind, Product, kRows>(params, rows, row, panel);
  if constexpr (kRows > 1) {
    integer_tile_of<Kind, Product, kRows - 1>(params, rows, row, count, panel);
  }
}

// A range of rows and panels, as one thread has it. `call`: from next_call, of all ranges of a product.
template <typename Kind, typename Product>
void integer_range_of(const GemmParams& params,
                      int64_t row_begin,
                      int64_t row_end,
                      int64_t panel_begin,
                      int64_t panel_end,
                      uint64_t call) {
  for (int64_t kept = row_begin; kept < row_end; kept += kIntegerRowsKept) {
    int64_t count = min64(kIntegerRowsKept, row_end - kept);
    auto rows = integer_rows_from<typename Product::Integer>(params, kept, count, call);
    int64_t tiles = ceil_div(count, kIntegerRows);
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      for (int64_t t = 0; t < tiles; ++t) {
        int64_t row = part_begin(count, tiles, t);
        int tall = static_cast<int>(part_begin(count, tiles, t + 1) - row);
        integer_tile_of<Kind, Product, kIntegerRows>(
            params, rows.from(row), kept + row, tall, panel);
      }
    }
  }
}

template <typename Kind>
void integer_range(const GemmParams& params,
                   int64_t row_begin,
                   int64_t row_end,
                   int64_t panel_begin,
                   int64_t panel_end,
                   uint64_t call) {
  auto* range = integer_range_of<Kind, Wide<Kind>>;
  if constexpr (Narrow<Kind>::kIsNarrow) {
    if (params.weight.row_numbers == RowNumbers::kInt8)
      range = integer_range_of<Kind, Narrow<Kind>>;
  }
  range(params, row_begin, row_end, panel_begin, panel_end, call);
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
