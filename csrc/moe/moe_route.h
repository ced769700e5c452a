// SPDX-License-Identifier: Apache-2.0
// moe_route: selects the experts of each row and computes their weights.
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
  const float* logits;    // [rows, num_experts], rows are logits_stride apart
  const float* bias;      // [num_experts], affects only the choice; may be nullptr
  int32_t* expert_ids;    // [rows, top_k], ascending in each row
  float* expert_weights;  // [rows, top_k]
  int64_t rows;
  int64_t num_experts;  // at most kMostExperts
  int64_t top_k;
  int64_t logits_stride;  // elements between rows
  int64_t num_groups;    // divides num_experts; groups have at least 2 experts if there are several
  int64_t top_k_groups;  // number of groups to choose from; they have at least top_k experts
  Scoring scoring;
  bool normalizes;  // divide a row's weights by their sum, or by min_sum if that is larger
  float min_sum;
  float scale;
};

// Returns the key by which experts and groups are ranked. The largest keys are chosen; on ties, the
// lower index. NaN counts as minus infinity.
SPECOPS_HOST_DEVICE float choice_key(float score) { return score == score ? score : -INFINITY; }

SPECOPS_DECLARE_CPU(moe_route_cpu, MoeRouteParams);
SPECOPS_DECLARE_CUDA(moe_route_cuda, MoeRouteParams);

}  // namespace specops
