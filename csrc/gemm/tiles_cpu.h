// SPDX-License-Identifier: Apache-2.0
// Tile instructions of AMX (CPUID: AMX-TILE, AMX-BF16, AMX-INT8), each as a function of tile
// numbers. Tests substitute a model (SPECOPS_AMX_MODEL), because few machines have AMX.
#pragma once

#include <cstdint>

namespace specops::SPECOPS_ISA {
namespace {

constexpr int kTileRows = 16;      // at most
constexpr int kTileRowBytes = 64;  // at most

// Operand of ldtilecfg: for each of eight tiles, the number of rows and the bytes per row.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

}  // namespace
}  // namespace specops::SPECOPS_ISA

#if defined(SPECOPS_AMX_MODEL)
#include "amx_model.h"
#else

namespace specops::SPECOPS_ISA {
namespace {

// Inline assembly, because the intrinsics accept only literal numbers, not template arguments.

// Configures the tiles and zeroes all of them.
inline void configure_tiles(const TileConfig& config) {
  asm volatile("ldtilecfg %0" : : "m"(config));
}

inline void release_tiles() { asm volatile("tilerelease"); }

template <int kTile>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

// Loads a tile from rows `stride` bytes apart.
template <int kTile>
inline void load_tile(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
inline void store_tile(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(kTile) : "memory");
}

// sums += a * b. A row of a holds inputs in pairs; a row of b holds a pair of each output.
template <int kSums, int kA, int kB>
inline void dot_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kA), "i"(kB));
}

// The same for 8-bit integers, in groups of four instead of pairs.
template <int kSums, int kA, int kB>
inline void dot_signed_tiles() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kA), "i"(kB));
}

// The same with unsigned a.
template <int kSums, int kA, int kB>
inline void dot_unsigned_tiles() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kA), "i"(kB));
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
#endif
