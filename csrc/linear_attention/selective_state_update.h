// SPDX-License-Identifier: Apache-2.0
// selective_state_update: the state space of Mamba-2 with one state matrix per head. Each row lets
// the state decay and adds its input.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"
#include "linear_attention/decay.h"
#include "linear_attention/slot_rows.h"

namespace specops {

constexpr int kMostStateDim = 256;
constexpr int kMostHeadDim = 256;

struct SelectiveStateUpdateParams {
  const void* x;         // [rows, num_heads, head_dim], rows are x_stride apart
  const void* dt;        // [rows, num_heads], rows are dt_stride apart
  const void* b;         // [rows, num_groups, state_dim], rows are b_stride apart
  const void* c;         // [rows, num_groups, state_dim], rows are c_stride apart
  const float* a_log;    // [num_heads]
  const float* d;        // [num_heads]
  const float* dt_bias;  // [num_heads]
  float* states;  // [num_slots, window, num_heads, state_dim, head_dim]; after position i: at
                  // i % window
  void* out;      // [rows, num_heads, head_dim], contiguous
  SlotRows of;
  int64_t num_heads;  // a multiple of num_groups
  int64_t num_groups;
  int64_t state_dim;
  int64_t head_dim;
  int64_t x_stride;
  int64_t dt_stride;
  int64_t b_stride;
  int64_t c_stride;
  DType dtype;  // dtype of x, dt, b, c and out: float32, bfloat16 or float16
  ErrorFlag error;
};

SPECOPS_FAULT(7007, kSelectiveStateUpdateSlots) =
    "selective_state_update: slots must be -1 or a slot of states{, below #}";
SPECOPS_FAULT(7008, kSelectiveStateUpdateQoIndptr) =
    "selective_state_update: qo_indptr must be non-decreasing from 0, at least the entry before "
    "it{ = #} and at most the rows of x{, #}";
SPECOPS_FAULT(7009, kSelectiveStateUpdateKvLens) =
    "selective_state_update: kv_lens must be at least the request's {# }rows by qo_indptr";

SPECOPS_HOST_DEVICE Fault find_fault(const SelectiveStateUpdateParams& params, int64_t request) {
  return find_fault(params.of,
                    request,
                    kSelectiveStateUpdateSlots,
                    kSelectiveStateUpdateQoIndptr,
                    kSelectiveStateUpdateKvLens);
}

SPECOPS_DECLARE_CPU(selective_state_update_cpu, SelectiveStateUpdateParams);
SPECOPS_DECLARE_CUDA(selective_state_update_cuda, SelectiveStateUpdateParams);

}  // namespace specops
