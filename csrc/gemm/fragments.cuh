// SPDX-License-Identifier: Apache-2.0
// Weights are the 16 rows of mma.m16n8k16 and rows of x its 8 columns, in every kernel here: each
// output element is its own chain of products, whatever stands beside it. The inputs of a step of 32
// are dealt to the two instructions as the packed layout has them: of lane t's eight, the first four
// to the first. A vector of packed weights is the A fragment of one instruction, in the order of its
// registers. sum_leaves() says where chains begin anew and how they are added.
#pragma once

#include "common/chunk.cuh"
#include "gemm/gemm.h"

namespace specops {

struct GemmPlan {
  int stages;  // as sum_leaves() has them
  int leaf_stages;
  int leaves;
  bool split;    // each leaf of a tile has a block of its own
  bool aligned;  // rows of x can be read by chunks of 16 bytes
  bool quads;    // out can be written by four outputs
};

inline GemmPlan plan_of(const GemmParams& params, bool split) {
  SumLeaves leaves = sum_leaves(params.weight.num_inputs);
  // A row may be read by whole chunks only if it ends with one: what lies behind it is not ours.
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

constexpr int kStepVectors = 64;                 // uint4 of a tile and a step
constexpr int kStageVectors = 2 * kStepVectors;  // of a tile and a stage

// Inputs first to first + 7 of a row, zeros past the last; of no row: zeros.
template <typename T>
__device__ inline uint4 load_inputs(const T* row, int first, int num_inputs, bool aligned) {
  if (row == nullptr || first >= num_inputs) return make_uint4(0, 0, 0, 0);
  return load_chunk(row + first, num_inputs - first, aligned);
}

// d += the products of half a step: of a tile with eight rows of x.
template <typename T, int kHalf>
__device__ inline void multiply(float (&d)[4], uint4 w, uint4 x) {
  uint2 half = kHalf == 0 ? make_uint2(x.x, x.y) : make_uint2(x.z, x.w);
  ptx::mma_m16n8k16<T>(d, {w.x, w.y, w.z, w.w}, {half.x, half.y});
}

}  // namespace specops
