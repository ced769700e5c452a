// SPDX-License-Identifier: Apache-2.0
// Software implementation of the tile instructions, after Intel's description (SDM volume 2:
// LDTILECFG, TILELOADD, TDPBF16PS, TDPBSSD, TDPBUSD). A product of bf16 tiles takes two chains of
// fused multiply-adds per output, of even and of odd elements. It rounds to nearest even, treats
// denormal inputs as zeros and flushes denormal results. Products of 8-bit integers are added
// modulo 2^32. It faults where the CPU would. The payloads of NaNs, and results that become normal
// only by rounding, are not modeled.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace specops::SPECOPS_ISA {
namespace {

struct ModelTile {
  uint32_t row[kTileRows][16];
};

struct ModelState {
  TileConfig config;
  bool is_configured = false;
  ModelTile tiles[8];
};

thread_local ModelState model;

inline void fault_unless(bool condition, const char* what) {
  if (condition) return;
  std::printf("fault: %s\n", what);
  std::abort();
}

inline float flushed(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}

inline float flushed_half(uint32_t word, bool odd) {
  uint32_t bits = odd ? word & 0xffff0000u : word << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return flushed(x);
}

inline void configure_tiles(const TileConfig& config) {
  fault_unless(config.palette == 1 && config.start_row == 0, "palette and first row");
  for (int i = 0; i < 16; ++i) {
    bool is_used = config.rows[i] != 0;
    fault_unless(config.rows[i] <= kTileRows && config.row_bytes[i] <= kTileRowBytes, "size");
    fault_unless(is_used == (config.row_bytes[i] != 0) && (i < 8 || !is_used), "tiles there are");
  }
  std::memset(model.tiles, 0, sizeof(model.tiles));
  model.config = config;
  model.is_configured = true;
}

inline void release_tiles() { model.is_configured = false; }

template <int kTile>
ModelTile& model_tile() {
  static_assert(kTile >= 0 && kTile < 8);
  fault_unless(model.is_configured && model.config.rows[kTile] != 0, "a tile of the configuration");
  return model.tiles[kTile];
}

template <int kTile>
inline void zero_tile() {
  std::memset(&model_tile<kTile>(), 0, sizeof(ModelTile));
}

template <int kTile>
inline void load_tile(const void* p, int64_t stride) {
  ModelTile& tile = model_tile<kTile>();
  std::memset(&tile, 0, sizeof(tile));
  for (int row = 0; row < model.config.rows[kTile]; ++row) {
    std::memcpy(
        tile.row[row], static_cast<const char*>(p) + row * stride, model.config.row_bytes[kTile]);
  }
}

template <int kTile>
inline void store_tile(void* p, int64_t stride) {
  const ModelTile& tile = model_tile<kTile>();
  for (int row = 0; row < model.config.rows[kTile]; ++row) {
    std::memcpy(static_cast<char*>(p) + row * stride, tile.row[row], model.config.row_bytes[kTile]);
  }
}

// Checks that the tiles of a product have shapes that fit.
template <int kSums, int kA, int kB>
inline void check_shapes() {
  static_assert(kSums != kA && kA != kB && kSums != kB);
  const TileConfig& config = model.config;
  fault_unless(config.rows[kSums] == config.rows[kA], "rows of sums and a");
  fault_unless(config.row_bytes[kSums] == config.row_bytes[kB], "columns of sums and b");
  fault_unless(config.row_bytes[kA] == 4 * config.rows[kB], "columns of a, rows of b");
}

template <int kSums, int kA, int kB>
inline void dot_tiles() {
  ModelTile &sums = model_tile<kSums>(), &a = model_tile<kA>(), &b = model_tile<kB>();
  check_shapes<kSums, kA, kB>();
  const TileConfig& config = model.config;
  for (int m = 0; m < config.rows[kSums]; ++m) {
    for (int n = 0; n < config.row_bytes[kSums] / 4; ++n) {
      float even = 0.0f, odd = 0.0f, sum;
      for (int k = 0; k < config.rows[kB]; ++k) {
        uint32_t x = a.row[m][k], w = b.row[k][n];
        even = flushed(std::fma(flushed_half(x, false), flushed_half(w, false), even));
        odd = flushed(std::fma(flushed_half(x, true), flushed_half(w, true), odd));
      }
      std::memcpy(&sum, &sums.row[m][n], 4);
      sum = flushed(flushed(sum) + flushed(even + odd));
      std::memcpy(&sums.row[m][n], &sum, 4);
    }
  }
}

template <int kSums, int kA, int kB, typename ByteOfA>
inline void dot_byte_tiles() {
  ModelTile &sums = model_tile<kSums>(), &a = model_tile<kA>(), &b = model_tile<kB>();
  check_shapes<kSums, kA, kB>();
  const TileConfig& config = model.config;
  for (int m = 0; m < config.rows[kSums]; ++m) {
    for (int n = 0; n < config.row_bytes[kSums] / 4; ++n) {
      for (int k = 0; k < config.rows[kB]; ++k) {
        for (int shift = 0; shift < 32; shift += 8) {
          int x = static_cast<ByteOfA>(a.row[m][k] >> shift);
          int w = static_cast<int8_t>(b.row[k][n] >> shift);
          sums.row[m][n] += static_cast<uint32_t>(x * w);
        }
      }
    }
  }
}

template <int kSums, int kA, int kB>
inline void dot_signed_tiles() {
  dot_byte_tiles<kSums, kA, kB, int8_t>();
}

template <int kSums, int kA, int kB>
inline void dot_unsigned_tiles() {
  dot_byte_tiles<kSums, kA, kB, uint8_t>();
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
