// SPDX-License-Identifier: Apache-2.0
// Sampling parameters and processors on the device: values out of range, and the random numbers.
#pragma once

#include "sampling/filters.h"
#include "sampling/row.cuh"
#include "sampling/uniform_source.h"

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

// Of the decisions about one token of one request.
__device__ inline PhiloxSource uniform_source(const FilterArrays& filters,
                                              int64_t idx,
                                              int32_t position,
                                              uint32_t anchor = 0) {
  return {uniform_key_of(filters, idx, position, anchor)};
}

// What the scan must sum for a row: raw logits, and logits under the overlay at a temperature.
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

// What an op reports for processors out of range.
struct ProcessorFaults {
  ErrorCode slots, mask_indices, penalties, token_ids;
};

constexpr ProcessorFaults kSampleProcessorFaults{ErrorCode::kSampleSlots,
                                                 ErrorCode::kSampleMaskIndices,
                                                 ErrorCode::kSamplePenalties,
                                                 ErrorCode::kSampleTokenIds};
constexpr ProcessorFaults kVerifyProcessorFaults{ErrorCode::kVerifySlots,
                                                 ErrorCode::kVerifyMaskIndices,
                                                 ErrorCode::kVerifyPenalties,
                                                 ErrorCode::kVerifyTokenIds};

// What belongs to a request. num_tokens: its known ones.
__device__ inline ErrorCode fault_of(const LogitsProcessors& all,
                                     int64_t batch_idx,
                                     int32_t num_tokens,
                                     ProcessorFaults faults) {
  if (all.slots == nullptr) return ErrorCode::kNone;
  int32_t slot = all.slots[batch_idx];
  if (slot < -1 || slot >= all.num_slots) return faults.slots;
  if (slot < 0) return ErrorCode::kNone;
  float repetition = all.repetition_penalty ? all.repetition_penalty[slot] : 1.0f;
  float presence = all.presence_penalty ? all.presence_penalty[slot] : 0.0f;
  float frequency = all.frequency_penalty ? all.frequency_penalty[slot] : 0.0f;
  bool finite = fabsf(presence) <= FLT_MAX && fabsf(frequency) <= FLT_MAX;
  if (!finite || !(repetition > 0.0f && repetition <= FLT_MAX)) return faults.penalties;
  if (all.bad_words != nullptr && num_tokens > all.max_len) return faults.token_ids;
  return ErrorCode::kNone;
}

}  // namespace specops
