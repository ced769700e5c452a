// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "attention/rope_append_latent/rope_append_latent.h"
#include "common/device.cuh"

namespace specops {

constexpr int kLatentThreads = 128;
constexpr int kLatentWarps = kLatentThreads / kWarpSize;

// Convert a 16-byte vector to floats, and floats back to a vector with rounding.
template <typename T>
__device__ inline void floats_of(const uint4& vector, float (&x)[16 / sizeof(T)]) {
  const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      x[i] = __uint_as_float(words[i]);
    } else {
      float2 pair = ptx::unpack2<T>(words[i]);
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }
}
template <typename T>
__device__ inline uint4 rounded(const float (&x)[16 / sizeof(T)]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      words[i] = __float_as_uint(x[i]);
    } else {
      words[i] = ptx::pack2<T>(x[2 * i], x[2 * i + 1]);
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

// Copies a latent; if there is a `weight`, normalizes it like rms_norm. The vectors of a lane are
// 32 vectors apart.
template <typename T>
__device__ inline void move_latent(const T* src, T* dst, const T* weight, float eps) {
  constexpr int kPerVector = 16 / sizeof(T);
  constexpr int kVectors = kLatentDim / kPerVector / kWarpSize;  // per lane
  const auto* from = reinterpret_cast<const uint4*>(src);
  auto* to = reinterpret_cast<uint4*>(dst);
  int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  uint4 vectors[kVectors];
  float squares = 0.0f, x[kPerVector], w[kPerVector];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    vectors[v] = from[v * kWarpSize + lane];
    floats_of<T>(vectors[v], x);
#pragma unroll
    for (float value : x) squares = __fmaf_rn(value, value, squares);
  }
  float scale = 1.0f;
  if (weight != nullptr) {
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      squares = __fadd_rn(squares, __shfl_xor_sync(kFullMask, squares, offset));
    }
    float mean = __fdiv_rn(squares, static_cast<float>(kLatentDim));
    scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (weight != nullptr) {
      floats_of<T>(vectors[v], x);
      floats_of<T>(reinterpret_cast<const uint4*>(weight)[v * kWarpSize + lane], w);
#pragma unroll
      for (float& value : x) value = __fmul_rn(value, scale);
      floats_of<T>(rounded<T>(x), x);
#pragma unroll
      for (int i = 0; i < kPerVector; ++i) x[i] = __fmul_rn(w[i], x[i]);
      vectors[v] = rounded<T>(x);
    }
    to[v * kWarpSize + lane] = vectors[v];
  }
}

// Copies q to q_out and rotates its rotary part; writes norm(latent) and the rotated key to the
// slot of the row in the cache.
// Grid:    x = rows * groups of kLatentWarps heads; unbounded. The token to cache counts as one
//          more head after those of q.
// Block:   128 threads; a warp has one head, a lane has vectors of its latent and one rotary pair.
// Smem:    none.
// Cost:    each element read and written once; if q_out is q, only the rotary part of q.
// Assumes: rows, cache, table and weight aligned to 16 bytes; q_out may be q itself.
// Order:   elementwise except the norm's sum of squares: a chain over the elements of a lane from
//          zero, then a tree over neighboring lanes. Same roundings as the CPU kernel. A row whose
//          slot or position is out of range is reported: its q_out is zero, its latent and key are
//          not written.
// Source:  DeepSeek-AI 2024 (DeepSeek-V2); Su et al. 2021 (RoPE).
template <typename T>
__global__ void __launch_bounds__(kLatentThreads)
    rope_append_latent_kernel(RopeAppendLatentParams params) {
  wait_for_previous_kernel();
  int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  int64_t groups = params.num_qo_heads / kLatentWarps + 1;  // num_qo_heads + 1 warps per row
  int64_t row = blockIdx.x / groups;
  int64_t head = blockIdx.x % groups * kLatentWarps + threadIdx.x / kWarpSize;
  if (head > params.num_qo_heads) return;
  bool is_token = head == params.num_qo_heads;
  int64_t slot = params.cache_slots[row];
  int32_t position = params.positions[row];
  Fault fault = find_fault(params, row);
  if (fault.found() && is_token && lane == 0) report_error(params.error, fault.code);
  bool is_nothing = fault.found() || position < 0;
  if (is_token && (is_nothing || slot < 0)) return;
  int64_t place = row * params.num_qo_heads + head;
  const T* src = static_cast<const T*>(params.q) + row * params.q_stride + head * kLatentKeyDim;
  T* dst = static_cast<T*>(params.q_out) + place * kLatentKeyDim;
  if (is_token) {
    src = static_cast<const T*>(params.kv) + row * params.kv_stride;
    dst = static_cast<T*>(params.latent_cache) + slot * kLatentKeyDim;
  }
  if (is_nothing) {
    for (int i = lane; i < kLatentKeyDim; i += kWarpSize) dst[i] = from_float<T>(0.0f);
    return;
  }
  const T* weight = is_token ? static_cast<const T*>(params.norm_weight) : nullptr;
  if (src != dst) move_latent(src, dst, weight, params.norm_eps);
  static_assert(kLatentRopeDim == 2 * kWarpSize);
  int64_t first = kLatentDim + (params.interleaved ? 2 * lane : lane);
  int64_t second = params.interleaved ? first + 1 : first + kWarpSize;
  const float* table = params.cos_sin + position * kLatentRopeDim;
  float a = to_float(src[first]), b = to_float(src[second]);
  float c = table[lane], s = table[kWarpSize + lane];
  dst[first] = from_float<T>(__fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s)));
  dst[second] = from_float<T>(__fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s)));
}

}  // namespace specops
