// SPDX-License-Identifier: Apache-2.0
// linear: x * weight^T (+ bias) over packed weights, one order of additions per output element.
// pack_weight: brings a weight into that layout.
//
// Layout on cpu: outputs in blocks of 16, inputs in steps of one 32-bit word: a float, or two
// bfloat16. packed[block][step] is 64 bytes, word i being inputs `step` of output 16 * block + i.
//
// Layout on CUDA, 16-bit types: outputs in groups of 32, two tiles of 16 each; inputs in steps of
// 32, two to a stage. packed[tile][step] is 1,024 bytes: for each half of the tile's outputs, and
// each lane = 4 * g + t of a warp, the inputs 32 * step + 8 * t + {0 .. 7} of output
// 32 * group + 4 * g + 2 * (tile % 2) + half. So a lane reads its fragments of two mma.m16n8k16 with
// two accesses of 16 bytes, and holds four neighbouring outputs of a group when it is done.
//
// Layout on CUDA, float32: packed[group][quad] is 512 bytes: for each of 32 outputs the inputs
// 4 * quad + {0 .. 3}.
//
// Numbers past the last output or input are zero.
#pragma once

#include <cstdint>

#include "common/cuda_stream.h"
#include "common/dtype.h"
#include "common/host_device.h"
#include "common/isa.h"

namespace specops {

constexpr int64_t kLinearBlock = 16;  // outputs that share a block

inline int64_t linear_blocks(int64_t num_outputs) {
  return (num_outputs + kLinearBlock - 1) / kLinearBlock;
}

inline int64_t linear_steps(int64_t num_inputs, DType dtype) {
  return dtype == DType::kBFloat16 ? (num_inputs + 1) / 2 : num_inputs;
}

// What follows is about CUDA.

constexpr int64_t kLinearGroup = 32;  // outputs
constexpr int64_t kLinearStage = 64;  // inputs

SPECOPS_HOST_DEVICE int64_t linear_groups(int64_t num_outputs) {
  return (num_outputs + kLinearGroup - 1) / kLinearGroup;
}

// The sum over inputs is cut into leaves at fixed inputs: up to four of equal length, none shorter
// than 512 (the last one may be). A leaf is one chain of additions; leaves are then added in order.
// This depends on the number of inputs alone: which warp or block computes a leaf is a schedule.
struct LinearLeaves {
  int64_t stages;       // of all inputs
  int64_t leaf_stages;  // of a leaf
  int64_t leaves;       // at least 1
};

inline LinearLeaves linear_leaves(int64_t num_inputs) {
  constexpr int64_t kMaxLeaves = 4;
  constexpr int64_t kMinLeafStages = 8;
  int64_t stages = (num_inputs + kLinearStage - 1) / kLinearStage;
  int64_t leaf_stages = (stages + kMaxLeaves - 1) / kMaxLeaves;
  if (leaf_stages < kMinLeafStages) leaf_stages = kMinLeafStages;
  int64_t leaves = (stages + leaf_stages - 1) / leaf_stages;
  return {stages, leaf_stages, leaves > 0 ? leaves : 1};
}

// Up to so many rows a warp multiplies its weights with all rows as they stream by. Above, blocks
// multiply tiles of 128 outputs with tiles of rows; the result is the same bit for bit.
constexpr int64_t kLinearStreamRows = 16;
constexpr int64_t kLinearTileOutputs = 128;

inline int64_t linear_tile_rows(int64_t rows) { return rows <= 64 ? 64 : 128; }

// Whether each leaf of a tile gets a block of its own, so that few tiles keep a large GPU busy.
inline bool linear_splits(int64_t rows, int64_t num_outputs, int64_t num_inputs, DType dtype) {
  if (dtype == DType::kFloat32 || rows <= kLinearStreamRows) return false;
  constexpr int64_t kMaxBlocks = 256;
  int64_t leaves = linear_leaves(num_inputs).leaves;
  int64_t tile_rows = linear_tile_rows(rows);
  int64_t tiles = (rows + tile_rows - 1) / tile_rows *
                  ((num_outputs + kLinearTileOutputs - 1) / kLinearTileOutputs);
  return leaves > 1 && tiles * leaves <= kMaxBlocks;
}

// Floats of a workspace for that: the leaves of every output.
inline int64_t linear_workspace_floats(int64_t rows, int64_t num_outputs, int64_t num_inputs) {
  return linear_leaves(num_inputs).leaves * rows * linear_groups(num_outputs) * kLinearGroup;
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
  void* packed;        // as described above
  int64_t num_outputs;
  int64_t num_inputs;
  int64_t weight_stride;  // elements between rows
  DType dtype;            // bfloat16 or float32; CUDA: or float16
};

struct LinearParams {
  const void* x;       // [rows, num_inputs], rows x_stride apart
  const void* packed;  // as pack_weight writes it
  const void* bias;    // [num_outputs], of dtype; may be nullptr
  void* out;           // [rows, num_outputs], contiguous
  int64_t rows;
  int64_t num_outputs;
  int64_t num_inputs;
  int64_t x_stride;        // elements between rows
  DType dtype;             // bfloat16 or float32, CUDA: or float16; of x, weight and bias
  DType out_dtype;         // of out: dtype, or float32
  float* workspace;        // CUDA: leaves of split sums; may be nullptr
  int64_t workspace_size;  // floats; too few: nothing is split
};

SPECOPS_DECLARE_CPU(pack_weight_cpu, PackWeightParams);
SPECOPS_DECLARE_CPU(linear_cpu, LinearParams);
SPECOPS_DECLARE_CUDA(pack_weight_cuda, PackWeightParams);
SPECOPS_DECLARE_CUDA(linear_cuda, LinearParams);

}  // namespace specops
