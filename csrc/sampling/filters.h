// SPDX-License-Identifier: Apache-2.0
// The sampling parameters of requests: as arrays, of one request, and the key of its randomness.
// Plain C++ and CUDA.
#pragma once

#include <cstdint>

#include "common/philox.h"

namespace specops {

// One entry per row (sample) or per request (verify). An absent array is the default everywhere.
struct FilterArrays {
  const float* temperature = nullptr;     // 0 = greedy; absent: 0
  const int32_t* top_k = nullptr;         // 0 or -1 = off
  const float* top_p = nullptr;           // 1 = off
  const float* min_p = nullptr;           // 0 = off
  const float* typical_p = nullptr;       // 1 = off
  const int64_t* seeds = nullptr;         // unsigned bits; absent only where temperature is
  const int32_t* choice_index = nullptr;  // absent: 0
};

// Of one request.
struct SamplingParams {
  float temperature = 0.0f;
  int32_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
  float typical_p = 1.0f;
};

// Whether the first token in rank is the choice, whatever the random number.
SPECOPS_HOST_DEVICE bool is_greedy(const SamplingParams& filters) {
  return filters.temperature == 0.0f || filters.top_k == 1 || filters.top_p == 0.0f;
}

SPECOPS_HOST_DEVICE SamplingParams filters_of(const FilterArrays& arrays, int64_t idx) {
  SamplingParams filters;
  if (arrays.temperature) filters.temperature = arrays.temperature[idx];
  if (arrays.top_k) filters.top_k = arrays.top_k[idx];
  if (arrays.top_p) filters.top_p = arrays.top_p[idx];
  if (arrays.min_p) filters.min_p = arrays.min_p[idx];
  if (arrays.typical_p) filters.typical_p = arrays.typical_p[idx];
  return filters;
}

// Of the decisions about one token of one request.
SPECOPS_HOST_DEVICE UniformKey uniform_key_of(const FilterArrays& arrays,
                                              int64_t idx,
                                              int32_t position,
                                              uint32_t anchor = 0) {
  return {arrays.seeds ? static_cast<uint64_t>(arrays.seeds[idx]) : 0u,
          static_cast<uint32_t>(position),
          arrays.choice_index ? static_cast<uint32_t>(arrays.choice_index[idx]) : 0u,
          0u,
          anchor};
}

}  // namespace specops
