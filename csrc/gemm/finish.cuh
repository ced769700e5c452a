// SPDX-License-Identifier: Apache-2.0
// Bias, activation and rounding of finished sums on CUDA.
#pragma once

#include "common/chunk.cuh"
#include "gemm/gated.cuh"
#include "gemm/gemm.h"

namespace specops {

// Finishes one output: adds the bias in fp32 and rounds once. All kernels finish outputs here.
template <typename T>
__device__ inline void finish(const GemmParams& params, int64_t row, int64_t output, float sum) {
  if (params.bias != nullptr) {
    sum = __fadd_rn(sum, to_float(static_cast<const T*>(params.bias)[output]));
  }
  int64_t at = row * params.weight.num_outputs + output;
  if constexpr (sizeof(T) == 2) {
    if (params.out_dtype != DType::kFloat32) {
      static_cast<T*>(params.out)[at] = T{static_cast<uint16_t>(ptx::pack2<T>(sum, 0.0f))};
      return;
    }
  }
  static_cast<float*>(params.out)[at] = sum;
}

// Finishes a gate and its up, which are outputs 2 * column and 2 * column + 1 of the packed weight.
// Each gets its bias and is rounded as above; the result is activation(gate) * up.
template <typename T>
__device__ inline float finish_gated(const GemmParams& params,
                                     int64_t column,
                                     float gate,
                                     float up) {
  if (params.bias != nullptr) {
    const T* gates = static_cast<const T*>(params.bias);
    gate = __fadd_rn(gate, to_float(gates[column]));
    up = __fadd_rn(up, to_float(gates[params.weight.num_outputs / 2 + column]));
  }
  if constexpr (sizeof(T) == 2) {
    float2 rounded = ptx::unpack2<T>(ptx::pack2<T>(gate, up));
    gate = rounded.x;
    up = rounded.y;
  }
  return gated_of(params.weight.activation, gate, up);
}

template <typename T>
__device__ inline void store_gated(const GemmParams& params,
                                   int64_t row,
                                   int64_t column,
                                   float value) {
  int64_t at = row * (params.weight.num_outputs / 2) + column;
  if constexpr (sizeof(T) == 2) {
    static_cast<T*>(params.out)[at] = T{static_cast<uint16_t>(ptx::pack2<T>(value, 0.0f))};
  } else {
    static_cast<float*>(params.out)[at] = value;
  }
}

// Finishes two gates and their ups from four neighboring outputs.
template <typename T>
__device__ inline void finish4_gated(
    const GemmParams& params, bool quads, int64_t row, int64_t output, float4 sum) {
  if (output >= params.weight.num_outputs) return;
  int64_t column = output / 2;
  float low = finish_gated<T>(params, column, sum.x, sum.y);
  bool has_high = output + 2 < params.weight.num_outputs;
  float high = has_high ? finish_gated<T>(params, column + 1, sum.z, sum.w) : 0.0f;
  if constexpr (sizeof(T) == 2) {
    if (quads) {
      int64_t at = row * (params.weight.num_outputs / 2) + column;
      *reinterpret_cast<uint32_t*>(static_cast<T*>(params.out) + at) = ptx::pack2<T>(low, high);
      return;
    }
  }
  store_gated<T>(params, row, column, low);
  if (has_high) store_gated<T>(params, row, column + 1, high);
}

// Finishes four neighboring outputs. The index of the first must be a multiple of four.
template <typename T>
__device__ inline void finish4(
    const GemmParams& params, bool quads, int64_t row, int64_t output, float4 sum) {
  if (is_gated(params.weight.activation)) return finish4_gated<T>(params, quads, row, output, sum);
  float sums[4] = {sum.x, sum.y, sum.z, sum.w};
  if (!quads) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (output + i < params.weight.num_outputs) finish<T>(params, row, output + i, sums[i]);
    }
    return;
  }
  if (output >= params.weight.num_outputs) return;
  if (params.bias != nullptr) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[i] = __fadd_rn(sums[i], to_float(static_cast<const T*>(params.bias)[output + i]));
    }
  }
  int64_t at = row * params.weight.num_outputs + output;
  if constexpr (sizeof(T) == 2) {
    if (params.out_dtype != DType::kFloat32) {
      uint2 halves = make_uint2(ptx::pack2<T>(sums[0], sums[1]), ptx::pack2<T>(sums[2], sums[3]));
      return ptx::store_vector(static_cast<T*>(params.out) + at, halves);
    }
  }
  ptx::store_vector(static_cast<float*>(params.out) + at, pack_chunk<float>(sums));
}

}  // namespace specops
