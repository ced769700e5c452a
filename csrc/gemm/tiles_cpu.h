// SPDX-License-Identifier: Apache-2.0
// The tile instructions of AMX (CPUID: AMX-TILE, AMX-BF16, AMX-INT8), each a function of tile numbers.
// Tests put a model of them in their place (SPECOPS_AMX_MODEL), since few machines have them.
#pragma once

#include <cstdint>

namespace specops::SPECOPS_ISA {
namespace {

constexpr int kTileRows = 16;      // at most
constexpr int kTileRowBytes = 64;  // at most

// What ldtilecfg reads: eight tiles, each so many rows of so many bytes.
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

// The intrinsics take literal numbers alone, no template arguments.

// Zeroes all tiles.
inline void configure_tiles(const TileConfig& config) {
  asm volatile("ldtilecfg %0" : : "m"(config));
}

inline void release_tiles() { asm volatile("tilerelease"); }

template <int kTile>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

// Rows `stride` bytes apart.
template <int kTile>
inline void load_tile(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
inline void store_tile(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(kTile) : "memory");
}

// sums += a * b: of a, a row is inputs in pairs; of b, a row is a pair of each output.
template <int kSums, int kA, int kB>
inline void dot_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kA), "i"(kB));
}

// The same of integers of 8 bits, in fours in place of pairs.
template <int kSums, int kA, int kB>
inline void dot_signed_tiles() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kA), "i"(kB));
}

// Those of a have no sign.
template <int kSums, int kA, int kB>
inline void dot_unsigned_tiles() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kA), "i"(kB));
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
#endif
