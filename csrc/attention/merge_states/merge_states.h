// SPDX-License-Identifier: Apache-2.0
// merge_states: combine attention results over disjoint parts of the KV cache.
#pragma once

#include <cstdint>

#include "common/cuda_stream.h"
#include "common/dtype.h"
#include "common/isa.h"

namespace specops {

struct MergeStatesParams {
  const void* outs;   // [states, rows, num_heads, head_dim]
  const float* lses;  // [states, rows, num_heads]; -inf marks an empty state
  void* out;          // [rows, num_heads, head_dim]
  float* lse;         // [rows, num_heads]
  int64_t num_states;
  int64_t num_items;  // rows * num_heads
  int64_t head_dim;
  DType dtype;  // dtype of outs and out: float32, bfloat16 or float16
};

SPECOPS_DECLARE_CPU(merge_states_cpu, MergeStatesParams);
SPECOPS_DECLARE_CUDA(merge_states_cuda, MergeStatesParams);

}  // namespace specops
