// SPDX-License-Identifier: Apache-2.0
// Value checks that the ops of the sampling family share. On the CPU, they run before anything is
// written; CUDA kernels call them when they load the values. The comparisons are written so that
// NaN fails. Plain C++ and CUDA.
#pragma once

#include <cfloat>
#include <cstdint>

#include "common/error_flag.h"
#include "common/index_rule.h"
#include "sampling/row/filters.h"
#include "sampling/row/logits_processors.h"

namespace specops {

// Ops that share the faults below. The error code of a fault is the sum of the op and the rule.
enum class SamplingOp : int32_t { kSample = 4100, kVerify = 4200, kTopLogprobs = 4300 };

SPECOPS_HOST_DEVICE constexpr ErrorCode code_of(SamplingOp op, ErrorCode rule) {
  return static_cast<ErrorCode>(static_cast<int32_t>(op) + static_cast<int32_t>(rule));
}

SPECOPS_FAULT(1, kTemperatureRule) = "sampling.temperature must be finite and at least 0";
SPECOPS_FAULT(2, kTopKRule) = "sampling.top_k must be at least 1, or 0 or -1 for off";
SPECOPS_FAULT(3, kTopPRule) = "sampling.top_p must be within [0, 1]";
SPECOPS_FAULT(4, kMinPRule) = "sampling.min_p must be within [0, 1]";
SPECOPS_FAULT(5, kTypicalPRule) = "sampling.typical_p must be within (0, 1]";
SPECOPS_FAULT(6, kSeedsRule) =
    "sampling.seeds must be given where a temperature is above 0 or a policy is 3 (SYNTHETIC), got "
    "None";
SPECOPS_FAULT(7, kSlotsRule) = "processors.slots must be -1 or below num_slots{ = #}";
SPECOPS_FAULT(8, kMaskIndicesRule) = "processors.mask_indices must be -1 or below num_masks{ = #}";
SPECOPS_FAULT(9,
              kRepetitionPenaltyRule) = "processors.repetition_penalty must be finite and above 0";
SPECOPS_FAULT(10, kPresencePenaltyRule) = "processors.presence_penalty must be finite";
SPECOPS_FAULT(11, kFrequencyPenaltyRule) = "processors.frequency_penalty must be finite";
SPECOPS_FAULT(12, kTokenIdsRule) =
    "processors.token_ids must be as wide as the tokens before each position, got fewer";
SPECOPS_FAULT(13, kOutputIndptrRule) =
    "drafts.output_indptr must be ascending from 0 by at most k + 1 and at most num_output_rows";
SPECOPS_FAULT(14, kParentsRule) = "drafts.parents must be at least -1 and below the node itself";

// Checks the sampling parameters `filters` of row or request idx.
SPECOPS_HOST_DEVICE Fault find_filters_fault(SamplingOp op,
                                             const SamplingTensors& arrays,
                                             const SamplingParams& filters,
                                             int64_t idx) {
  float temperature = filters.temperature, top_p = filters.top_p, min_p = filters.min_p;
  if (!(temperature >= 0.0f && temperature <= FLT_MAX)) {
    return fault_at(code_of(op, kTemperatureRule), arrays.temperature, idx, temperature);
  }
  if (filters.top_k < -1) {
    return fault_at(code_of(op, kTopKRule), arrays.top_k, idx, filters.top_k);
  }
  if (!(top_p >= 0.0f && top_p <= 1.0f)) {
    return fault_at(code_of(op, kTopPRule), arrays.top_p, idx, top_p);
  }
  if (!(min_p >= 0.0f && min_p <= 1.0f)) {
    return fault_at(code_of(op, kMinPRule), arrays.min_p, idx, min_p);
  }
  if (!(filters.typical_p > 0.0f && filters.typical_p <= 1.0f)) {
    return fault_at(code_of(op, kTypicalPRule), arrays.typical_p, idx, filters.typical_p);
  }
  return {};
}

// Checks the processor inputs that concern a request as a whole. `num_tokens`: number of its known
// tokens.
SPECOPS_HOST_DEVICE Fault find_processors_fault(SamplingOp op,
                                                const LogitsProcessors& all,
                                                int64_t batch_idx,
                                                int32_t num_tokens) {
  if (all.slots == nullptr) return {};
  int32_t slot = all.slots[batch_idx];
  if (slot < -1 || slot >= all.num_slots) {
    return fault_at(code_of(op, kSlotsRule), slot, batch_idx).with(all.num_slots);
  }
  if (slot < 0) return {};
  float repetition = all.repetition_penalty ? all.repetition_penalty[slot] : 1.0f;
  float presence = all.presence_penalty ? all.presence_penalty[slot] : 0.0f;
  float frequency = all.frequency_penalty ? all.frequency_penalty[slot] : 0.0f;
  if (!(repetition > 0.0f && repetition <= FLT_MAX)) {
    return fault_at(code_of(op, kRepetitionPenaltyRule), repetition, slot);
  }
  if (!(presence >= -FLT_MAX && presence <= FLT_MAX)) {
    return fault_at(code_of(op, kPresencePenaltyRule), presence, slot);
  }
  if (!(frequency >= -FLT_MAX && frequency <= FLT_MAX)) {
    return fault_at(code_of(op, kFrequencyPenaltyRule), frequency, slot);
  }
  if (all.bad_words != nullptr && num_tokens > all.max_len) {
    return {code_of(op, kTokenIdsRule)};
  }
  return {};
}

SPECOPS_HOST_DEVICE bool is_mask_index(const LogitsProcessors& all, int64_t output_row) {
  if (all.mask_indices == nullptr) return true;
  int32_t index = all.mask_indices[output_row];
  return index >= -1 && index < all.num_masks;
}

SPECOPS_HOST_DEVICE Fault find_mask_fault(SamplingOp op,
                                          const LogitsProcessors& all,
                                          int64_t output_row) {
  if (is_mask_index(all, output_row)) return {};
  return fault_at(code_of(op, kMaskIndicesRule), all.mask_indices[output_row], output_row)
      .with(all.num_masks);
}

// Checks the row range of one request: it must have at most `capacity` rows and be within the
// `rows` rows of logits.
SPECOPS_HOST_DEVICE Fault find_indptr_fault(
    SamplingOp op, int32_t begin, int32_t end, int64_t batch_idx, int64_t capacity, int64_t rows) {
  ErrorCode code = code_of(op, kOutputIndptrRule);
  if (begin < 0 || (batch_idx == 0 && begin != 0)) return fault_at(code, begin, batch_idx);
  int64_t own = int64_t{end} - begin;
  if (own < 0 || own > capacity || end > rows) return fault_at(code, end, batch_idx + 1);
  return {};
}

// Checks the parent of one node. `parents` is [.., capacity] or nullptr.
SPECOPS_HOST_DEVICE Fault find_parent_fault(
    SamplingOp op, const int32_t* parents, int64_t capacity, int64_t batch_idx, int32_t node) {
  if (parents == nullptr) return {};
  int32_t parent = parents[batch_idx * capacity + node];
  if (is_parent(parent, node)) return {};
  return fault_at(code_of(op, kParentsRule), parent, batch_idx, node);
}

}  // namespace specops
