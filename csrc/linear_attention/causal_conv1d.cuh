// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/device.cuh"
#include "linear_attention/causal_conv1d.h"

namespace specops {

constexpr int kConvThreads = 128;

// Computes out = silu(bias + sum over taps of weight[tap] * x at the tap's distance before the row),
// and stores x in the slot.
// Grid:    x = (batch + 1) * pieces of 128 channels (unbounded); the last ones handle padding rows.
// Block:   128 threads; each thread owns one channel of one request, for all its rows.
// Smem:    none.
// Cost:    `taps` products per element; each x is read from memory once, then from cache.
// Assumes: no slot appears twice.
// Order:   a chain over the taps from the oldest position on, from the bias or zero, in fp32;
//          positions before the text are skipped. Rounded once. A request with a fault is reported,
//          and its rows are not written.
// Source:  Gu and Dao 2023 (Mamba).
template <typename T>
__global__ void __launch_bounds__(kConvThreads) causal_conv1d_kernel(CausalConv1dParams params) {
  wait_for_previous_kernel();
  int64_t channels = params.channels, window = params.of.window, taps = params.taps;
  int64_t pieces = (channels + kConvThreads - 1) / kConvThreads;
  int64_t request = blockIdx.x / pieces;
  int64_t channel = blockIdx.x % pieces * kConvThreads + threadIdx.x;
  if (channel >= channels) return;
  Fault fault = find_fault(params, request);
  if (fault.found()) {
    if (channel == 0) report_error(params.error, fault.code);
    return;
  }
  SlotRange range = range_of(params.of, request);
  T* out = static_cast<T*>(params.out) + range.first * channels + channel;
  int64_t count = range.end - range.first;
  if (range.slot < 0) {
    for (int64_t i = 0; i < count; ++i) out[i * channels] = from_float<T>(0.0f);
    return;
  }
  const T* x = static_cast<const T*>(params.x) + range.first * params.x_stride + channel;
  T* kept = static_cast<T*>(params.states) + range.slot * window * channels + channel;
  float weight[kMostTaps];  // weight[taps - 1] is for the row itself
#pragma unroll
  for (int tap = 0; tap < kMostTaps; ++tap) {
    int64_t from = tap - (kMostTaps - taps);
    weight[tap] =
        from < 0 ? 0.0f : to_float(static_cast<const T*>(params.weight)[from * channels + channel]);
  }
  const T* bias = static_cast<const T*>(params.bias);
  float before = bias == nullptr ? 0.0f : to_float(bias[channel]);
  for (int64_t i = 0; i < count; ++i) {
    float sum = before;
#pragma unroll
    for (int tap = 0; tap < kMostTaps; ++tap) {
      int64_t back = i - (kMostTaps - 1 - tap), position = range.begin + back;
      if (tap < kMostTaps - taps || position < 0) continue;
      const T* from = back >= 0 ? x + back * params.x_stride : kept + position % window * channels;
      sum = __fmaf_rn(weight[tap], to_float(*from), sum);
    }
    out[i * channels] = from_float<T>(__fdiv_rn(sum, __fadd_rn(1.0f, expf(-sum))));
  }
  // Stored at the end, when the old values are no longer needed.
  for (int64_t i = max(count - window, int64_t{0}); i < count; ++i) {
    kept[(range.begin + i) % window * channels] = x[i * params.x_stride];
  }
}

}  // namespace specops
