// SPDX-License-Identifier: Apache-2.0
// Rows as integers (integer_rows.h), on CUDA.
#pragma once

#include "common/device.cuh"
#include "gemm/integer_rows.h"

namespace specops {

// A group of one row.
struct alignas(16) IntegerRow {
  int16_t codes[kIntegerGroup];
  float scale;
};

// Called by a warp: the integers of inputs `first` to first + 127 of a row of num_inputs, zeros where
// there are none. No row (nullptr) is all zeros.
template <typename T>
__device__ inline void quantize_group(
    IntegerRow& out, const T* row, int first, int num_inputs, int lane) {
  constexpr int kOwn = kIntegerGroup / kWarpSize;
  float values[kOwn];
  uint32_t peak = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    int input = first + kOwn * lane + i;
    values[i] = row != nullptr && input < num_inputs ? to_float(row[input]) : 0.0f;
    peak = max(peak, __float_as_uint(values[i]) & 0x7fffffffu);
  }
#pragma unroll
  for (int apart = kWarpSize / 2; apart > 0; apart /= 2) {
    peak = max(peak, __shfl_xor_sync(kFullMask, peak, apart));
  }
  GroupScale group = group_scale(peak);
  float inverse = __uint_as_float(group.inverse);
  uint32_t words[kOwn / 2] = {};
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    int code = group.is_finite ? min(__float2int_rn(__fmul_rn(values[i], inverse)), 32767) : 0;
    words[i / 2] |= (static_cast<uint32_t>(code) & 0xffffu) << (16 * (i % 2));
  }
  *reinterpret_cast<uint2*>(out.codes + kOwn * lane) = make_uint2(words[0], words[1]);
  if (lane == 0) out.scale = __uint_as_float(group.scale);
}

}  // namespace specops
