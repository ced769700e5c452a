// SPDX-License-Identifier: Apache-2.0
#include "common/parallel.h"
#include "common/simd.h"
#include "moe/moe_route.h"

namespace specops::SPECOPS_ISA {
namespace {

// The scores of one row, and its candidates.
struct Candidates {
  alignas(64) float scores[kMostExperts];  // from which the weights are computed
  float keys[kMostExperts];                // by which experts are ranked
  bool is_out[kMostExperts];               // true if its group is not chosen
  bool is_chosen[kMostExperts];
};

// Computes the softmax or the sigmoid of a row's logits.
void score(const MoeRouteParams& params, const float* logits, float* scores) {
  int64_t count = params.num_experts;
  auto vector_at = [&](int64_t i) {
    return load_partial(
        logits + i, static_cast<int>(count - i < kLanes ? count - i : kLanes), -INFINITY);
  };
  if (params.scoring == Scoring::kSigmoid) {
    F32x16 one = set1(1.0f);
    for (int64_t i = 0; i < count; i += kLanes) {
      store(scores + i, div(one, add(one, exp(sub(zero(), vector_at(i))))));
    }
    return;
  }
  F32x16 peaks = set1(-INFINITY), sums = zero();
  for (int64_t i = 0; i < count; i += kLanes) peaks = max(peaks, vector_at(i));
  F32x16 peak = set1(reduce_max(peaks));
  for (int64_t i = 0; i < count; i += kLanes) {
    F32x16 power = exp(sub(vector_at(i), peak));
    store(scores + i, power);
    sums = add(sums, power);
  }
  F32x16 sum = set1(reduce_add(sums));
  for (int64_t i = 0; i < count; i += kLanes) store(scores + i, div(load(scores + i), sum));
}

// Excludes the experts of all but the best groups by setting is_out. Groups are ranked by the sum
// of their two best keys.
void choose_groups(const MoeRouteParams& params, Candidates& row) {
  int64_t size = params.num_experts / params.num_groups;
  float sums[kMostExperts];
  for (int64_t group = 0; group < params.num_groups; ++group) {
    float best = -INFINITY, second = -INFINITY;
    for (int64_t i = group * size; i < (group + 1) * size; ++i) {
      if (row.keys[i] > best) {
        second = best;
        best = row.keys[i];
      } else if (row.keys[i] > second) {
        second = row.keys[i];
      }
    }
    sums[group] = best + second;
  }
  for (int64_t i = 0; i < params.num_experts; ++i) row.is_out[i] = true;
  for (int64_t n = 0; n < params.top_k_groups; ++n) {
    int64_t best = -1;
    for (int64_t group = 0; group < params.num_groups; ++group) {
      bool is_left = row.is_out[group * size];
      if (is_left && (best < 0 || sums[group] > sums[best])) best = group;
    }
    for (int64_t i = best * size; i < (best + 1) * size; ++i) row.is_out[i] = false;
  }
}

void choose_experts(const MoeRouteParams& params, Candidates& row) {
  for (int64_t n = 0; n < params.top_k; ++n) {
    int64_t best = -1;
    for (int64_t i = 0; i < params.num_experts; ++i) {
      if (row.is_out[i] || row.is_chosen[i]) continue;
      if (best < 0 || row.keys[i] > row.keys[best]) best = i;
    }
    row.is_chosen[best] = true;
  }
}

// Writes the chosen experts of a row in ascending order of id, and their weights.
void write(const MoeRouteParams& params, const Candidates& row, int32_t* ids, float* weights) {
  float sum = 0.0f;
  for (int64_t i = 0, n = 0; i < params.num_experts; ++i) {
    if (!row.is_chosen[i]) continue;
    ids[n] = static_cast<int32_t>(i);
    weights[n++] = row.scores[i];
    sum += row.scores[i];
  }
  if (sum < params.min_sum) sum = params.min_sum;
  for (int64_t n = 0; n < params.top_k; ++n) {
    if (params.normalizes) weights[n] /= sum;
    weights[n] *= params.scale;
  }
}

}  // namespace

// Computes ids = the top_k of scores + bias within the best groups, and weights = the scores of
// these experts, normalized and scaled.
// Cost:    num_experts exponentials and top_k passes over as many keys, per row.
// Assumes: sizes checked by ops.cpp.
// Order:   softmax sums sixteen chains, folded as reduce_add() does; weights are summed by
//          ascending id. A row depends only on itself.
// Source:  DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.1.2, for groups and biases.
// Threads: one item per range of rows.
void moe_route_cpu(const MoeRouteParams& params) {
  parallel_for(params.rows, 8, [&](int64_t begin, int64_t end) {
    Candidates row;
    for (int64_t r = begin; r < end; ++r) {
      score(params, params.logits + r * params.logits_stride, row.scores);
      for (int64_t i = 0; i < params.num_experts; ++i) {
        float bias = params.bias != nullptr ? params.bias[i] : 0.0f;
        row.keys[i] = choice_key(row.scores[i] + bias);
        row.is_out[i] = row.is_chosen[i] = false;
      }
      if (params.num_groups > 1) choose_groups(params, row);
      choose_experts(params, row);
      int64_t first = r * params.top_k;
      write(params, row, params.expert_ids + first, params.expert_weights + first);
    }
  });
}

}  // namespace specops::SPECOPS_ISA
