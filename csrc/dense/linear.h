// SPDX-License-Identifier: Apache-2.0
// linear: x * weight^T (+ bias) over packed weights, one order of additions per output element; of a
// weight that holds gates and ups, activation(gate) * up of these.
// pack_weight: brings a weight into its layout (gemm/weight.h).
#pragma once

#include <cstdint>

#include "common/cuda_stream.h"
#include "common/error_flag.h"
#include "common/isa.h"
#include "gemm/gemm.h"

namespace specops {

// Up to so many rows a warp multiplies its weights with all rows as they stream by. Above, blocks
// multiply tiles of 128 outputs with tiles of rows; the result is the same bit for bit.
constexpr int64_t kLinearStreamRows = 16;
constexpr int64_t kLinearTileOutputs = 128;

inline int64_t linear_tile_rows(int64_t rows) { return rows <= 64 ? 64 : 128; }

// The kernels for 16-bit types, by the outputs and rows that a warp (stream) or a block (tile) has.
enum class LinearKernel {
  kByShape,  // whichever suits
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

// The workspace begins with so many int32: of each split tile, how many of its leaves are there. They
// are zero before and after every call. One call at a time may have a workspace.
constexpr int64_t kLinearCounters = 128;

// Whether each leaf of a tile gets a block of its own, so that few tiles keep a large GPU busy.
inline bool linear_splits(int64_t rows, int64_t num_outputs, int64_t num_inputs, DType dtype) {
  if (dtype == DType::kFloat32 || rows <= kLinearStreamRows) return false;
  constexpr int64_t kMaxBlocks = 2 * kLinearCounters;  // of two leaves or more
  int64_t leaves = sum_leaves(num_inputs).leaves;
  int64_t tile_rows = linear_tile_rows(rows);
  int64_t tiles = (rows + tile_rows - 1) / tile_rows *
                  ((num_outputs + kLinearTileOutputs - 1) / kLinearTileOutputs);
  return leaves > 1 && tiles * leaves <= kMaxBlocks;
}

// Floats of a workspace for that: the counters, and the leaves of every output.
inline int64_t linear_workspace_floats(int64_t rows, int64_t num_outputs, int64_t num_inputs) {
  return kLinearCounters +
         sum_leaves(num_inputs).leaves * rows * weight_groups(num_outputs) * kWeightGroup;
}

// The most rows whose leaves are ever split; 0 for none.
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
  const void* weight;  // [num_outputs, num_inputs], rows weight_stride apart
  void* packed;        // as gemm/weight.h describes it
  int64_t num_outputs;
  int64_t num_inputs;
  int64_t weight_stride;  // elements between rows
  DType dtype;            // bfloat16, float32 or a code's; CUDA: or float16
  Activation activation;  // if any, the first half of the outputs are gates, the others ups
};

struct LinearParams : GemmParams {
  float* workspace;        // CUDA: counters and leaves of split sums; may be nullptr
  int64_t workspace_size;  // floats; too few: nothing is split
  LinearKernel kernel;     // CUDA, 16-bit types
  ErrorFlag error;
};

SPECOPS_DECLARE_CPU(pack_weight_cpu, PackWeightParams);
SPECOPS_DECLARE_CPU(linear_cpu, LinearParams);
SPECOPS_DECLARE_CUDA(pack_weight_cuda, PackWeightParams);
SPECOPS_DECLARE_CUDA(linear_cuda, LinearParams);

// The parts of both that are about codes.
SPECOPS_DECLARE_CUDA(pack_codes_cuda, PackWeightParams);
SPECOPS_DECLARE_CUDA(linear_codes_cuda, LinearParams);

}  // namespace specops
