// SPDX-License-Identifier: Apache-2.0
// Rows times 8-bit codes with a scale for each output, without tensor cores.
#pragma once

#include "gemm/finish.cuh"
#include "gemm/integer_rows.cuh"

namespace specops {

constexpr int kInt8Warps = 4;
constexpr int kInt8Rows = 8;  // of a tile

struct Int8Shared {
  IntegerRow rows[kInt8Warps][kInt8Rows];  // of the group that a warp is at
  float products[kInt8Warps][kInt8Rows][kWarpSize];
};

// The sums of a group of inputs: of an output whose codes begin at `weights`, a vector for every
// kWarpSize, and of eight rows. Only `steps` of the group's eight vectors are there.
__device__ inline void sum_group(int (&sums)[kInt8Rows],
                                 const uint4* weights,
                                 int steps,
                                 const IntegerRow* rows) {
  for (int step = 0; step < steps; ++step) {
    uint4 codes = ptx::load_streaming(weights + step * kWarpSize);
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int r = 0; r < kInt8Rows; ++r) {
      const auto* x = reinterpret_cast<const uint4*>(rows[r].codes + step * 16);
      uint4 low = x[0], high = x[1];
      const uint32_t pairs[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        int code = static_cast<int8_t>(words[i / 4] >> (8 * (i % 4)));
        sums[r] += code * static_cast<int16_t>(pairs[i / 2] >> (16 * (i % 2)));
      }
    }
  }
}

// What one block does for kInt8Rows rows from `first_row` on and the 32 outputs of `group`.
// row_at(row): where a row of x begins, nullptr for zeros.
template <typename T, typename RowAt>
__device__ inline void int8_rows(const GemmParams& params,
                                 int64_t first_row,
                                 int64_t group,
                                 RowAt row_at) {
  const WeightParams& weight = params.weight;
  auto& shared = *reinterpret_cast<Int8Shared*>(shared_memory());
  int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  constexpr int kGroupSteps = kIntegerGroup / 16;
  int num_inputs = static_cast<int>(weight.num_inputs);
  int steps = (num_inputs + 15) / 16;
  int input_groups = static_cast<int>(integer_groups(num_inputs));
  const auto* weights = static_cast<const uint4*>(weight.data) + group * steps * kWarpSize + lane;

  // The sums of rows 2 * warp and 2 * warp + 1, of the lane's output.
  constexpr int kOwnRows = kInt8Rows / kInt8Warps;
  float totals[kOwnRows] = {};
  for (int first = 0; first < input_groups; first += kInt8Warps) {
    int mine = first + warp;
    if (mine < input_groups) {
      int input = mine * kIntegerGroup;
#pragma unroll
      for (int r = 0; r < kInt8Rows; ++r) {
        int64_t row = first_row + r;
        const T* x = row < params.rows ? row_at(row) : nullptr;
        quantize_group(shared.rows[warp][r], x, input, num_inputs, lane);
      }
      __syncwarp(kFullMask);
      int sums[kInt8Rows] = {};
      int first_step = mine * kGroupSteps;
      sum_group(sums,
                weights + int64_t{first_step} * kWarpSize,
                min(kGroupSteps, steps - first_step),
                shared.rows[warp]);
#pragma unroll
      for (int r = 0; r < kInt8Rows; ++r) {
        float scale = shared.rows[warp][r].scale;
        shared.products[warp][r][lane] = __fmul_rn(__int2float_rn(sums[r]), scale);
      }
    }
    __syncthreads();
    for (int other = 0; other < min(kInt8Warps, input_groups - first); ++other) {
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i) {
        float product = shared.products[other][kOwnRows * warp + i][lane];
        totals[i] = __fadd_rn(totals[i], product);
      }
    }
    __syncthreads();
  }

  // Gates and ups are outputs 2 * i and 2 * i + 1 here, and apart in the scales.
  int64_t output = group * kWeightGroup + lane;
  bool is_gate_up = is_gated(weight.activation);
  int64_t half = weight.num_outputs / 2;
  bool exists = output < weight.num_outputs;
  float scale = 0.0f;
  if (exists) scale = weight.scales[is_gate_up ? output / 2 + output % 2 * half : output];
#pragma unroll
  for (int i = 0; i < kOwnRows; ++i) {
    int64_t row = first_row + kOwnRows * warp + i;
    float sum = __fmul_rn(totals[i], scale);
    float up = __shfl_down_sync(kFullMask, sum, 1);
    if (row >= params.rows || !exists) continue;
    if (!is_gate_up) {
      finish<T>(params, row, output, sum);
    } else if (lane % 2 == 0) {
      store_gated<T>(params, row, output / 2, finish_gated<T>(params, output / 2, sum, up));
    }
  }
}

}  // namespace specops
