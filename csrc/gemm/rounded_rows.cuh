// SPDX-License-Identifier: Apache-2.0
// Rows of x that one kernel rounds to integers (integer_rows.h) for all tiles of quantized weights.
#pragma once

#include "gemm/code_rows.cuh"
#include "gemm/rounded_rows.h"

namespace specops {

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

  __device__ void store_numbers(int plane, int t, uint2 numbers) const {
    int at = plane * Stage::kPlaneBytes + (Stage::lane_at(row, t) ^ 8 * step);
    *reinterpret_cast<uint2*>(stage + at) = numbers;
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

}  // namespace specops
