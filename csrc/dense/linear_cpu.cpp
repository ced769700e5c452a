// SPDX-License-Identifier: Apache-2.0
#include <type_traits>

#include "common/growing_array.h"
#include "common/parallel.h"
#include "dense/linear.h"
#include "dense/linear_finish_cpu.h"

namespace specops::SPECOPS_ISA {
namespace {

// Calls fn(0) to fn(kCount - 1) without a loop, so that arrays indexed by them become registers.
#define SPECOPS_INLINE __attribute__((always_inline))
template <int kCount, typename Fn>
SPECOPS_INLINE inline void unrolled(const Fn& fn) {
  if constexpr (kCount > 0) {
    unrolled<kCount - 1>(fn);
    fn(kCount - 1);
  }
}

// What one step is for each dtype. It has parts, which come one after the other: in each, one word of
// 16 outputs gives a vector of weights, and the same inputs of one row are multiplied with it. `Input`
// is what a tile reads inputs as: where bfloat16 has no dot products of its own, floats that were made
// of the rows once, since every block of weights meets them again.
template <typename T>
struct Step;

#if defined(SPECOPS_AVX512) || defined(SPECOPS_AVX2) || defined(SPECOPS_NEON)
#if defined(SPECOPS_AVX2)
using Spread = const float*;  // spread right before it is multiplied with
inline Spread spread(const float* x) { return x; }
#elif defined(SPECOPS_NEON)
using Spread = float32x4_t;  // one number, in every lane that it is multiplied with at once
inline Spread spread(const float* x) { return vdupq_n_f32(*x); }
#else
using Spread = F32x16;
inline Spread spread(const float* x) { return set1(*x); }
#endif

// sum += w * x, in the registers that the sum is in: left to itself gcc moves sums about on AVX2 and
// NEON, and some then do not fit. On AVX2 it would also spread inputs long before their products.
inline void add_product(F32x16& sum, F32x16 w, Spread x) {
#if defined(SPECOPS_AVX2)
  __m256 lo = sum.lo, hi = sum.hi, spread;
  asm volatile(
      "vbroadcastss %5, %2\n\t"
      "vfmadd231ps %3, %2, %0\n\t"
      "vfmadd231ps %4, %2, %1"
      : "+x"(lo), "+x"(hi), "=&x"(spread)
      : "x"(w.lo), "x"(w.hi), "m"(*x));
  sum = {lo, hi};
#elif defined(SPECOPS_NEON)
  float32x4_t a = sum.q[0], b = sum.q[1], c = sum.q[2], d = sum.q[3];
  asm("fmla %0.4s, %1.4s, %2.4s" : "+w"(a) : "w"(w.q[0]), "w"(x));
  asm("fmla %0.4s, %1.4s, %2.4s" : "+w"(b) : "w"(w.q[1]), "w"(x));
  asm("fmla %0.4s, %1.4s, %2.4s" : "+w"(c) : "w"(w.q[2]), "w"(x));
  asm("fmla %0.4s, %1.4s, %2.4s" : "+w"(d) : "w"(w.q[3]), "w"(x));
  sum = {{a, b, c, d}};
#else
  sum = fma(w, x, sum);
#endif
}

#if defined(SPECOPS_AVX2)
// The same with an input that stays spread, for the blocks of a tile of few rows.
using Held = __m256;
inline Held hold(Spread x) {
  __m256 spread;
  asm volatile("vbroadcastss %1, %0" : "=x"(spread) : "m"(*x));
  return spread;
}
inline void add_product(F32x16& sum, F32x16 w, Held x) {
  __m256 lo = sum.lo, hi = sum.hi;
  asm volatile("vfmadd231ps %1, %2, %0" : "+x"(lo) : "x"(w.lo), "x"(x));
  asm volatile("vfmadd231ps %1, %2, %0" : "+x"(hi) : "x"(w.hi), "x"(x));
  sum = {lo, hi};
}
#endif

template <>
struct Step<bfloat16> {
  using Sum = F32x16;
  static constexpr int kInputs = 2;
#if defined(SPECOPS_ISA_avx512_bf16) || defined(SPECOPS_ISA_neon_bf16)
  using Input = bfloat16;
  static constexpr int kParts = 1;
  static BF16x32 weights(const uint32_t* p, int) { return load_pairs(p); }
  static BF16x32 input(const bfloat16* p, int) { return broadcast_pair(p); }
  static void dot(Sum& sum, BF16x32 w, BF16x32 x) { sum = dot_pairs(sum, w, x); }
#else
  // The odd inputs first, as vdpbf16ps does.
  using Input = float;
  static constexpr int kParts = 2;
  static F32x16 weights(const uint32_t* p, int part) {
    return part == 0 ? odd_floats(load_pairs(p)) : even_floats(load_pairs(p));
  }
  static Spread input(const float* p, int part) { return spread(p + 1 - part); }
  static void dot(Sum& sum, F32x16 w, Spread x) { add_product(sum, w, x); }
#endif
};

template <>
struct Step<float> {
  using Sum = F32x16;
  using Input = float;
  static constexpr int kInputs = 1;
  static constexpr int kParts = 1;
  static F32x16 weights(const uint32_t* p, int) { return load(reinterpret_cast<const float*>(p)); }
  static Spread input(const float* p, int) { return spread(p); }
  static void dot(Sum& sum, F32x16 w, Spread x) { add_product(sum, w, x); }
};

inline void put(float* p, F32x16 sum) { store(p, sum); }
#else
// The arrays of simd.h would live in memory here; vectors of four live in registers anywhere.
using Float4 = float __attribute__((vector_size(16)));
using Word4 = uint32_t __attribute__((vector_size(16)));

template <typename V>
struct Quad {
  V q[4] = {};
};

template <>
struct Step<bfloat16> {
  using Sum = Quad<Float4>;
  using Input = float;
  static constexpr int kInputs = 2;
  static constexpr int kParts = 2;
  static Quad<Float4> weights(const uint32_t* p, int part) {
    Quad<Float4> out;
    unrolled<4>([&](int i) SPECOPS_INLINE {
      Word4 word;
      std::memcpy(&word, p + 4 * i, 16);
      out.q[i] = (Float4)(part == 0 ? word & 0xffff0000u : word << 16);
    });
    return out;
  }
  static float input(const float* p, int part) { return p[1 - part]; }
  static void dot(Sum& sum, const Quad<Float4>& w, float x) {
    unrolled<4>([&](int i) SPECOPS_INLINE { sum.q[i] = w.q[i] * x + sum.q[i]; });
  }
};

template <>
struct Step<float> {
  using Sum = Quad<Float4>;
  using Input = float;
  static constexpr int kInputs = 1;
  static constexpr int kParts = 1;
  static Quad<Float4> weights(const uint32_t* p, int) {
    Quad<Float4> out;
    unrolled<4>([&](int i) SPECOPS_INLINE { std::memcpy(&out.q[i], p + 4 * i, 16); });
    return out;
  }
  static float input(const float* p, int) { return *p; }
  static void dot(Sum& sum, const Quad<Float4>& w, float x) {
    unrolled<4>([&](int i) SPECOPS_INLINE { sum.q[i] = w.q[i] * x + sum.q[i]; });
  }
};

inline void put(float* p, const Quad<Float4>& sum) {
  unrolled<4>([&](int i) SPECOPS_INLINE { std::memcpy(p + 4 * i, &sum.q[i], 16); });
}
#endif

// How many rows a tile of T holds at most, from how many on weights are fetched ahead, how many blocks
// fit the registers beside so many rows, and whether rows are cut evenly into tiles or fill them.
template <typename T>
struct Shape {
#if defined(SPECOPS_AVX512)
  static constexpr int kMaxRows = 8;
  static constexpr int kFetchRows = 6;
  static constexpr int kMaxBlocks[] = {0, 8, 8, 8, 6, 5, 4, 3, 3};
  static constexpr bool kFillsTiles = false;
#elif defined(SPECOPS_AVX2)
  // Sixteen registers: sums take two each, weights two, inputs one (of up to two rows: one each).
  static constexpr int kMaxRows = 6;
  static constexpr int kFetchRows = 2;
  static constexpr int kMaxBlocks[] = {0, 6, 2, 2, 1, 1, 1};
  static constexpr bool kFillsTiles = true;  // conversions are shared by more rows
#elif defined(SPECOPS_NEON)
  // Thirty-two registers: sums take four each, weights and what they are made of eight, inputs one.
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

// Where tile `index` of `count` begins among so many rows. What does not fill a tile comes first: the
// last one fetches weights ahead, and has the most time for it.
template <typename T>
int64_t tile_begin(int64_t rows, int64_t count, int64_t index) {
  if (Shape<T>::kFillsTiles) return max64(0, rows - (count - index) * Shape<T>::kMaxRows);
  return part_begin(rows, count, index);
}

// Beside the rows of the largest tile.
template <typename T>
int64_t max_blocks(int64_t rows) {
  int64_t even = ceil_div(rows, ceil_div(rows, Shape<T>::kMaxRows));
  return Shape<T>::kMaxBlocks[Shape<T>::kFillsTiles ? min64(rows, Shape<T>::kMaxRows) : even];
}

// Whether the weights of all blocks of a step fit the registers at once.
#if defined(SPECOPS_NEON)
constexpr bool kHoldsWeights = false;
#else
constexpr bool kHoldsWeights = true;
#endif

// What a tile asks for while it computes, so that a later one finds it in the second-level cache.
constexpr int64_t kStepBytes = 4 * kLinearBlock;  // of a block
struct Fetch {
  const char* from = nullptr;  // of the first of as many blocks as the tile has; nullptr: nothing
  int64_t step_bytes = 0;      // how far a step goes in each block
};

// Rows of inputs as a tile reads them.
template <typename T>
struct Rows {
  const typename Step<T>::Input* x;
  int64_t stride;
};

// Rows that a thread has made floats of, as many at once as a tile holds.
thread_local GrowingArray<float> float_rows;

// The rows from `row` on; what they had in `float_rows` is gone.
template <typename T>
Rows<T> rows_from(const LinearParams& params, int64_t row, int64_t rows) {
  const T* x = static_cast<const T*>(params.x) + row * params.x_stride;
  if constexpr (std::is_same_v<T, typename Step<T>::Input>) {
    return {x, params.x_stride};
  } else {
    int64_t width = (params.num_inputs + kLinearBlock - 1) / kLinearBlock * kLinearBlock;
    // One line more, or the same inputs of all rows would fall into the same set of the cache.
    int64_t stride = width + kLinearBlock;
    float* floats = float_rows.reserve(rows * stride);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < width; i += kLinearBlock) {
        int n = static_cast<int>(min64(params.num_inputs - i, kLinearBlock));
        store(floats + r * stride + i, load_partial(x + r * params.x_stride + i, n));
      }
    }
    return {floats, stride};
  }
}

// out[row, n] = bias[n] + sum_k x[row, k] * weight[n, k], for a tile of kRows rows, kBlocks blocks;
// of gates and ups: activation(out[row, n]) * out[row, width + n].
// Cost:    the tile's weights once from memory or cache; kRows * kBlocks dot products a step.
// Assumes: weights packed by pack_weight; any alignment. `fetch` may point anywhere.
// Order:   one accumulator chain per output over the steps in order, whatever the tile's shape: a
//          row's bits depend neither on the other rows nor on how rows and blocks were cut.
// Source:  register-tiled outer-product GEMM (Goto and van de Geijn 2008), without its split of K.
// Threads: none here; linear_cpu hands out ranges of blocks and rows.
template <typename T, int kRows, int kBlocks>
[[gnu::noinline]] void tile(
    const LinearParams& params, Rows<T> rows, int64_t row, int64_t block, Fetch fetch) {
  using S = Step<T>;
  int64_t steps = linear_steps(params.num_inputs, params.dtype);
  // A caller's row may end within a step; rows of floats were made with a zero for what is missing.
  constexpr bool kCallersRows = std::is_same_v<typename S::Input, T>;
  int64_t full_steps = kCallersRows ? params.num_inputs / S::kInputs : steps;
  const auto* w = static_cast<const uint32_t*>(params.packed) + block * steps * kLinearBlock;
  typename S::Sum acc[kRows][kBlocks] = {};
  for (int64_t step = 0; step < full_steps; ++step) {
    const auto* x = rows.x + step * S::kInputs;
    auto weights_of = [&](int b, int part) SPECOPS_INLINE {
      return S::weights(w + (b * steps + step) * kLinearBlock, part);
    };
    unrolled<kBlocks>([&](int b) SPECOPS_INLINE {
      if (fetch.from != nullptr) {
        // To the second level: the few miss buffers of the first would drop it.
        const char* line = fetch.from + b * steps * kStepBytes + step * fetch.step_bytes;
        __builtin_prefetch(line, 0, 2);
      }
    });
    if constexpr (!kHoldsWeights) {
      // A block's parts one after the other, or gcc keeps the words of all blocks for the second.
      unrolled<kBlocks>([&](int b) SPECOPS_INLINE {
        unrolled<S::kParts>([&](int part) SPECOPS_INLINE {
          auto words = weights_of(b, part);
          unrolled<kRows>([&](int r) SPECOPS_INLINE {
            S::dot(acc[r][b], words, S::input(x + r * rows.stride, part));
          });
        });
      });
#if defined(SPECOPS_AVX2)
    } else if constexpr (kRows <= 2) {
      unrolled<S::kParts>([&](int part) SPECOPS_INLINE {
        Held inputs[kRows];
        unrolled<kRows>(
            [&](int r) SPECOPS_INLINE { inputs[r] = hold(S::input(x + r * rows.stride, part)); });
        unrolled<kBlocks>([&](int b) SPECOPS_INLINE {
          auto words = weights_of(b, part);
          unrolled<kRows>([&](int r) SPECOPS_INLINE { add_product(acc[r][b], words, inputs[r]); });
        });
      });
#endif
    } else if constexpr (S::kParts > 1) {
      // Block by block: few registers are left for weights. Inputs come again from the first level.
      unrolled<S::kParts>([&](int part) SPECOPS_INLINE {
        unrolled<kBlocks>([&](int b) SPECOPS_INLINE {
          auto words = weights_of(b, part);
          unrolled<kRows>([&](int r) SPECOPS_INLINE {
            S::dot(acc[r][b], words, S::input(x + r * rows.stride, part));
          });
        });
      });
    } else {
      decltype(weights_of(0, 0)) words[kBlocks];
      unrolled<kBlocks>([&](int b) SPECOPS_INLINE { words[b] = weights_of(b, 0); });
      unrolled<kRows>([&](int r) SPECOPS_INLINE {
        auto input = S::input(x + r * rows.stride, 0);
        unrolled<kBlocks>([&](int b) SPECOPS_INLINE { S::dot(acc[r][b], words[b], input); });
      });
    }
  }
  if constexpr (kCallersRows && S::kInputs > 1) {
    if (full_steps < steps) {
      // An odd last input: its partner in the packed weight is zero, and must not be read from x.
      unrolled<kRows>([&](int r) SPECOPS_INLINE {
        T last[2] = {rows.x[r * rows.stride + params.num_inputs - 1], T{}};
        auto input = S::input(last, 0);
        unrolled<kBlocks>([&](int b) SPECOPS_INLINE {
          S::dot(acc[r][b], S::weights(w + (b * steps + full_steps) * kLinearBlock, 0), input);
        });
      });
    }
  }
  float sums[kRows * kBlocks * kLinearBlock];
  unrolled<kRows>([&](int r) SPECOPS_INLINE {
    unrolled<kBlocks>(
        [&](int b) SPECOPS_INLINE { put(sums + (r * kBlocks + b) * kLinearBlock, acc[r][b]); });
  });
  auto* end = is_gated(params.activation) ? finish_gated<T> : finish<T>;
  end(params, row, block, kRows, kBlocks, sums);
}

// Where a tile is, and how large.
struct TilePlace {
  int64_t row, block;
  int rows, blocks;
  Fetch fetch;
};

template <typename T, int kRows, int kBlocks>
void tile_of_blocks(const LinearParams& params, Rows<T> rows, const TilePlace& at) {
  if (at.blocks == kBlocks) {
    return tile<T, kRows, kBlocks>(params, rows, at.row, at.block, at.fetch);
  }
  if constexpr (kBlocks > 1) tile_of_blocks<T, kRows, kBlocks - 1>(params, rows, at);
}

template <typename T, int kRows>
void tile_of(const LinearParams& params, Rows<T> rows, const TilePlace& at) {
  if (at.rows == kRows) {
    return tile_of_blocks<T, kRows, Shape<T>::kMaxBlocks[kRows]>(params, rows, at);
  }
  if constexpr (kRows > 1) tile_of<T, kRows - 1>(params, rows, at);
}

// A panel is the blocks that stay in the second-level cache while every row tile passes over them.
constexpr int64_t kPanelBytes = 128 << 10;

template <typename T>
int64_t panel_blocks(int64_t rows, int64_t block_bytes) {
  int64_t most = max_blocks<T>(rows);
  if (rows <= Shape<T>::kMaxRows) return most;  // nothing passes twice
  // Small first tiles need two blocks, or their few sums wait for each other.
  int64_t least = Shape<T>::kFillsTiles ? 2 : most;
  return max64(kPanelBytes / block_bytes / most * most, least);
}

// So many row tiles, the last ones, fetch the next panel, each as much as it has of their rows: so
// memory is asked for evenly.
constexpr int64_t kFetchTiles = 4;

// So many rows are made floats once; more would push a panel out, so there each tile's are for it.
constexpr int64_t kKeptRows = 16;

// One range of rows and blocks. Its thread probably goes on with the one that begins at `next_block`
// (the number of blocks: there is none).
template <typename T>
void run_range(const LinearParams& params,
               int64_t row_begin,
               int64_t row_end,
               int64_t block_begin,
               int64_t block_end,
               int64_t next_block) {
  int64_t rows = row_end - row_begin;
  int64_t row_tiles = ceil_div(rows, Shape<T>::kMaxRows);
  int64_t block_bytes = max64(1, linear_steps(params.num_inputs, params.dtype) * kStepBytes);
  int64_t panels = ceil_div(block_end - block_begin, panel_blocks<T>(rows, block_bytes));
  // From some rows on arithmetic leaves time to bring the next panel closer. Below, the hardware's own
  // prefetching does better, unless blocks are so short that they end before it has begun.
  int64_t fetch_rows = Shape<T>::kFetchRows;
  if (block_bytes <= (16 << 10)) fetch_rows = min64(fetch_rows, 3);
  int64_t fetch_row = tile_begin<T>(rows, row_tiles, max64(row_tiles - kFetchTiles, 0));
  int64_t blocks = linear_packed_blocks(params.num_outputs, params.activation);
  bool keeps = rows <= kKeptRows;
  Rows<T> all{};
  if (keeps) all = rows_from<T>(params, row_begin, rows);
  for (int64_t p = 0; p < panels; ++p) {
    int64_t first = block_begin + part_begin(block_end - block_begin, panels, p);
    int64_t last = block_begin + part_begin(block_end - block_begin, panels, p + 1);
    int64_t to_next = last - first;
    // Not past the end, where the next range's first panel is the shorter one.
    if (p + 1 == panels) to_next = min64(next_block, blocks - to_next) - first;
    bool fetches = rows >= fetch_rows && to_next >= last - first;
    const char* next_panel = static_cast<const char*>(params.packed) + to_next * block_bytes;
    for (int64_t t = 0; t < row_tiles; ++t) {
      int64_t row = tile_begin<T>(rows, row_tiles, t);
      int64_t next_row = tile_begin<T>(rows, row_tiles, t + 1);
      int64_t groups = ceil_div(last - first, Shape<T>::kMaxBlocks[next_row - row]);
      Rows<T> inputs = all;
      if (keeps) {
        inputs.x += row * inputs.stride;
      } else {
        inputs = rows_from<T>(params, row_begin + row, next_row - row);
      }
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
                      ceil_div((next_row - row) * kStepBytes, share)};
        }
        tile_of<T, Shape<T>::kMaxRows>(params, inputs, at);
      }
    }
  }
}

// Cuts the output into ranges of blocks, and of rows where there are too few blocks: one range for
// work not worth waking a thread, one a thread for small work, several for large work. A block of
// gates and that of their ups are never parted.
template <typename T>
void run(const LinearParams& params) {
  int64_t together = is_gated(params.activation) ? 2 : 1;
  int64_t blocks = linear_packed_blocks(params.num_outputs, params.activation);
  int64_t row_tiles = ceil_div(params.rows, Shape<T>::kMaxRows);
  // Time in bytes of cached weights: from one row to sixty-four it grows as (rows + 2) / 3.
  int64_t bytes = blocks * linear_steps(params.num_inputs, params.dtype) * 64;
  int64_t cost = bytes * (params.rows + 2) / 3;
  int64_t threads = num_threads();
  constexpr int64_t kInlineCost = 192 << 10;  // about 2 us
  constexpr int64_t kChunkCost = 512 << 10;
  int64_t chunks = 1;
  if (cost > kInlineCost) chunks = max64(1, min64(8, cost / kChunkCost / threads)) * threads;
  int64_t least = max64((max_blocks<T>(params.rows) + 1) / 2, together);
  int64_t columns = min64(chunks, ceil_div(blocks, least));
  int64_t row_ranges = min64(row_tiles, ceil_div(chunks, columns));
  parallel_for(columns * row_ranges, 1, [&](int64_t index, int64_t) {
    int64_t c = index / row_ranges, r = index % row_ranges;
    // Threads that are equally fast take ranges in turn.
    int64_t next = min64((index + threads) / row_ranges, columns);
    run_range<T>(params,
                 part_begin(params.rows, row_ranges, r),
                 part_begin(params.rows, row_ranges, r + 1),
                 together * part_begin(blocks / together, columns, c),
                 together * part_begin(blocks / together, columns, c + 1),
                 together * part_begin(blocks / together, columns, next));
  });
}

// packed[block][step][i] = the word of inputs `step` of output 16 * block + i, zero where missing;
// of gates and ups in the order of linear.h.
// Cost:    the weight read and written once.
// Assumes: rows of weight contiguous.
// Order:   a permutation.
// Source:  the layout vdpbf16ps asks for: pairs of inputs side by side.
// Threads: one block a chunk.
template <typename T>
void pack(const PackWeightParams& params) {
  constexpr int kInputs = Step<T>::kInputs;
  constexpr int64_t kStrip = 64;  // steps whose 4 KiB stay in cache while 16 rows are read
  int64_t steps = linear_steps(params.num_inputs, params.dtype);
  int64_t full_steps = params.num_inputs / kInputs;
  int64_t width = is_gated(params.activation) ? params.num_outputs / 2 : params.num_outputs;
  int64_t blocks = linear_packed_blocks(params.num_outputs, params.activation);
  parallel_for(blocks, 1, [&](int64_t block, int64_t) {
    int64_t first = (is_gated(params.activation) ? block / 2 : block) * kLinearBlock;
    int64_t from = is_gated(params.activation) && block % 2 != 0 ? width : 0;
    auto* packed = static_cast<uint32_t*>(params.packed) + block * steps * kLinearBlock;
    for (int64_t strip = 0; strip < steps; strip += kStrip) {
      int64_t end = min64(strip + kStrip, steps);
      for (int64_t i = 0; i < kLinearBlock; ++i) {
        bool present = first + i < width;
        const T* src = static_cast<const T*>(params.weight);
        if (present) src += (from + first + i) * params.weight_stride;
        for (int64_t step = strip; step < end; ++step) {
          uint32_t word = 0;
          if (present && step < full_steps) {
            std::memcpy(&word, src + step * kInputs, 4);
          } else if (present) {
            std::memcpy(&word, src + params.num_inputs - 1, sizeof(T));
          }
          packed[step * kLinearBlock + i] = word;
        }
      }
    }
  });
}

}  // namespace

void pack_weight_cpu(const PackWeightParams& params) {
  return params.dtype == DType::kBFloat16 ? pack<bfloat16>(params) : pack<float>(params);
}

void linear_cpu(const LinearParams& params) {
  return params.dtype == DType::kBFloat16 ? run<bfloat16>(params) : run<float>(params);
}

}  // namespace specops::SPECOPS_ISA
