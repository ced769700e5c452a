// SPDX-License-Identifier: Apache-2.0
// On CUDA, many rows are rounded before they are multiplied with quantized weights. This file has
// the sizes of rounded rows and the weights that support them; rounded_rows.cuh has the layout.
#pragma once

#include <cstdint>

#include "common/cuda_stream.h"
#include "common/isa.h"
#include "gemm/experts.h"
#include "gemm/integer_rows.h"

namespace specops {

constexpr int64_t kRoundedRows = 64;  // rows of a tile

// Returns the bytes of 128 inputs of a tile: a byte per row, input and plane of integers, and per
// row four scales and four sums.
SPECOPS_HOST_DEVICE constexpr int64_t rounded_stage_bytes(int64_t planes) {
  return kRoundedRows * (planes * 128 + 32);
}

// Returns the steps of 32 inputs per piece of tiles of a quantized weight; 0 if there are no tiles of
// its form. The forms cover what files of models contain.
inline int code_tile_steps(const WeightParams& weight) {
  constexpr int64_t kMostTileInputs = 1 << 20;  // see code_tile_plan()
  bool is_int4 = weight.kind == WeightKind::kInt4;
  if (!is_in_panels(weight.kind)) return 0;
  if (weight.num_inputs == 0 || weight.num_inputs > kMostTileInputs) return 0;
  if (weight.offsets != nullptr && (!is_int4 || weight.code_values != nullptr)) return 0;
  if (weight.group == 0 ? is_int4 : weight.group % kInt8Group != 0) return 0;
  if (weight.row_numbers == RowNumbers::kInt8) return 1;
  if (weight.group % kIntegerGroup == 0) return 4;
  return is_int4 || weight.group % 64 == 0 ? 0 : 1;
}

// A tile begins with the place of its rows, and a gap; its stages follow.
constexpr int64_t kTileHeadBytes = 4 * kRoundedRows;

// Returns the bytes of a tile of `stages` stages.
SPECOPS_HOST_DEVICE constexpr int64_t rounded_tile_bytes(int64_t stages, int64_t planes) {
  return kTileHeadBytes + stages * rounded_stage_bytes(planes);
}

// Returns the floats of a tile per row.
inline int64_t rounded_row_floats(const WeightParams& weight) {
  int64_t stages = (weight.num_inputs + kCodeStage - 1) / kCodeStage;
  int64_t planes = weight.row_numbers == RowNumbers::kInt8 ? 1 : 2;
  return rounded_tile_bytes(stages, planes) / kRoundedRows / 4;
}

// Returns the floats of a workspace for `tiles` tiles of rounded rows.
inline int64_t rounded_workspace_floats(int64_t tiles, const WeightParams& weight) {
  return kWorkspaceCounters + tiles * kRoundedRows * rounded_row_floats(weight);
}

// Multiplies many rows with an integer weight: rounds all rows to the workspace, then multiplies tiles
// of them. The weight has a form of code_tile_steps(); params.workspace has at least
// rounded_workspace_floats().
SPECOPS_DECLARE_CUDA(code_tiles_cuda, ExpertsParams);

}  // namespace specops
