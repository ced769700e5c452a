// SPDX-License-Identifier: Apache-2.0
// Sampling parameters on the device: random numbers, and which sums the scan of a row must compute.
#pragma once

#include "common/device.cuh"
#include "sampling/row/filters.h"
#include "sampling/row/uniform_source.h"

namespace specops {

// Returns the source of uniforms for the decisions about one token of one request.
__device__ inline PhiloxSource uniform_source(const SamplingTensors& filters,
                                              int64_t idx,
                                              int32_t position,
                                              uint32_t anchor = 0) {
  return {uniform_key_of(filters, idx, position, anchor)};
}

// Returns whether the choice needs the scan's second sum: the mass of all tokens.
__device__ inline bool needs_warm(const SamplingParams& filters, int32_t vocab_size) {
  bool counted = filters.top_k > 0 && filters.top_k < vocab_size;
  return !is_greedy(filters) && !counted && (filters.top_p < 1.0f || filters.min_p == 0.0f);
}

// Sums that the scan of a row must compute: over raw logits, and over logits with processors and
// temperature applied.
struct WantedSums {
  bool raw, warm;

  __device__ WantedSums(const SamplingParams& filters,
                        int32_t vocab_size,
                        bool logprobs,
                        bool processed_logprobs)
      : raw(logprobs && !processed_logprobs),
        warm(needs_warm(filters, vocab_size) ||
             (logprobs && processed_logprobs && filters.temperature == 0.0f)) {}
};

}  // namespace specops
