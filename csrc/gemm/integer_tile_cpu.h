// SPDX-License-Identifier: Apache-2.0
// Product of rows and int8 or int4 weights: tiles of rows by one panel of outputs.
#pragma once

#include "gemm/gemm_range.h"
#include "gemm/integer_rows_cpu.h"
#include "gemm/integer_step_cpu.h"

namespace specops::SPECOPS_ISA {
namespace {

#if defined(SPECOPS_AVX512) || defined(SPECOPS_NEON)
constexpr int kIntegerRows = 8;  // most rows per tile
#elif defined(SPECOPS_AVX2)
constexpr int kIntegerRows = 5;
#else
constexpr int kIntegerRows = 1;  // portable: taller tiles compile seven times slower
#endif

// Number of rows that all panels pass over together: their integers stay in the L2 cache.
constexpr int64_t kIntegerRowsKept = 64;

// Number of rows that are rounded to integers together. With more rows, a thread rounds them again
// for each of its ranges of panels.
constexpr int64_t kIntegerRowsRounded = 512;

// Prefetch distance in a panel, in bytes.
constexpr int64_t kIntegerFetch = 8 << 10;

// Distance at which pages are touched ahead, once per kPageFetchEvery bytes. A TLB miss takes
// longer than reading the page, especially under a hypervisor, and the prefetches of the page's
// lines would wait for it.
constexpr int64_t kPageFetch = 32 << 10;
constexpr int64_t kPageFetchEvery = 2 << 10;

// Returns the cache hint of the prefetches. After a tile with fewer than kIntegerRows rows, no
// other tile reads the panel, so the panel bypasses the L2 cache, which then keeps other data of
// the step.
constexpr int fetch_locality(int rows) { return rows < kIntegerRows ? 0 : 3; }

// Prefetch distance of scales, in groups.
constexpr int64_t kScaleFetch = 8;

// Touches a page. All callers touch the same line of a page, so that a request in flight does not
// use a second miss buffer.
inline void fetch_page(const uint8_t* p) {
  __builtin_prefetch(p - (reinterpret_cast<uintptr_t>(p) & 4095), 0, 2);
}

constexpr int kPanelParts = kPanelOutputs / kPartOutputs;
constexpr int kLineParts = kWeightBlock / kPartOutputs;

template <typename Kind>
constexpr int64_t kBlockChunkBytes = 64 * kChunkInputs / Kind::kLineInputs;  // per block

template <typename Kind>
constexpr int64_t kPanelChunkBytes = kPanelBlocks * kBlockChunkBytes<Kind>;

template <typename Kind>
int64_t panel_bytes(int64_t num_inputs) {
  return weight_chunks(num_inputs) * kPanelChunkBytes<Kind>;
}

// Returns how many parts of a piece's sums are computed together. With few rows, a single part
// would have too few independent sums, and parts share the integers that they load. With many rows,
// registers do not suffice for more parts. If all parts are computed together, a panel is read from
// begin to end.
constexpr int parts_at_once(int rows, [[maybe_unused]] bool narrow) {
#if defined(SPECOPS_AVX512)
  return rows <= (narrow ? 6 : 5) ? 4 : 2;
#elif defined(SPECOPS_NEON)
  if (narrow) return rows <= 4 ? 4 : 2;
  return rows <= 2 ? 4 : rows <= 6 ? 2 : 1;  // a wide product has two sums
#elif defined(SPECOPS_AVX2)
  return rows == 1 ? 8 : rows == 2 ? 4 : 2;
#else
  return narrow && rows == 1 ? 4 : 2;
#endif
}

// Computes the sums of a piece for kParts parts from `part` on: `chunks` chunks of a panel times
// the inputs of the rows. `ahead` is the address to prefetch.
template <typename Kind, typename Product, int kRows, int kParts>
SPECOPS_INLINE inline void sum_piece(const Kind& kind,
                                     const uint8_t* chunk,
                                     const uint8_t* ahead,
                                     int64_t chunks,
                                     int part,
                                     const typename Product::Integer* x,
                                     int64_t stride,
                                     typename Product::Acc (&acc)[kRows][kParts]) {
  constexpr int kLines = kChunkInputs / Kind::kLineInputs;
  constexpr int kBlocks = kParts / kLineParts > 0 ? kParts / kLineParts : 1;
  chunk += part / kLineParts * kBlockChunkBytes<Kind>;
  ahead += part / kLineParts * kBlockChunkBytes<Kind>;
  for (int64_t c = 0; c < chunks; ++c) {
    unrolled<kLines>([&](int line) SPECOPS_INLINE {
      Codes lines[kParts];
      unrolled<kParts>([&](int p) SPECOPS_INLINE {
        int block = p / kLineParts, within = (part + p) % kLineParts;
        // Lines are prefetched in memory order, whatever the order in which they are read.
        if (within == 0) {
          const uint8_t* fetched = ahead + 64 * (kBlocks * line + block);
          __builtin_prefetch(fetched, 0, fetch_locality(kRows));
        }
        lines[p] = load_codes(chunk + block * kBlockChunkBytes<Kind> + 64 * line +
                              within * 4 * kPartOutputs);
      });
      unrolled<Kind::kLineInputs / 4>([&](int quad) SPECOPS_INLINE {
        Codes quads[kParts];
        unrolled<kParts>([&](int p) SPECOPS_INLINE { quads[p] = kind.quad(lines[p], quad); });
        int at = line * Kind::kLineInputs + 4 * quad;
        Product::template add<kRows, kParts>(quads, x, at, stride, acc);
      });
      asm volatile("");  // otherwise gcc would issue all prefetches at the begin of a chunk
    });
    unrolled<kRows>([&](int r) SPECOPS_INLINE {
      unrolled<kParts>([&](int p) SPECOPS_INLINE { Product::added(acc[r][p]); });
    });
    chunk += kPanelChunkBytes<Kind>;
    ahead += kPanelChunkBytes<Kind>;
    x += kChunkInputs;
  }
}

// Prefetches the scales or the offsets of a panel and group.
inline void fetch_scales(const float* scales) {
  for (int i = 0; i < kPanelOutputs; i += kWeightBlock) __builtin_prefetch(scales + i, 0, 3);
}

// Returns the scales of a block's outputs, if each output has one scale; zeros past the last
// output.
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

// Adds what a group's offsets contribute to the totals of a panel: offset times the sum of the
// row's integers.
template <int kRows>
void add_offsets(const float* steps, const float* row_sums, const float* offsets, float* totals) {
  for (int r = 0; r < kRows; ++r, totals += kPanelOutputs) {
    for (int at = 0; at < kPanelOutputs; at += kPartOutputs) {
      Floats offset = times(spread_float(steps[r]), load_floats(offsets + at));
      store_floats(totals + at, fused(spread_float(row_sums[r]), offset, load_floats(totals + at)));
    }
  }
}

// Finishes the outputs of a panel and `rows` rows, at most kMostRows, from their totals.
template <int kMostRows>
void finish_panel(
    const GemmParams& params, int64_t row, int rows, int64_t panel, const float* totals) {
  const WeightParams& weight = params.weight;
  int64_t first_block = panel * kPanelBlocks;
  int64_t all_blocks = packed_blocks(weight.num_outputs, weight.activation);
  int64_t blocks = min64(kPanelBlocks, all_blocks - first_block);
  alignas(64) float sums[kMostRows * kPanelOutputs];
  for (int r = 0; r < rows; ++r) {
    for (int64_t b = 0; b < blocks; ++b) {
      F32x16 sum = load(totals + r * kPanelOutputs + b * kWeightBlock);
      if (weight.group == 0) sum = mul(sum, output_scales(weight, first_block + b));
      store(sums + (r * blocks + b) * kWeightBlock, sum);
    }
  }
  finish_rows(params, row, first_block, rows, static_cast<int>(blocks), sums);
}

// Computes out[row, n] = bias[n] + sum_k x[row, k] * weight[n, k] for kRows rows and a panel; if
// gated, activation(out[row, n]) * out[row, width + n].
// Cost:    the panel once from memory or cache, from begin to end.
// Assumes: weights packed by pack_weight; rows rounded to integers for them; any alignment.
// Order:   a piece's sum is exact in any order; pieces are added in order by one chain of float32
//          fused multiply-adds. So the bits are the same on every instruction set.
// Source:  -
// Threads: none here; callers distribute panels and rows.
template <typename Kind, typename Product, int kRows>
[[gnu::noinline]] void integer_tile(const GemmParams& params,
                                    const IntegerRows<typename Product::Integer>& rows,
                                    int64_t row,
                                    int64_t panel,
                                    int64_t next) {
  constexpr int kParts = parts_at_once(kRows, Product::kIsNarrow);
  const WeightParams& weight = params.weight;
  const auto* chunk = static_cast<const uint8_t*>(weight.data);
  chunk += panel * panel_bytes<Kind>(weight.num_inputs);
  const uint8_t* end = chunk + panel_bytes<Kind>(weight.num_inputs);
  int64_t to_next = (next - panel - 1) * panel_bytes<Kind>(weight.num_inputs);
  auto later = [&](int64_t bytes) {
    const uint8_t* p = chunk + bytes;
    return p < end ? p : p + to_next;
  };
  Kind kind(weight);
  Pieces pieces(weight);
  bool grouped = weight.group != 0, shifted = weight.offsets != nullptr;
  int64_t pieces_of_group = grouped ? weight.group / pieces.inputs : pieces.count;
  int64_t first = grouped ? panel * scale_groups(weight.num_inputs, weight.group) : 0;
  const float* scales = weight.scales + first * kPanelOutputs;
  const float* offsets = shifted ? weight.offsets + first * kPanelOutputs : nullptr;
  const auto* x = rows.x;
  const float* steps = rows.scales;
  const int32_t* starts = rows.starts;
  const float* row_sums = rows.sums;
  // In memory, because the sums of a piece take all registers; gcc would spill those instead.
  alignas(64) float memory[kRows * kPanelOutputs] = {};
  float* totals = memory;
  int64_t chunks = weight_chunks(weight.num_inputs), next_group = pieces_of_group;
  for (int64_t piece = 0; piece < pieces.count; ++piece) {
    asm("" : "+r"(totals));
    int64_t own = min64(pieces.inputs / kChunkInputs, chunks);
    int64_t bytes = own * kPanelChunkBytes<Kind>;
    for (int64_t i = 0; i < bytes; i += kPageFetchEvery) fetch_page(later(kPageFetch + i));
    const uint8_t* ahead = later(kIntegerFetch);
    unrolled<kPanelParts / kParts>([&](int turn) SPECOPS_INLINE {
      int part = turn * kParts;
      typename Product::Acc acc[kRows][kParts];
      unrolled<kRows>([&](int r) SPECOPS_INLINE {
        unrolled<kParts>([&](int p) SPECOPS_INLINE { acc[r][p] = Product::begin(starts[r]); });
      });
      sum_piece<Kind, Product, kRows, kParts>(kind, chunk, ahead, own, part, x, rows.stride, acc);
      auto add_up = [&](auto in_groups) SPECOPS_INLINE {
        unrolled<kRows>([&](int r) SPECOPS_INLINE {
          Floats step = spread_float(steps[r]);
          unrolled<kParts>([&](int p) SPECOPS_INLINE {
            int at = (part + p) * kPartOutputs;
            float* total = totals + r * kPanelOutputs + at;
            Floats scale = step;
            if constexpr (in_groups) scale = times(step, load_floats(scales + at));
            Floats sum = floats(Product::sums(acc[r][p], starts[r]));
            store_floats(total, fused(sum, scale, load_floats(total)));
          });
        });
      };
      grouped ? add_up(std::true_type{}) : add_up(std::false_type{});
    });
    if (shifted) add_offsets<kRows>(steps, row_sums, offsets, totals);
    chunk += bytes;
    chunks -= own;
    x += pieces.inputs;
    steps += rows.count;
    starts += rows.count;
    row_sums += rows.count;
    if (--next_group == 0) {
      next_group = pieces_of_group;
      if (grouped) {
        scales += kPanelOutputs;
        fetch_scales(scales + kScaleFetch * kPanelOutputs);
      }
      if (shifted) {
        offsets += kPanelOutputs;
        fetch_scales(offsets + kScaleFetch * kPanelOutputs);
      }
    }
  }
  finish_panel<kRows>(params, row, kRows, panel, totals);
}

template <typename Kind, typename Product, int kRows>
void integer_tile_of(const GemmParams& params,
                     const IntegerRows<typename Product::Integer>& rows,
                     int64_t row,
                     int count,
                     int64_t panel,
                     int64_t next) {
  if (count == kRows) return integer_tile<Kind, Product, kRows>(params, rows, row, panel, next);
  if constexpr (kRows > 1) {
    integer_tile_of<Kind, Product, kRows - 1>(params, rows, row, count, panel, next);
  }
}

// Prefetches the begin of a range while its rows are rounded, because no previous panel has
// prefetched it.
template <typename Kind>
void fetch_first(const WeightParams& weight, int64_t panel) {
  const auto* data = static_cast<const uint8_t*>(weight.data);
  data += panel * panel_bytes<Kind>(weight.num_inputs);
  for (int64_t i = 0; i < kPageFetch; i += kPageFetchEvery) fetch_page(data + i);
  for (int64_t i = 0; i < kIntegerFetch; i += 64) __builtin_prefetch(data + i, 0, 3);
}

// Rounds the rows of a range, and calls fn(rows, row, count) for each kIntegerRowsKept of them:
// `count` rows from `row` on.
template <typename Product, typename Fn>
void for_kept_rows(const GemmParams& params, const GemmRange& range, int bias, const Fn& fn) {
  for (int64_t first = range.row_begin; first < range.row_end; first += kIntegerRowsRounded) {
    int64_t rounded = min64(kIntegerRowsRounded, range.row_end - first);
    auto rows = integer_rows_from<Product>(params, first, rounded, bias, range.product);
    for (int64_t kept = 0; kept < rounded; kept += kIntegerRowsKept) {
      fn(rows.from(kept), first + kept, min64(kIntegerRowsKept, rounded - kept));
    }
  }
}

// Computes a range of rows and panels in one thread.
template <typename Kind, typename Product>
void integer_range_of(const GemmParams& params, const GemmRange& range) {
  fetch_first<Kind>(params.weight, range.begin);
  for_kept_rows<Product>(params, range, Kind::kBias, [&](auto rows, int64_t kept, int64_t count) {
    for (int64_t panel = range.begin; panel < range.end; ++panel) {
      int64_t next = panel + 1 < range.end ? panel + 1 : range.next;
      for (int64_t row = 0; row < count; row += kIntegerRows) {  // the shorter tile comes last
        int tall = static_cast<int>(min64(kIntegerRows, count - row));
        integer_tile_of<Kind, Product, kIntegerRows>(
            params, rows.from(row), kept + row, tall, panel, next);
      }
    }
  });
}

template <typename Kind>
void integer_range(const GemmParams& params, const GemmRange& range) {
  auto* rows_and_panels = integer_range_of<Kind, Wide<Kind>>;
  if constexpr (Narrow<Kind>::kIsNarrow) {
    if (params.weight.row_numbers == RowNumbers::kInt8)
      rows_and_panels = integer_range_of<Kind, Narrow<Kind>>;
  }
  rows_and_panels(params, range);
}

// Calls fn with the decoder type of the weight's kind.
template <typename Fn>
void with_codes(const WeightParams& weight, const Fn& fn) {
  if (weight.kind == WeightKind::kInt8) return fn.template operator()<Int8Codes>();
  if (weight.code_values == nullptr) return fn.template operator()<Int4Codes>();
  return fn.template operator()<Int4Table>();
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
