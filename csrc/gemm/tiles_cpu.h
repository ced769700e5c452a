// SPDX-License-Identifier: Apache-2.0
// Tile instructions of AMX (CPUID: AMX-TILE, AMX-BF16, AMX-INT8), each as a function template of
// tile numbers. Tests replace them by a software model (SPECOPS_AMX_MODEL), because few machines
// have AMX.
#pragma once

#include <cstdint>

namespace specops::SPECOPS_ISA {
namespace {

constexpr int kTileRows = 16;      // at most
constexpr int kTileRowBytes = 64;  // at most

// Operand of ldtilecfg: number of rows and bytes per row of each of the eight tiles.
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

// Inline assembly, because the intrinsics accept only literal tile numbers, not template arguments.

// Configures the tiles and sets all of them to zero.
inline void configure_tiles(const TileConfig& config) {
  asm volatile("ldtilecfg %0" : : "m"(config));
}

inline void release_tiles() { asm volatile("tilerelease"); }

template <int kTile>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

// Loads a tile whose rows are `stride` bytes apart.
template <int kTile>
inline void load_tile(const void* p, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
inline void store_tile(void* p, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(kTile) : "memory");
}

// Computes sums += a * b for bf16. A row of a holds pairs of inputs; a row of b holds one pair of
// each output.
template <int kSums, int kA, int kB>
inline void dot_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kA), "i"(kB));
}

// Computes sums += a * b for signed 8-bit integers, in groups of four inputs instead of pairs.
template <int kSums, int kA, int kB>
inline void dot_signed_tiles() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kA), "i"(kB));
}

// Computes sums += a * b for unsigned a and signed b, in groups of four inputs.
template <int kSums, int kA, int kB>
inline void dot_unsigned_tiles() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kA), "i"(kB));
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
#endif
