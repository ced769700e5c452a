// SPDX-License-Identifier: Apache-2.0
// Common parts of the kernels for 16-bit weights. Weights are the 16 rows of mma.m16n8k16, and rows
// of x are its 8 columns, so each output element is a separate chain of products. The 32 inputs of
// a step are split between two instructions as in the packed layout: of the eight inputs of lane t,
// the first four go to the first instruction. A vector of packed weights is the A fragment of one
// instruction, in the order of its registers. sum_leaves() defines where chains restart and in
// which order they are added.
#pragma once

#include "common/chunk.cuh"
#include "gemm/gemm.h"

namespace specops {

struct GemmPlan {
  int stages;  // see sum_leaves()
  int leaf_stages;
  int leaves;
  bool split;    // each leaf of a tile is computed by a block of its own
  bool aligned;  // rows of x can be read in chunks of 16 bytes
  bool quads;    // out can be written four outputs at a time
};

inline GemmPlan plan_of(const GemmParams& params, bool split) {
  SumLeaves leaves = sum_leaves(params.weight.num_inputs);
  // A row can be read in whole chunks only if it ends with one: memory after the row may belong to
  // other data.
  bool aligned =
      params.dtype == DType::kFloat32
          ? chunk_aligned<float>(params.x, params.x_stride) && params.weight.num_inputs % 4 == 0
          : chunk_aligned<bfloat16>(params.x, params.x_stride) && params.weight.num_inputs % 8 == 0;
  return {
      .stages = static_cast<int>(leaves.stages),
      .leaf_stages = static_cast<int>(leaves.leaf_stages),
      .leaves = static_cast<int>(leaves.leaves),
      .split = split,
      .aligned = aligned,
      .quads =
          params.weight.num_outputs % 4 == 0 && reinterpret_cast<uintptr_t>(params.out) % 16 == 0,
  };
}

constexpr int kStepVectors = 64;                 // uint4 per tile and step
constexpr int kStageVectors = 2 * kStepVectors;  // uint4 per tile and stage

// Loads the inputs first to first + 7 of a row; zeros past the last input, and for a row that is
// nullptr.
template <typename T>
__device__ inline uint4 load_inputs(const T* row, int first, int num_inputs, bool aligned) {
  if (row == nullptr || first >= num_inputs) return make_uint4(0, 0, 0, 0);
  return load_chunk(row + first, num_inputs - first, aligned);
}

// Computes d += the products of half a step, for one tile of outputs and eight rows of x.
template <typename T, int kHalf>
__device__ inline void multiply(float (&d)[4], uint4 w, uint4 x) {
  uint2 half = kHalf == 0 ? make_uint2(x.x, x.y) : make_uint2(x.z, x.w);
  ptx::mma_m16n8k16<T>(d, {w.x, w.y, w.z, w.w}, {half.x, half.y});
}

}  // namespace specops
