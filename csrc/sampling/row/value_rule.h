// SPDX-License-Identifier: Apache-2.0
// Value checks shared by the ops of the sampling family. CPU checks call them before anything is
// written, CUDA kernels when they load the values; error_flag.cpp has the messages. The comparisons
// are written so that NaN fails them. Plain C++ and CUDA.
#pragma once

#include <cfloat>
#include <cstdint>

#include "common/error_flag.h"
#include "common/index_rule.h"
#include "sampling/row/filters.h"
#include "sampling/row/logits_processors.h"

namespace specops {

// Checks the parameters `filters` of row or request idx.
SPECOPS_HOST_DEVICE Fault fault_of_filters(SamplingOp op,
                                           const SamplingTensors& arrays,
                                           const SamplingParams& filters,
                                           int64_t idx) {
  float temperature = filters.temperature, top_p = filters.top_p, min_p = filters.min_p;
  if (!(temperature >= 0.0f && temperature <= FLT_MAX)) {
    return fault_at(code_of(op, SamplingRule::kTemperature), arrays.temperature, idx, temperature);
  }
  if (filters.top_k < -1) {
    return fault_at(code_of(op, SamplingRule::kTopK), arrays.top_k, idx, filters.top_k);
  }
  if (!(top_p >= 0.0f && top_p <= 1.0f)) {
    return fault_at(code_of(op, SamplingRule::kTopP), arrays.top_p, idx, top_p);
  }
  if (!(min_p >= 0.0f && min_p <= 1.0f)) {
    return fault_at(code_of(op, SamplingRule::kMinP), arrays.min_p, idx, min_p);
  }
  if (!(filters.typical_p > 0.0f && filters.typical_p <= 1.0f)) {
    return fault_at(code_of(op, SamplingRule::kTypicalP), arrays.typical_p, idx, filters.typical_p);
  }
  return {};
}

// Checks what belongs to a request as a whole. `num_tokens` counts its known tokens.
SPECOPS_HOST_DEVICE Fault fault_of_processors(SamplingOp op,
                                              const LogitsProcessors& all,
                                              int64_t batch_idx,
                                              int32_t num_tokens) {
  if (all.slots == nullptr) return {};
  int32_t slot = all.slots[batch_idx];
  if (slot < -1 || slot >= all.num_slots) {
    return fault_at(code_of(op, SamplingRule::kSlots), slot, batch_idx).with(all.num_slots);
  }
  if (slot < 0) return {};
  float repetition = all.repetition_penalty ? all.repetition_penalty[slot] : 1.0f;
  float presence = all.presence_penalty ? all.presence_penalty[slot] : 0.0f;
  float frequency = all.frequency_penalty ? all.frequency_penalty[slot] : 0.0f;
  if (!(repetition > 0.0f && repetition <= FLT_MAX)) {
    return fault_at(code_of(op, SamplingRule::kRepetitionPenalty), repetition, slot);
  }
  if (!(presence >= -FLT_MAX && presence <= FLT_MAX)) {
    return fault_at(code_of(op, SamplingRule::kPresencePenalty), presence, slot);
  }
  if (!(frequency >= -FLT_MAX && frequency <= FLT_MAX)) {
    return fault_at(code_of(op, SamplingRule::kFrequencyPenalty), frequency, slot);
  }
  if (all.bad_words != nullptr && num_tokens > all.max_len) {
    return {code_of(op, SamplingRule::kTokenIds)};
  }
  return {};
}

SPECOPS_HOST_DEVICE bool is_mask_index(const LogitsProcessors& all, int64_t output_row) {
  if (all.mask_indices == nullptr) return true;
  int32_t index = all.mask_indices[output_row];
  return index >= -1 && index < all.num_masks;
}

SPECOPS_HOST_DEVICE Fault fault_of_mask(SamplingOp op,
                                        const LogitsProcessors& all,
                                        int64_t output_row) {
  if (is_mask_index(all, output_row)) return {};
  ErrorCode code = code_of(op, SamplingRule::kMaskIndices);
  return fault_at(code, all.mask_indices[output_row], output_row).with(all.num_masks);
}

// Checks the row range of one request: at most `capacity` rows out of `rows` rows of logits.
SPECOPS_HOST_DEVICE Fault fault_of_indptr(
    SamplingOp op, int32_t begin, int32_t end, int64_t batch_idx, int64_t capacity, int64_t rows) {
  ErrorCode code = code_of(op, SamplingRule::kOutputIndptr);
  if (begin < 0 || (batch_idx == 0 && begin != 0)) {
    return fault_at(code, begin, batch_idx);
  }
  int64_t own = int64_t{end} - begin;
  if (own < 0 || own > capacity || end > rows) {
    return fault_at(code, end, batch_idx + 1);
  }
  return {};
}

// Checks one node's parent. `parents` is [.., capacity] or nullptr.
SPECOPS_HOST_DEVICE Fault fault_of_parent(
    SamplingOp op, const int32_t* parents, int64_t capacity, int64_t batch_idx, int32_t node) {
  if (parents == nullptr) return {};
  int32_t parent = parents[batch_idx * capacity + node];
  if (is_parent(parent, node)) return {};
  return fault_at(code_of(op, SamplingRule::kParents), parent, batch_idx, node);
}

}  // namespace specops
