// SPDX-License-Identifier: Apache-2.0
// Reading sampling parameters on the device: absent arrays, and values out of range.
#pragma once

#include "common/philox.h"
#include "sampling/row.cuh"

namespace specops {

// What an op reports for a temperature, top_k, top_p or min_p out of range.
struct FilterFaults {
  ErrorCode temperature, top_k, top_p, min_p;
};

constexpr FilterFaults kSampleFaults{ErrorCode::kSampleTemperature,
                                     ErrorCode::kSampleTopK,
                                     ErrorCode::kSampleTopP,
                                     ErrorCode::kSampleMinP};
constexpr FilterFaults kVerifyFaults{ErrorCode::kVerifyTemperature,
                                     ErrorCode::kVerifyTopK,
                                     ErrorCode::kVerifyTopP,
                                     ErrorCode::kVerifyMinP};

// Params: of sample or verify. An absent array is the default everywhere.
template <typename Params>
__device__ inline SamplingParams filters_of(const Params& params, int64_t idx) {
  SamplingParams filters;
  if (params.temperature) filters.temperature = params.temperature[idx];
  if (params.top_k) filters.top_k = params.top_k[idx];
  if (params.top_p) filters.top_p = params.top_p[idx];
  if (params.min_p) filters.min_p = params.min_p[idx];
  return filters;
}

// The comparisons are written so that NaN fails them.
__device__ inline ErrorCode fault_of(const SamplingParams& filters, FilterFaults faults) {
  if (!(filters.temperature >= 0.0f && filters.temperature <= FLT_MAX)) return faults.temperature;
  if (filters.top_k < -1) return faults.top_k;
  if (!(filters.top_p >= 0.0f && filters.top_p <= 1.0f)) return faults.top_p;
  if (!(filters.min_p >= 0.0f && filters.min_p <= 1.0f)) return faults.min_p;
  return ErrorCode::kNone;
}

template <typename Params>
__device__ inline float uniform_of(const Params& params, int64_t idx, int32_t position) {
  if (params.seeds == nullptr) return 0.0f;  // greedy
  UniformKey key{static_cast<uint64_t>(params.seeds[idx]),
                 static_cast<uint32_t>(position),
                 params.choice_index ? static_cast<uint32_t>(params.choice_index[idx]) : 0u};
  return philox_uniform(key, Purpose::kTarget);
}

}  // namespace specops
