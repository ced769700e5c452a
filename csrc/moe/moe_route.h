// SPDX-License-Identifier: Apache-2.0
// moe_route: which experts a row goes to, and with what weights.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/cuda_stream.h"
#include "common/host_device.h"
#include "common/isa.h"

namespace specops {

constexpr int64_t kMostExperts = 1024;

enum class Scoring : int32_t { kSoftmax, kSigmoid };

struct MoeRouteParams {
  const float* logits;    // [rows, num_experts], rows logits_stride apart
  const float* bias;      // [num_experts], of the choice alone; may be nullptr
  int32_t* expert_ids;    // [rows, top_k], ascending in each row
  float* expert_weights;  // [rows, top_k]
  int64_t rows;
  int64_t num_experts;  // at most kMostExperts
  int64_t top_k;
  int64_t logits_stride;  // elements between rows
  int64_t num_groups;     // num_experts is a multiple, of at least 2 where there are several
  int64_t top_k_groups;   // they have at least top_k experts
  Scoring scoring;
  bool normalizes;  // divides the weights of a row by their sum, or by min_sum if that is more
  float min_sum;
  float scale;
};

// By what experts and groups are chosen: the larger first, at equal ones the lower number. A NaN
// counts as minus infinity.
SPECOPS_HOST_DEVICE float choice_key(float score) { return score == score ? score : -INFINITY; }

SPECOPS_DECLARE_CPU(moe_route_cpu, MoeRouteParams);
SPECOPS_DECLARE_CUDA(moe_route_cuda, MoeRouteParams);

}  // namespace specops
