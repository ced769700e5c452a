// SPDX-License-Identifier: Apache-2.0
// Shared parts of the CPU kernels that multiply with packed weights: division of work, and bias,
// activation and rounding of finished sums.
#pragma once

#include "gemm/gated_cpu.h"
#include "gemm/gemm.h"

namespace specops::SPECOPS_ISA {
namespace {

inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Returns the begin of part `index`, if [0, size) is divided into `count` nearly equal parts.
inline int64_t part_begin(int64_t size, int64_t count, int64_t index) {
  return size / count * index + min64(index, size % count);
}

// Finishes outputs: adds the bias in fp32 and rounds once. `sums` is [rows, blocks, 16]. It is
// passed in memory, because gcc does not keep accumulators that are passed by value in registers on
// AVX2.
template <typename T, typename Out>
void finish_as(
    const GemmParams& params, int64_t row, int64_t block, int rows, int blocks, const float* sums) {
  int64_t first = block * kWeightBlock;
  int64_t width = min64(params.weight.num_outputs - first, blocks * kWeightBlock);
  Out* out = static_cast<Out*>(params.out) + row * params.weight.num_outputs + first;
  const T* bias = static_cast<const T*>(params.bias);
  bool is_whole = bias == nullptr && width == blocks * kWeightBlock;
  for (int r = 0; r < rows; ++r, out += params.weight.num_outputs) {
    if (is_whole) {  // the usual case; the other loop's checks would slow short inputs
      for (int64_t col = 0; col < width; col += kWeightBlock, sums += kWeightBlock) {
        store(out + col, load(sums));
      }
      continue;
    }
    for (int64_t col = 0; col < width; col += kWeightBlock, sums += kWeightBlock) {
      int n = static_cast<int>(min64(width - col, kWeightBlock));
      F32x16 sum = load(sums);
      if (bias != nullptr) sum = add(sum, load_partial(bias + first + col, n));
      store_partial(out + col, sum, n);
    }
  }
}

template <typename T>
[[gnu::noinline]] void finish(
    const GemmParams& params, int64_t row, int64_t block, int rows, int blocks, const float* sums) {
  bool is_bf16 = params.out_dtype == DType::kBFloat16;
  auto* end = is_bf16 ? finish_as<T, bfloat16> : finish_as<T, float>;
  end(params, row, block, rows, blocks, sums);
}

// Finishes gates and ups. Blocks come in order, and a block of gates precedes the block of its ups.
// If the ups belong to another tile, the gates wait in `out`; the rounding to its type has to
// happen anyway.
template <typename T>
[[gnu::noinline]] void finish_gated(
    const GemmParams& params, int64_t row, int64_t block, int rows, int blocks, const float* sums) {
  int64_t width = params.weight.num_outputs / 2;
  for (int r = 0; r < rows; ++r) {
    F32x16 gate = zero();
    for (int b = 0; b < blocks; ++b, sums += kWeightBlock) {
      int64_t first = (block + b) / 2 * kWeightBlock;
      bool is_up = (block + b) % 2 != 0;
      int n = static_cast<int>(min64(width - first, kWeightBlock));
      F32x16 sum = load(sums);
      if (params.bias != nullptr) {
        const T* bias = static_cast<const T*>(params.bias) + (is_up ? width : 0);
        sum = add(sum, load_partial(bias + first, n));
      }
      T* out = static_cast<T*>(params.out) + (row + r) * width + first;
      sum = round_to<T>(sum);
      if (is_up) {
        if (b == 0) gate = load_partial(out, n);
        store_partial(out, gated_of(params.weight.activation, gate, sum), n);
      } else {
        gate = sum;
        if (b + 1 == blocks) store_partial(out, gate, n);
      }
    }
  }
}

inline void finish_rows(
    const GemmParams& params, int64_t row, int64_t block, int rows, int blocks, const float* sums) {
  bool is_bf16 = params.dtype == DType::kBFloat16;
  auto* whole = is_bf16 ? finish<bfloat16> : finish<float>;
  auto* gated = is_bf16 ? finish_gated<bfloat16> : finish_gated<float>;
  auto* end = is_gated(params.weight.activation) ? gated : whole;
  end(params, row, block, rows, blocks, sums);
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
