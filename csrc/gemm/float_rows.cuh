// SPDX-License-Identifier: Apache-2.0
// Product of rows and float32 weights, without tensor cores.
#pragma once

#include "common/device.cuh"
#include "gemm/finish.cuh"
#include "gemm/fragments.cuh"

namespace specops {

constexpr int kFloatRows = 8;

// Computes the outputs of one block for kFloatRows rows, from `first_row` on. A warp has one leaf
// (a part of the sum over inputs) and 32 outputs; with few leaves, a block has several such groups
// of warps. row_at(row) returns the start of a row of x, or nullptr for a row of zeros.
template <bool kAligned, typename RowAt>
__device__ inline void float_rows(const GemmParams& params,
                                  const GemmPlan& plan,
                                  int64_t first_row,
                                  int64_t block,
                                  RowAt row_at) {
  constexpr int kQuads = 4;  // vectors of four inputs that are loaded together
  int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  int slots = static_cast<int>(blockDim.x) / (kWarpSize * plan.leaves);
  int slot = warp / plan.leaves, leaf = warp % plan.leaves;
  int64_t group = block * slots + slot;
  bool present = group < weight_groups(params.weight.num_outputs);

  int quads = static_cast<int>((params.weight.num_inputs + 3) / 4);
  int leaf_quads = plan.leaf_stages * static_cast<int>(kWeightStage / 4);
  int first = leaf * leaf_quads;
  int last = present ? min(first + leaf_quads, quads) : first;
  const auto* weights =
      static_cast<const uint4*>(params.weight.data) + group * quads * kWarpSize + lane;
  int num_inputs = static_cast<int>(params.weight.num_inputs);
  const float* rows[kFloatRows];
#pragma unroll
  for (int r = 0; r < kFloatRows; ++r) {
    // Rows past the last one are computed as copies of the last one, and their results are dropped.
    rows[r] = row_at(min(first_row + r, params.rows - 1));
  }
  float sums[kFloatRows] = {};
  for (int quad = first; quad < last; quad += kQuads) {
    float w[kQuads][4];
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      uint4 chunk = make_uint4(0, 0, 0, 0);
      if (quad + i < last) chunk = ptx::load_streaming(weights + int64_t{quad + i} * kWarpSize);
      unpack_chunk<float>(w[i], chunk);
    }
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      if (quad + i >= last) continue;
#pragma unroll
      for (int r = 0; r < kFloatRows; ++r) {
        int at = (quad + i) * 4;
        float x[4];
        unpack_chunk<float>(x, load_inputs(rows[r], at, num_inputs, kAligned));
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[r] = __fmaf_rn(w[i][j], x[j], sums[r]);
      }
    }
  }
  auto* leaves = reinterpret_cast<float*>(shared_memory());
#pragma unroll
  for (int r = 0; r < kFloatRows; ++r) leaves[(warp * kFloatRows + r) * kWarpSize + lane] = sums[r];
  __syncthreads();
  int64_t output = group * kWeightGroup + lane;
  if (output >= params.weight.num_outputs) return;
  for (int r = leaf; r < kFloatRows && first_row + r < params.rows; r += plan.leaves) {
    auto sum_of = [&](int place) {
      const float* from = leaves + (slot * plan.leaves * kFloatRows + r) * kWarpSize + place;
      float sum = from[0];
      for (int other = 1; other < plan.leaves; ++other) {
        sum = __fadd_rn(sum, from[other * kFloatRows * kWarpSize]);
      }
      return sum;
    };
    if (!is_gated(params.weight.activation)) {
      finish<float>(params, first_row + r, output, sum_of(lane));
    } else if (lane % 2 == 0) {
      float value = finish_gated<float>(params, output / 2, sum_of(lane), sum_of(lane + 1));
      store_gated<float>(params, first_row + r, output / 2, value);
    }
  }
}

}  // namespace specops
