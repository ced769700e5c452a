// SPDX-License-Identifier: Apache-2.0
// moe_sort: sorts (row, expert) pairs by expert.
#pragma once

#include <cstdint>

#include "common/error_flag.h"
#include "common/host_device.h"
#include "common/isa.h"

namespace specops {

struct MoeSortParams {
  const int32_t* expert_ids;  // [pairs], grouped by row; -1: no expert
  int32_t* expert_indptr;     // [num_experts + 1], first pair of each expert in the sorted order
  int32_t* row_indices;       // [pairs], the row of each pair in the sorted order
  int32_t* places;            // [pairs], the position of each pair in the sorted order; -1: none
  int64_t pairs;
  int64_t top_k;  // pairs per row
  int64_t num_experts;
  ErrorFlag error;
};

SPECOPS_FAULT(6001,
              kMoeSortExpertIds) = "moe_sort: expert_ids must be -1 or below num_experts{ = #}";

SPECOPS_HOST_DEVICE Fault find_fault(const MoeSortParams& params, int64_t pair) {
  int32_t id = params.expert_ids[pair];
  if (id >= -1 && id < params.num_experts) return {};
  return fault_at(kMoeSortExpertIds, id, pair / params.top_k, pair % params.top_k)
      .with(params.num_experts);
}

SPECOPS_DECLARE_CPU(moe_sort_cpu, MoeSortParams);
SPECOPS_DECLARE_CUDA(moe_sort_cuda, MoeSortParams);

}  // namespace specops
