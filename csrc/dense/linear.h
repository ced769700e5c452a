// SPDX-License-Identifier: Apache-2.0
// linear: x * weight^T (+ bias) over packed weights, one order of additions per output element; of a
// weight that holds gates and ups, activation(gate) * up of these.
// pack_weight: brings a weight into that layout.
//
// Layout on cpu: outputs in blocks of 16, inputs in steps of one 32-bit word: a float, or two
// bfloat16. packed[block][step] is 64 bytes, word i being inputs `step` of output 16 * block + i.
//
// Layout on CUDA, 16-bit types: outputs in groups of 32, two tiles of 16 each; inputs in steps of
// 32, two to a stage. packed[tile][step] is 1,024 bytes: for each half of the step, and each lane =
// 4 * g + t of a warp, the four registers of A of one mma.m16n8k16, two inputs each: with first =
// 32 * step + 8 * t + 4 * half and output = 32 * group + 4 * g + 2 * (tile % 2),
//   inputs first, first + 1 of output; the same of output + 1;
//   inputs first + 2, first + 3 of output; the same of output + 1.
// So one access of 16 bytes is a fragment, with nothing to move between registers, and a lane holds
// four neighbouring outputs of a group when it is done.
//
// Layout on CUDA, float32: packed[group][quad] is 512 bytes: for each of 32 outputs the inputs
// 4 * quad + {0 .. 3}.
//
// Numbers past the last output or input are zero.
//
// A weight of gate and up, so many outputs each, is packed so that whoever computes a gate has its up
// beside it: on CUDA outputs 2 i and 2 i + 1 of the above are gate i and up i, on cpu blocks 2 i and
// 2 i + 1 are block i of the gates and block i of the ups.
#pragma once

#include <cstdint>

#include "common/cuda_stream.h"
#include "common/dtype.h"
#include "common/error_flag.h"
#include "common/host_device.h"
#include "common/isa.h"
#include "dense/gated.h"

namespace specops {

constexpr int64_t kLinearBlock = 16;  // outputs that share a block

inline int64_t linear_blocks(int64_t num_outputs) {
  return (num_outputs + kLinearBlock - 1) / kLinearBlock;
}

// Of all of a packed weight.
inline int64_t linear_packed_blocks(int64_t num_outputs, Activation activation) {
  return is_gated(activation) ? 2 * linear_blocks(num_outputs / 2) : linear_blocks(num_outputs);
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

constexpr int64_t kLinearMaxLeaves = 4;

inline LinearLeaves linear_leaves(int64_t num_inputs) {
  constexpr int64_t kMinLeafStages = 8;
  int64_t stages = (num_inputs + kLinearStage - 1) / kLinearStage;
  int64_t leaf_stages = (stages + kLinearMaxLeaves - 1) / kLinearMaxLeaves;
  if (leaf_stages < kMinLeafStages) leaf_stages = kMinLeafStages;
  int64_t leaves = (stages + leaf_stages - 1) / leaf_stages;
  return {stages, leaf_stages, leaves > 0 ? leaves : 1};
}

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
  int64_t leaves = linear_leaves(num_inputs).leaves;
  int64_t tile_rows = linear_tile_rows(rows);
  int64_t tiles = (rows + tile_rows - 1) / tile_rows *
                  ((num_outputs + kLinearTileOutputs - 1) / kLinearTileOutputs);
  return leaves > 1 && tiles * leaves <= kMaxBlocks;
}

// Floats of a workspace for that: the counters, and the leaves of every output.
inline int64_t linear_workspace_floats(int64_t rows, int64_t num_outputs, int64_t num_inputs) {
  return kLinearCounters +
         linear_leaves(num_inputs).leaves * rows * linear_groups(num_outputs) * kLinearGroup;
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
  Activation activation;  // if any, the first half of the outputs are gates, the others ups
};

struct LinearParams {
  const void* x;       // [rows, num_inputs], rows x_stride apart
  const void* packed;  // as pack_weight writes it
  const void* bias;    // [num_outputs], of dtype; may be nullptr
  void* out;           // [rows, num_outputs], contiguous; of gate and up half as wide
  int64_t rows;
  int64_t num_outputs;
  int64_t num_inputs;
  int64_t x_stride;        // elements between rows
  DType dtype;             // bfloat16 or float32, CUDA: or float16; of x, weight and bias
  DType out_dtype;         // of out: dtype, or float32; of gate and up dtype
  Activation activation;   // if any, packed and bias hold gates, then ups
  float* workspace;        // CUDA: counters and leaves of split sums; may be nullptr
  int64_t workspace_size;  // floats; too few: nothing is split
  LinearKernel kernel;     // CUDA, 16-bit types
  ErrorFlag error;
};

SPECOPS_DECLARE_CPU(pack_weight_cpu, PackWeightParams);
SPECOPS_DECLARE_CPU(linear_cpu, LinearParams);
SPECOPS_DECLARE_CUDA(pack_weight_cuda, PackWeightParams);
SPECOPS_DECLARE_CUDA(linear_cuda, LinearParams);

}  // namespace specops
