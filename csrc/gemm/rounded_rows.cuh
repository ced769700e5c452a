// SPDX-License-Identifier: Apache-2.0
// Rows of x that one kernel rounds to integers (integer_rows.h) for all tiles of quantized weights.
#pragma once

#include "gemm/code_rows.cuh"
#include "gemm/rounded_rows.h"

namespace specops {

constexpr int kRoundThreads = 128;
constexpr int kRoundRows = kWarpSize / kCodeSteps;  // rows of a stage that a warp rounds
static_assert(kRoundedRows % kRoundRows == 0);

// A stage of kRoundedRows rounded rows, as in shared memory: the integers plane by plane and row by
// row, then [steps, rows] scales and [steps, rows] sums of integers. In a row, lane t has the eight
// inputs of each of its four steps side by side. The steps are swapped depending on the row, so
// that lanes that read at once hit all banks: one step of four rows or, with two planes, two steps
// of two rows.
template <typename NumbersOf>
struct RoundedStage {
  using Numbers = NumbersOf;
  static constexpr int kRowBytes = static_cast<int>(kCodeStage);
  static constexpr int kRows = static_cast<int>(kRoundedRows);
  static constexpr int kPlaneBytes = kRows * kRowBytes;
  static constexpr int kStepBytes = kRows * 4;  // of scales or sums
  static constexpr int kScalesAt = Numbers::kPlanes * kPlaneBytes;
  static constexpr int kSumsAt = kScalesAt + kCodeSteps * kStepBytes;
  static constexpr int kBytes = kSumsAt + kCodeSteps * kStepBytes;
  static_assert(kBytes == rounded_stage_bytes(Numbers::kPlanes));

  // Returns the offset of a lane's inputs of step 0 in a plane. Those of another step are at this
  // offset ^ 8 * step.
  static __device__ int lane_at(int row, int t) {
    int swap = Numbers::kPlanes == 1 ? row % 2 + row / 4 % 2 * 2 : row % 2 * 2;
    return row * kRowBytes + 32 * t + 8 * swap;
  }
};

// Destination of one step of a row in a RoundedStage.
template <typename NumbersOf>
struct RoundedStep {
  using Numbers = NumbersOf;
  using Stage = RoundedStage<Numbers>;
  unsigned char* stage;
  int row, step;

  __device__ void store_numbers(int plane, const uint2 (&lanes)[4]) const {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      int at = plane * Stage::kPlaneBytes + (Stage::lane_at(row, t) ^ 8 * step);
      *reinterpret_cast<uint2*>(stage + at) = lanes[t];
    }
  }
  __device__ void store_scale(float scale) const {
    *reinterpret_cast<float*>(stage + Stage::kScalesAt + step * Stage::kStepBytes + row * 4) =
        scale;
  }
  __device__ void store_sums(int low, int high) const {
    *reinterpret_cast<float*>(stage + Stage::kSumsAt + step * Stage::kStepBytes + row * 4) =
        __int2float_rn(low + high);
  }
};

// Rounds rows of x to `rounded`: [tiles of kRoundedRows rows, stages] of RoundedStage. Rows past
// the last one become zeros.
// Grid:    x = tiles of rows * stages * 2; a warp rounds eight rows of a stage (unbounded).
// Block:   128 threads; each thread owns 32 inputs of a row.
// Smem:    none.
// Cost:    x is read once; a byte per input and plane is written, and an eighth of that for scales.
// Assumes: x as in linear; `rounded` aligned to 16 bytes.
// Order:   integer_rows.h; four neighboring lanes share the maximum of a group of 128 inputs.
// Source:  -
template <typename Numbers>
__global__ void __launch_bounds__(kRoundThreads) round_rows_kernel(
    GemmParams params, unsigned char* rounded, int stages, bool aligned, ErrorFlag error) {
  wait_for_previous_kernel();
  constexpr int kWarpsPerStage = static_cast<int>(kRoundedRows) / kRoundRows;
  int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  int64_t warp = (int64_t{blockIdx.x} * kRoundThreads + threadIdx.x) / kWarpSize;
  int row = static_cast<int>(warp % kWarpsPerStage) * kRoundRows + lane / kCodeSteps;
  int64_t index = warp / kWarpsPerStage;  // of the stage, over all tiles
  int step = lane % kCodeSteps;
  int first = static_cast<int>(index % stages * kCodeStage) + 32 * step;
  int64_t from = index / stages * kRoundedRows + row;
  int64_t bytes = params.dtype == DType::kFloat32 ? 4 : 2;
  const void* x = static_cast<const char*>(params.x) + from * params.x_stride * bytes;
  RawInputs raw;
  load_raw(raw, params, from < params.rows ? x : nullptr, first, aligned, error);
  float values[32];
  unpack_raw(values, raw, params.dtype);
  RoundedStep<Numbers> to{rounded + index * RoundedStage<Numbers>::kBytes, row, step};
  store_integers(to, values, params.weight.offsets != nullptr);
}

}  // namespace specops
