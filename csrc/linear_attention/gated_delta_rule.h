// SPDX-License-Identifier: Apache-2.0
// gated_delta_rule: linear attention with one state matrix per head. Each row lets the state decay,
// as a whole or by one factor per key channel, and then corrects it towards the row's k and v.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"
#include "linear_attention/decay.h"
#include "linear_attention/slot_rows.h"

namespace specops {

constexpr int kMostKeyDim = 128;
constexpr int kMostValueDim = 256;
constexpr float kKeyNormEps = 1e-6f;  // added to the sum of squares of a query or a key

struct GatedDeltaRuleParams {
  const void* q;         // [rows, num_key_heads, key_dim], rows are q_stride apart
  const void* k;         // [rows, num_key_heads, key_dim], rows are k_stride apart
  const void* v;         // [rows, num_value_heads, value_dim], rows are v_stride apart
  const void* a;         // [rows, num_value_heads, num_decays], rows are a_stride apart
  const void* b;         // [rows, num_value_heads], rows are b_stride apart
  const float* a_log;    // [num_value_heads]
  const float* dt_bias;  // [num_value_heads, num_decays]
  float* states;  // [num_slots, window, num_value_heads, key_dim, value_dim]; after position i: at
                  // i % window
  void* out;      // [rows, num_value_heads, value_dim], contiguous
  SlotRows of;
  int64_t num_key_heads;
  int64_t num_value_heads;  // a multiple of num_key_heads
  int64_t key_dim;
  int64_t value_dim;
  int64_t num_decays;  // per head: 1, or key_dim for a decay per key channel
  int64_t q_stride;
  int64_t k_stride;
  int64_t v_stride;
  int64_t a_stride;
  int64_t b_stride;
  DType dtype;  // dtype of q, k, v, a, b and out: float32, bfloat16 or float16
  ErrorFlag error;
};

SPECOPS_FAULT(7004, kGatedDeltaRuleSlots) =
    "gated_delta_rule: slots must be -1 or a slot of states{, below #}";
SPECOPS_FAULT(7005, kGatedDeltaRuleQoIndptr) =
    "gated_delta_rule: qo_indptr must be non-decreasing from 0, at least the entry before it{ = #} "
    "and at most the rows of q{, #}";
SPECOPS_FAULT(7006, kGatedDeltaRuleKvLens) =
    "gated_delta_rule: kv_lens must be at least the request's {# }rows by qo_indptr";

SPECOPS_HOST_DEVICE Fault find_fault(const GatedDeltaRuleParams& params, int64_t request) {
  return find_fault(
      params.of, request, kGatedDeltaRuleSlots, kGatedDeltaRuleQoIndptr, kGatedDeltaRuleKvLens);
}

// Returns the strength with which a row corrects the state, from 0 to 1: sigmoid(b).
SPECOPS_HOST_DEVICE float strength_of(float b) { return 1.0f / (1.0f + expf(-b)); }

SPECOPS_DECLARE_CPU(gated_delta_rule_cpu, GatedDeltaRuleParams);
SPECOPS_DECLARE_CUDA(gated_delta_rule_cuda, GatedDeltaRuleParams);

}  // namespace specops
