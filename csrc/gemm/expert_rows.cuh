// SPDX-License-Identifier: Apache-2.0
// Tiles of rows that have the same expert, and the addresses of their rows.
#pragma once

#include "common/device.cuh"
#include "gemm/experts.h"

namespace specops {

constexpr int kExpertRows = 8;  // rows per tile, unless a kernel has larger ones

// Returns an upper bound on the number of tiles of `tile_rows` rows for `pairs` pairs: each expert
// may have one incomplete tile.
inline int64_t most_row_tiles(int64_t pairs, int64_t num_experts, int64_t tile_rows = kExpertRows) {
  return pairs / tile_rows + (num_experts < pairs ? num_experts : pairs);
}

// A tile of rows of one expert. rows is 0 if the tile does not exist.
struct ExpertTile {
  int expert, first, rows;
};

// Returns tile `index`, counted over the rows of all experts in order. Every warp of a block calls
// it. There are no tiles from the first expert with a fault on, because later row ranges could
// overlap earlier ones.
template <int kTileRows = kExpertRows>
__device__ inline ExpertTile expert_tile(const ExpertsParams& params, int64_t index) {
  int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  int experts = static_cast<int>(params.num_experts), left = static_cast<int>(index);
  for (int first = 0; first < experts; first += kWarpSize) {
    int expert = first + lane, begin = 0, end = 0;
    bool is_wrong = false;
    if (expert < experts) {
      Fault fault = find_expert_fault(params, expert);
      is_wrong = fault.found();
      if (is_wrong) {
        report_error(params.error, fault.code);
      } else {
        begin = params.expert_indptr[expert];
        end = params.expert_indptr[expert + 1];
      }
    }
    unsigned wrong = __ballot_sync(kFullMask, is_wrong);
    if (wrong != 0 && lane >= __ffs(static_cast<int>(wrong))) end = begin;
    int tiles = (end - begin + kTileRows - 1) / kTileRows, sum = tiles;
#pragma unroll
    for (int apart = 1; apart < kWarpSize; apart *= 2) {
      int other = __shfl_up_sync(kFullMask, sum, apart);
      if (lane >= apart) sum += other;
    }
    unsigned reach = __ballot_sync(kFullMask, sum > left);
    if (reach != 0) {
      int owner = __ffs(static_cast<int>(reach)) - 1;
      int within = left - __shfl_sync(kFullMask, sum - tiles, owner);
      int at = __shfl_sync(kFullMask, begin, owner) + within * kTileRows;
      int rows = min(__shfl_sync(kFullMask, end, owner) - at, kTileRows);
      return {first + owner, at, rows};
    }
    if (wrong != 0) break;
    left -= __shfl_sync(kFullMask, sum, kWarpSize - 1);
  }
  return {0, 0, 0};
}

// Returns the address in x of row `row` of a tile. An invalid row is reported as a fault and reads
// as zeros.
template <typename T>
__device__ inline const T* expert_row(const ExpertsParams& params,
                                      const ExpertTile& tile,
                                      int64_t row) {
  int64_t from = tile.first + row;
  if (params.row_indices != nullptr) {
    Fault fault = find_row_fault(params, from);
    if (fault.found()) {
      report_error(params.error, fault.code);
      return nullptr;
    }
    from = params.row_indices[from];
  }
  return static_cast<const T*>(params.x) + from * params.x_stride;
}

}  // namespace specops
