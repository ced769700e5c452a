// SPDX-License-Identifier: Apache-2.0
// Sampling parameters on the device: values out of range, and the random number.
#pragma once

#include "sampling/filters.h"
#include "sampling/row.cuh"

namespace specops {

// What an op reports for a parameter out of range.
struct FilterFaults {
  ErrorCode temperature, top_k, top_p, min_p, typical_p;
};

constexpr FilterFaults kSampleFaults{ErrorCode::kSampleTemperature,
                                     ErrorCode::kSampleTopK,
                                     ErrorCode::kSampleTopP,
                                     ErrorCode::kSampleMinP,
                                     ErrorCode::kSampleTypicalP};
constexpr FilterFaults kVerifyFaults{ErrorCode::kVerifyTemperature,
                                     ErrorCode::kVerifyTopK,
                                     ErrorCode::kVerifyTopP,
                                     ErrorCode::kVerifyMinP,
                                     ErrorCode::kVerifyTypicalP};

// The comparisons are written so that NaN fails them.
__device__ inline ErrorCode fault_of(const SamplingParams& filters, FilterFaults faults) {
  if (!(filters.temperature >= 0.0f && filters.temperature <= FLT_MAX)) return faults.temperature;
  if (filters.top_k < -1) return faults.top_k;
  if (!(filters.top_p >= 0.0f && filters.top_p <= 1.0f)) return faults.top_p;
  if (!(filters.min_p >= 0.0f && filters.min_p <= 1.0f)) return faults.min_p;
  if (!(filters.typical_p > 0.0f && filters.typical_p <= 1.0f)) return faults.typical_p;
  return ErrorCode::kNone;
}

__device__ inline float uniform_of(const FilterArrays& filters, int64_t idx, int32_t position) {
  if (filters.seeds == nullptr) return 0.0f;  // greedy
  return philox_uniform(uniform_key_of(filters, idx, position), Purpose::kTarget);
}

}  // namespace specops
