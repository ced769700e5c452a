// SPDX-License-Identifier: Apache-2.0
// linear: x * weight^T (+ bias) with packed weights. Each output element has one fixed order of
// additions. If the weight is gated, the result is activation(gate) * up.
// pack_weight: converts a weight to its packed layout (gemm/weight.h).
#pragma once

#include <cstdint>

#include "common/cuda_stream.h"
#include "common/error_flag.h"
#include "common/isa.h"
#include "gemm/gemm.h"

namespace specops {

SPECOPS_FAULT(1009, kLinearWorkspace) =
    "linear: workspace must begin with 128 zeros, which every call leaves there, and serve one "
    "stream at a time, got a counter with too many arrivals";

// Up to this many rows, a warp multiplies its weights with all rows as the weights stream by. With
// more rows, blocks multiply tiles of 128 outputs with tiles of rows. Both give the same bits.
constexpr int64_t kLinearStreamRows = 16;
constexpr int64_t kLinearTileOutputs = 128;

inline int64_t linear_tile_rows(int64_t rows) { return rows <= 64 ? 64 : 128; }

// The kernels for 16-bit types. A name has the outputs and rows of a warp (stream) or of a block
// (tile).
enum class LinearKernel {
  kByShape,  // selected by shape
  kStream16x8,
  kStream32x8,
  kStream16x16,
  kStream32x16,
  kTile128x64,
  kTile128x128,
  kTile256x128,
};

struct LinearKernelName {
  const char* name;
  LinearKernel kernel;
  int64_t max_rows;
};

constexpr LinearKernelName kLinearKernels[] = {
    {"stream_16x8", LinearKernel::kStream16x8, 8},
    {"stream_32x8", LinearKernel::kStream32x8, 8},
    {"stream_16x16", LinearKernel::kStream16x16, 16},
    {"stream_32x16", LinearKernel::kStream32x16, 16},
    {"tile_128x64", LinearKernel::kTile128x64, INT64_MAX},
    {"tile_128x128", LinearKernel::kTile128x128, INT64_MAX},
    {"tile_256x128", LinearKernel::kTile256x128, INT64_MAX},
};

// Returns whether each leaf of a tile (a part of its sum over inputs) is computed by a block of its
// own, so that few tiles keep a large GPU busy.
inline bool linear_splits(int64_t rows, int64_t num_outputs, int64_t num_inputs, DType dtype) {
  if (dtype == DType::kFloat32 || rows <= kLinearStreamRows) return false;
  constexpr int64_t kMaxBlocks = 2 * kWorkspaceCounters;  // blocks of two leaves or more
  int64_t leaves = sum_leaves(num_inputs).leaves;
  int64_t tile_rows = linear_tile_rows(rows);
  int64_t tiles = (rows + tile_rows - 1) / tile_rows *
                  ((num_outputs + kLinearTileOutputs - 1) / kLinearTileOutputs);
  return leaves > 1 && tiles * leaves <= kMaxBlocks;
}

// Returns the size in floats of a workspace for split tiles: the counters, and the leaves of every
// output.
inline int64_t linear_workspace_floats(int64_t rows, int64_t num_outputs, int64_t num_inputs) {
  return kWorkspaceCounters +
         sum_leaves(num_inputs).leaves * rows * weight_groups(num_outputs) * kWeightGroup;
}

// Returns the largest number of rows for which leaves are split; 0 if they never are.
inline int64_t linear_max_split_rows(int64_t num_outputs, int64_t num_inputs, DType dtype) {
  for (int64_t rows = 256 * 128; rows > 128; rows -= 128) {
    if (linear_splits(rows, num_outputs, num_inputs, dtype)) return rows;
  }
  for (int64_t rows : {128, 64}) {
    if (linear_splits(rows, num_outputs, num_inputs, dtype)) return rows;
  }
  return 0;
}

struct PackWeightParams {
  const void* weight;  // [num_outputs, num_inputs], rows are weight_stride apart
  void* packed;        // in the layout of gemm/weight.h
  int64_t num_outputs;
  int64_t num_inputs;
  int64_t weight_stride;  // elements between rows
  DType dtype;            // bfloat16, float32 or a quantized dtype; on CUDA also float16
  Activation activation;  // if any, the first half of the outputs are gates, the rest ups
};

struct LinearParams : GemmParams {
  float* workspace;        // CUDA: counters, then leaves or rounded rows; may be nullptr
  int64_t workspace_size;  // in floats; if too small, nothing is split or rounded in advance
  LinearKernel kernel;     // CUDA, 16-bit types
  ErrorFlag error;
};

SPECOPS_DECLARE_CPU(pack_weight_cpu, PackWeightParams);
SPECOPS_DECLARE_CPU(linear_cpu, LinearParams);
SPECOPS_DECLARE_CUDA(pack_weight_cuda, PackWeightParams);
SPECOPS_DECLARE_CUDA(linear_cuda, LinearParams);

// Variants of both ops for quantized weights.
SPECOPS_DECLARE_CUDA(pack_codes_cuda, PackWeightParams);
SPECOPS_DECLARE_CUDA(linear_codes_cuda, LinearParams);

}  // namespace specops
