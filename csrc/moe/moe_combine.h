// SPDX-License-Identifier: Apache-2.0
// moe_combine: computes the weighted sum of the outputs of each row's experts.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/error_flag.h"
#include "common/host_device.h"
#include "common/isa.h"

namespace specops {

struct MoeCombineParams {
  const float* expert_out;      // [pairs, width], in the order of moe_sort
  const int32_t* places;        // [rows, top_k]; -1: no expert
  const float* expert_weights;  // [rows, top_k]
  const float* shared;          // [rows, width]; may be nullptr
  void* out;                    // [rows, width]
  int64_t pairs;
  int64_t rows;
  int64_t top_k;
  int64_t width;
  DType dtype;  // dtype of out
  ErrorFlag error;
};

SPECOPS_FAULT(6004, kMoeCombinePlaces) =
    "moe_combine: places must be -1 or a row of expert_out{, below #}";

SPECOPS_HOST_DEVICE Fault find_fault(const MoeCombineParams& params, int64_t pair) {
  int32_t place = params.places[pair];
  if (place >= -1 && place < params.pairs) return {};
  return fault_at(kMoeCombinePlaces, place, pair / params.top_k, pair % params.top_k)
      .with(params.pairs);
}

SPECOPS_DECLARE_CPU(moe_combine_cpu, MoeCombineParams);
SPECOPS_DECLARE_CUDA(moe_combine_cuda, MoeCombineParams);

}  // namespace specops
