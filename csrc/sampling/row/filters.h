// SPDX-License-Identifier: Apache-2.0
// Sampling parameters, for all rows and for one request, and the key of a request's random numbers.
// Plain C++ and CUDA.
#pragma once

#include <cstdint>

#include "common/per_row.h"
#include "common/philox.h"

namespace specops {

// Sampling parameters per row (sample) or per request (verify). Each is an array or one number for
// all.
struct SamplingTensors {
  PerRow<float> temperature{nullptr, 0.0f};  // 0 = greedy
  PerRow<int32_t> top_k{nullptr, 0};         // 0 or -1 = off
  PerRow<float> top_p{nullptr, 1.0f};        // 1 = off
  PerRow<float> min_p{nullptr, 0.0f};        // 0 = off
  PerRow<float> typical_p{nullptr, 1.0f};    // 1 = off
  const int64_t* seeds = nullptr;            // uint64 as int64 bits; nullptr: nothing is drawn
  PerRow<int32_t> choice_index{nullptr, 0};
};

// Sampling parameters of one request.
struct SamplingParams {
  float temperature = 0.0f;
  int32_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
  float typical_p = 1.0f;
};

// Returns whether the choice is always the first token of the ranking, whatever the random number.
SPECOPS_HOST_DEVICE bool is_greedy(const SamplingParams& filters) {
  return filters.temperature == 0.0f || filters.top_k == 1 || filters.top_p == 0.0f;
}

SPECOPS_HOST_DEVICE SamplingParams filters_of(const SamplingTensors& arrays, int64_t idx) {
  return {arrays.temperature[idx],
          arrays.top_k[idx],
          arrays.top_p[idx],
          arrays.min_p[idx],
          arrays.typical_p[idx]};
}

// Returns the key of the random numbers for the decisions about one token of a request.
SPECOPS_HOST_DEVICE UniformKey uniform_key_of(const SamplingTensors& arrays,
                                              int64_t idx,
                                              int32_t position,
                                              uint32_t anchor = 0) {
  return {arrays.seeds ? static_cast<uint64_t>(arrays.seeds[idx]) : 0u,
          static_cast<uint32_t>(position),
          static_cast<uint32_t>(arrays.choice_index[idx]),
          0u,
          anchor};
}

}  // namespace specops
