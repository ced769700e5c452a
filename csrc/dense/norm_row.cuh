// SPDX-License-Identifier: Apache-2.0
// RMSNorm of one row by a block. All kernels that normalize rows use it, so that they give the same
// bits.
#pragma once

#include "common/chunk.cuh"

namespace specops {

constexpr int kRmsNormHeld = 2;  // chunks of a row that a thread keeps in registers
constexpr int kRmsNormMaxThreads = 1024;

// Returns the number of threads for which each has two chunks, so that the loads of one chunk hide
// the latency of the other.
template <typename T>
constexpr int rms_norm_threads(int64_t width) {
  int64_t chunks = (width + kChunk<T> - 1) / kChunk<T>;
  int64_t held = int64_t{kRmsNormHeld} * kWarpSize;
  int64_t warps = (chunks + held - 1) / held;
  int64_t threads = warps * kWarpSize;
  return static_cast<int>(threads < kRmsNormMaxThreads ? threads : kRmsNormMaxThreads);
}

// Computes h = residual + x (rounded and stored) if there is a residual, else h = x; then out = T(h
// / sqrt(mean(h^2) + eps)) * weight, rounded again. Sum of squares: with rms_norm_threads threads,
// thread i adds the chunks i, i + threads, ... in order; then a butterfly adds the lanes of each
// warp; then the warps are added in order, through one float of shared memory each.
template <typename T>
__device__ inline void norm_row(
    const T* x, T* residual, const T* weight, T* out, int64_t width, float eps, bool aligned) {
  int threads = static_cast<int>(blockDim.x);
  int thread = static_cast<int>(threadIdx.x);
  // Returns the first column of this thread's chunk i.
  auto column = [&](int i) { return (int64_t{i} * threads + thread) * kChunk<T>; };
  auto count = [&](int64_t col) {
    return static_cast<int>(max(min(width - col, int64_t{kChunk<T>}), int64_t{0}));
  };

  float squares = 0.0f;
  // Computes the hidden values h of a chunk (adds, rounds and stores them), and adds up their
  // squares.
  auto add_chunk = [&](int64_t col, uint4 chunk, uint4 base) {
    float h[kChunk<T>];
    unpack_chunk<T>(h, chunk);
    if (residual != nullptr) {
      float r[kChunk<T>];
      unpack_chunk<T>(r, base);
#pragma unroll
      for (int j = 0; j < kChunk<T>; ++j) h[j] = __fadd_rn(r[j], h[j]);
      chunk = pack_chunk<T>(h);
      store_chunk(residual + col, chunk, count(col), aligned);
      unpack_chunk<T>(h, chunk);
    }
#pragma unroll
    for (int j = 0; j < kChunk<T>; ++j) squares = __fmaf_rn(h[j], h[j], squares);
    return chunk;
  };

  // All loads come before the first use and the first store, so that they overlap.
  uint4 held[kRmsNormHeld], base[kRmsNormHeld], gain[kRmsNormHeld];
#pragma unroll
  for (int i = 0; i < kRmsNormHeld; ++i) {
    int64_t col = column(i);
    held[i] = base[i] = gain[i] = make_uint4(0, 0, 0, 0);
    if (col >= width) continue;
    held[i] = load_chunk(x + col, count(col), aligned);
    if (residual != nullptr) base[i] = load_chunk(residual + col, count(col), aligned);
    gain[i] = load_chunk(weight + col, count(col), aligned);
  }
#pragma unroll
  for (int i = 0; i < kRmsNormHeld; ++i) {
    if (column(i) < width) held[i] = add_chunk(column(i), held[i], base[i]);
  }
  for (int i = kRmsNormHeld; column(i) < width; ++i) {
    int64_t col = column(i);
    uint4 old = make_uint4(0, 0, 0, 0);
    if (residual != nullptr) old = load_chunk(residual + col, count(col), aligned);
    add_chunk(col, load_chunk(x + col, count(col), aligned), old);
  }

#pragma unroll
  for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2) {
    squares = __fadd_rn(squares, __shfl_xor_sync(kFullMask, squares, lanes));
  }
  auto* warp_sums = reinterpret_cast<float*>(shared_memory());
  if (thread % kWarpSize == 0) warp_sums[thread / kWarpSize] = squares;
  __syncthreads();
  squares = warp_sums[0];
  for (int i = 1; i < threads / kWarpSize; ++i) squares = __fadd_rn(squares, warp_sums[i]);
  float mean = __fdiv_rn(squares, static_cast<float>(width));
  float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));

  auto normalize = [&](int64_t col, int n, uint4 hidden, uint4 gains) {
    float h[kChunk<T>], w[kChunk<T>];
    unpack_chunk<T>(h, hidden);
#pragma unroll
    for (int j = 0; j < kChunk<T>; ++j) h[j] = __fmul_rn(h[j], scale);
    unpack_chunk<T>(h, pack_chunk<T>(h));
    unpack_chunk<T>(w, gains);
#pragma unroll
    for (int j = 0; j < kChunk<T>; ++j) h[j] = __fmul_rn(h[j], w[j]);
    store_chunk(out + col, pack_chunk<T>(h), n, aligned);
  };
#pragma unroll
  for (int i = 0; i < kRmsNormHeld; ++i) {
    int64_t col = column(i);
    if (col < width) normalize(col, count(col), held[i], gain[i]);
  }
  for (int i = kRmsNormHeld; column(i) < width; ++i) {
    int64_t col = column(i);
    int n = count(col);
    const T* hidden = residual != nullptr ? residual : x;
    normalize(col, n, load_chunk(hidden + col, n, aligned), load_chunk(weight + col, n, aligned));
  }
}

}  // namespace specops
