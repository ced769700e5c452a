// SPDX-License-Identifier: Apache-2.0
// Order of the tiles of a product among blocks.
#pragma once

#include "common/device.cuh"
#include "gemm/gemm.h"

namespace specops {

constexpr int kTileBand = 16;  // row tiles per band

template <typename Shape>
__device__ inline int64_t output_tiles(const GemmParams& params) {
  return (params.weight.num_outputs + Shape::kOutputs - 1) / Shape::kOutputs;
}

// Place of a block among the tiles: rows are fastest within bands of row tiles, so that the blocks
// which run together share weights and x in the L2 cache.
struct BandPlace {
  int64_t row_tile, output_tile;

  __device__ BandPlace(int64_t row_tiles, int64_t output_tiles) {
    int64_t band = blockIdx.x / (output_tiles * kTileBand);
    int64_t in_band = blockIdx.x % (output_tiles * kTileBand);
    int64_t band_rows = min(row_tiles - band * kTileBand, int64_t{kTileBand});
    row_tile = band * kTileBand + in_band % band_rows;
    output_tile = in_band / band_rows;
  }
};

}  // namespace specops
