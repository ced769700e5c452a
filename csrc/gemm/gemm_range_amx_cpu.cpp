// SPDX-License-Identifier: Apache-2.0
#include "gemm/gemm_range.h"
#include "gemm/integer_tile_cpu.h"
#include "gemm/tiles_cpu.h"

namespace specops::avx512_bf16 {
uint64_t next_product();
void gemm_range(const GemmParams& params, const GemmRange& range);
}  // namespace specops::avx512_bf16

namespace specops::SPECOPS_ISA {
namespace {

constexpr int kTileInputs = 64;  // at most, per tile product
constexpr int kTileWords = kTileRows * kWeightBlock;
constexpr int kPieceTiles = kIntegerGroup / kTileInputs;  // at most
constexpr int kRowTiles = kIntegerRowsKept / kTileRows;   // at most

// Unpacked values of a piece of a panel as AMX tiles of weights: a row of a tile has four inputs of
// each output of a block.
struct PieceCodes {
  alignas(64) uint8_t values[kPanelBlocks][kPieceTiles][4 * kTileWords];
};

// Sums of products of one piece, for a tile of rows and a panel.
struct PieceSums {
  alignas(64) int32_t values[kTileRows * kPanelOutputs];
};

// Rows of 16-bit integers as AMX tiles: for every 64 inputs, first the high bytes, then the low
// bytes.
struct WideTiles {
  using Integer = int16_t;
  static constexpr bool kIsWide = true;
  static void arrange(int16_t* integers, int64_t count) {
    split_bytes<kTileInputs>(integers, count);
  }
  static const void* bytes_at(const int16_t* x, int64_t input) {
    int64_t within = input % kTileInputs;
    return reinterpret_cast<const uint8_t*>(x + (input - within)) + within;
  }
  // Tiles 0 to 3 hold the sums for the high and low bytes of a block, then of the next block.
  static void multiply(const void* x,
                       int64_t stride,
                       int tiles,
                       const PieceCodes& codes,
                       PieceSums& high,
                       PieceSums& low) {
    const auto* bytes = static_cast<const uint8_t*>(x);
    for (int b = 0; b < kPanelBlocks; b += 2) {
      zero_tile<0>();
      zero_tile<1>();
      zero_tile<2>();
      zero_tile<3>();
      for (int t = 0; t < tiles; ++t) {
        load_tile<4>(bytes + 2 * t * kTileInputs, stride);
        load_tile<5>(bytes + (2 * t + 1) * kTileInputs, stride);
        load_tile<6>(codes.values[b][t], kTileRowBytes);
        load_tile<7>(codes.values[b + 1][t], kTileRowBytes);
        dot_signed_tiles<0, 4, 6>();
        dot_unsigned_tiles<1, 5, 6>();
        dot_signed_tiles<2, 4, 7>();
        dot_unsigned_tiles<3, 5, 7>();
      }
      store_tile<0>(high.values + b * kWeightBlock, kPanelOutputs * 4);
      store_tile<1>(low.values + b * kWeightBlock, kPanelOutputs * 4);
      store_tile<2>(high.values + (b + 1) * kWeightBlock, kPanelOutputs * 4);
      store_tile<3>(low.values + (b + 1) * kWeightBlock, kPanelOutputs * 4);
    }
  }
};

// Rows of 8-bit integers as AMX tiles, in the order of the inputs. A piece is at most one tile.
struct NarrowTiles {
  using Integer = int8_t;
  static constexpr bool kIsWide = false;
  static void arrange(int8_t*, int64_t) {}
  static const void* bytes_at(const int8_t* x, int64_t input) { return x + input; }
  static void multiply(
      const void* x, int64_t stride, int, const PieceCodes& codes, PieceSums&, PieceSums& sums) {
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
    load_tile<4>(x, stride);
    load_tile<6>(codes.values[0][0], kTileRowBytes);
    load_tile<7>(codes.values[1][0], kTileRowBytes);
    dot_signed_tiles<0, 4, 6>();
    dot_signed_tiles<1, 4, 7>();
    load_tile<6>(codes.values[2][0], kTileRowBytes);
    load_tile<7>(codes.values[3][0], kTileRowBytes);
    dot_signed_tiles<2, 4, 6>();
    dot_signed_tiles<3, 4, 7>();
    store_tile<0>(sums.values, kPanelOutputs * 4);
    store_tile<1>(sums.values + kWeightBlock, kPanelOutputs * 4);
    store_tile<2>(sums.values + 2 * kWeightBlock, kPanelOutputs * 4);
    store_tile<3>(sums.values + 3 * kWeightBlock, kPanelOutputs * 4);
  }
};

// Configures the AMX tiles for `rows` rows and pieces of `inputs` inputs.
inline void configure(int rows, int64_t inputs) {
  TileConfig config;
  int tile_inputs = static_cast<int>(min64(inputs, kTileInputs));
  for (int tile : {0, 1, 2, 3}) {
    config.rows[tile] = static_cast<uint8_t>(rows);
    config.row_bytes[tile] = kTileRowBytes;
  }
  for (int tile : {4, 5}) {
    config.rows[tile] = static_cast<uint8_t>(rows);
    config.row_bytes[tile] = static_cast<uint16_t>(tile_inputs);
  }
  for (int tile : {6, 7}) {
    config.rows[tile] = static_cast<uint8_t>(tile_inputs / 4);
    config.row_bytes[tile] = kTileRowBytes;
  }
  configure_tiles(config);
}

// Unpacks the quantized values of `chunks` chunks and subtracts their bias. If a piece ends before
// its last tile does, the tile keeps old values there; they are multiplied by zeros.
template <typename Kind>
void read_codes(const Kind& kind, const uint8_t* chunk, int64_t chunks, PieceCodes& codes) {
  using Bytes = uint8_t __attribute__((vector_size(sizeof(Codes))));
  constexpr int kLines = kChunkInputs / Kind::kLineInputs, kQuads = Kind::kLineInputs / 4;
  for (int64_t c = 0; c < chunks; ++c, chunk += kPanelChunkBytes<Kind>) {
    for (int b = 0; b < kPanelBlocks; ++b) {
      const uint8_t* line = chunk + b * kBlockChunkBytes<Kind>;
      uint8_t* out = codes.values[b][0] + c * kChunkInputs * kWeightBlock;
      for (int i = 0; i < kLines; ++i, line += 64, out += kQuads * 64) {
        __builtin_prefetch(line + kIntegerFetch, 0, 3);
        for (size_t at = 0; at < 64; at += sizeof(Codes)) {
          Codes own = load_codes(line + at);
          for (int quad = 0; quad < kQuads; ++quad) {
            Bytes values = (Bytes)kind.quad(own, quad) - static_cast<uint8_t>(Kind::kBias);
            std::memcpy(out + quad * 64 + at, &values, sizeof(values));
          }
        }
      }
    }
  }
}

// Adds the sums of a piece to the totals of a tile of rows and a panel.
template <bool kIsWide>
void add_piece(const PieceSums& high,
               const PieceSums& low,
               int rows,
               const float* steps,
               const float* scales,
               float* totals) {
  using Words = int32_t __attribute__((vector_size(sizeof(Sums))));
  for (int r = 0; r < rows; ++r) {
    Floats step = spread_float(steps[r]);
    for (int i = 0; i < kPanelOutputs; i += kPartOutputs) {
      int at = r * kPanelOutputs + i;
      Words sum, upper;
      std::memcpy(&sum, low.values + at, sizeof(sum));
      if constexpr (kIsWide) {
        std::memcpy(&upper, high.values + at, sizeof(upper));
        sum += upper * 256;
      }
      Floats scale = scales == nullptr ? step : times(step, load_floats(scales + i));
      store_floats(totals + at, fused(floats((Sums)sum), scale, load_floats(totals + at)));
    }
  }
}

// Computes out[row, n] = bias[n] + sum_k x[row, k] * weight[n, k] for up to 64 rows and a panel.
// Cost:    the panel once from memory or cache; for 16 rows and a block, two tile products per 64
//          inputs with 16-bit rows, one per 32 inputs with 8-bit rows.
// Assumes: weights packed by pack_weight; rows rounded to integers for tiles; tiles configured.
// Order:   as integer_tile (integer_tile_cpu.h): sums of a piece are exact, and pieces are added by
//          one chain of fused multiply-adds. So the bits equal those of every other instruction
//          set.
// Source:  TDPBSSD, TDPBUSD, Intel SDM volume 2.
// Threads: none here.
template <typename Kind, typename Tiles>
void panel_of_tiles(const GemmParams& params,
                    const IntegerRows<typename Tiles::Integer>& rows,
                    int64_t row,
                    int64_t count,
                    int64_t panel) {
  const WeightParams& weight = params.weight;
  Kind kind(weight);
  Pieces pieces(weight);
  bool grouped = weight.group != 0, shifted = weight.offsets != nullptr;
  int64_t pieces_of_group = grouped ? weight.group / pieces.inputs : pieces.count;
  int64_t first_group = grouped ? panel * scale_groups(weight.num_inputs, weight.group) : 0;
  const auto* chunk = static_cast<const uint8_t*>(weight.data);
  chunk += panel * panel_bytes<Kind>(weight.num_inputs);
  int64_t chunks = weight_chunks(weight.num_inputs);
  int height = static_cast<int>(min64(count, kTileRows));
  int tiles = static_cast<int>(ceil_div(pieces.inputs, kTileInputs));
  PieceCodes codes{};
  PieceSums high, low;
  alignas(64) float totals[kRowTiles][kTileRows * kPanelOutputs] = {};
  // The last tile may overlap the previous one; both then compute the complete totals of the shared
  // rows.
  auto row_of = [&](int64_t t) { return min64(t * kTileRows, count - height); };
  int64_t row_tiles = ceil_div(count, kTileRows);
  for (int64_t piece = 0; piece < pieces.count; ++piece) {
    int64_t own = min64(pieces.inputs / kChunkInputs, chunks);
    int64_t bytes = own * kPanelChunkBytes<Kind>;
    for (int64_t i = 0; i < bytes; i += kPageFetchEvery) fetch_page(chunk + kPageFetch + i);
    read_codes(kind, chunk, own, codes);
    int64_t at = (first_group + piece / pieces_of_group) * kPanelOutputs;
    const float* scales = grouped ? weight.scales + at : nullptr;
    for (int64_t t = 0; t < row_tiles; ++t) {
      int64_t first = row_of(t);
      const void* x = Tiles::bytes_at(rows.x + first * rows.stride, piece * pieces.inputs);
      int64_t stride = rows.stride * static_cast<int64_t>(sizeof(typename Tiles::Integer));
      const float* steps = rows.scales + piece * rows.count + first;
      Tiles::multiply(x, stride, tiles, codes, high, low);
      add_piece<Tiles::kIsWide>(high, low, height, steps, scales, totals[t]);
      if (!shifted) continue;
      const float* row_sums = rows.sums + piece * rows.count + first;
      for (int r = 0; r < height; ++r) {
        add_offsets<1>(steps + r, row_sums + r, weight.offsets + at, totals[t] + r * kPanelOutputs);
      }
    }
    chunk += bytes;
    chunks -= own;
  }
  for (int64_t t = 0; t < row_tiles; ++t) {
    finish_panel<kTileRows>(params, row + row_of(t), height, panel, totals[t]);
  }
}

template <typename Kind, typename Tiles>
void range_of_tiles(const GemmParams& params, const GemmRange& range) {
  fetch_first<Kind>(params.weight, range.begin);
  for_kept_rows<Tiles>(params, range, Kind::kBias, [&](auto rows, int64_t row, int64_t count) {
    configure(static_cast<int>(min64(count, kTileRows)), Pieces(params.weight).inputs);
    for (int64_t panel = range.begin; panel < range.end; ++panel) {
      panel_of_tiles<Kind, Tiles>(params, rows, row, count, panel);
    }
  });
  release_tiles();  // so that the kernel need not save them when it preempts this thread
}

}  // namespace

uint64_t next_product() { return avx512_bf16::next_product(); }

// Does the same as gemm_range in gemm_range_cpu.cpp. For int8 and int4 weights with more rows than
// a vector tile has, AMX tiles compute the product, with the same bits.
void gemm_range(const GemmParams& params, const GemmRange& range) {
  bool is_tall = range.row_end - range.row_begin > kIntegerRows;
  if (!is_in_panels(params.weight.kind) || !is_tall) return avx512_bf16::gemm_range(params, range);
  with_codes(params.weight, [&]<typename Kind>() {
    bool is_narrow = params.weight.row_numbers == RowNumbers::kInt8;
    auto* tiles = is_narrow ? range_of_tiles<Kind, NarrowTiles> : range_of_tiles<Kind, WideTiles>;
    tiles(params, range);
  });
}

}  // namespace specops::SPECOPS_ISA
