// SPDX-License-Identifier: Apache-2.0
// causal_conv1d: in each channel, a short convolution over the positions of a request, a bias, then
// silu.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"
#include "linear_attention/slot_rows.h"

namespace specops {

constexpr int kMostTaps = 8;

struct CausalConv1dParams {
  const void* x;       // [rows, channels], rows are x_stride apart
  const void* weight;  // [taps, channels]; the last tap is for the row itself
  const void* bias;    // [channels]; may be nullptr
  void* states;        // [num_slots, window, channels]: x of position i is at i % window
  void* out;           // [rows, channels], contiguous
  SlotRows of;
  int64_t channels;
  int64_t taps;
  int64_t x_stride;
  DType dtype;  // dtype of all tensors: float32, bfloat16 or float16
  ErrorFlag error;
};

SPECOPS_FAULT(7001, kCausalConv1dSlots) =
    "causal_conv1d: slots must be -1 or a slot of states{, below #}";
SPECOPS_FAULT(7002, kCausalConv1dQoIndptr) =
    "causal_conv1d: qo_indptr must be non-decreasing from 0, at least the entry before it{ = #} "
    "and at most the rows of x{, #}";
SPECOPS_FAULT(7003, kCausalConv1dKvLens) =
    "causal_conv1d: kv_lens must be at least the request's {# }rows by qo_indptr";

SPECOPS_HOST_DEVICE Fault find_fault(const CausalConv1dParams& params, int64_t request) {
  return find_fault(
      params.of, request, kCausalConv1dSlots, kCausalConv1dQoIndptr, kCausalConv1dKvLens);
}

SPECOPS_DECLARE_CPU(causal_conv1d_cpu, CausalConv1dParams);
SPECOPS_DECLARE_CUDA(causal_conv1d_cuda, CausalConv1dParams);

}  // namespace specops
