// SPDX-License-Identifier: Apache-2.0
// What linear's kernels on cpu have in common: how work is parted, and what becomes of finished sums.
#pragma once

#include "dense/gated_cpu.h"
#include "dense/linear.h"

namespace specops::SPECOPS_ISA {
namespace {

inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Where part `index` of `count` nearly equal parts of [0, size) begins.
inline int64_t part_begin(int64_t size, int64_t count, int64_t index) {
  return size / count * index + min64(index, size % count);
}

// Outputs are finished here and below: bias in fp32, then one rounding. `sums` is [rows, blocks, 16];
// it comes through memory because gcc keeps accumulators passed by value out of registers on AVX2.
template <typename T>
[[gnu::noinline]] void finish(const LinearParams& params,
                              int64_t row,
                              int64_t block,
                              int rows,
                              int blocks,
                              const float* sums) {
  for (int r = 0; r < rows; ++r) {
    for (int b = 0; b < blocks; ++b, sums += kLinearBlock) {
      int64_t first = (block + b) * kLinearBlock;
      int n = static_cast<int>(min64(params.num_outputs - first, kLinearBlock));
      F32x16 sum = load(sums);
      if (params.bias != nullptr) {
        sum = add(sum, load_partial(static_cast<const T*>(params.bias) + first, n));
      }
      int64_t at = (row + r) * params.num_outputs + first;
      if (params.out_dtype == DType::kBFloat16) {
        store_partial(static_cast<bfloat16*>(params.out) + at, sum, n);
      } else {
        store_partial(static_cast<float*>(params.out) + at, sum, n);
      }
    }
  }
}

// The same of gates and ups. Blocks come in order, a block of gates before that of their ups: gates
// wait in `out`, rounded as they are anyway, until the product with the ups takes their place.
template <typename T>
[[gnu::noinline]] void finish_gated(const LinearParams& params,
                                    int64_t row,
                                    int64_t block,
                                    int rows,
                                    int blocks,
                                    const float* sums) {
  int64_t width = params.num_outputs / 2;
  for (int r = 0; r < rows; ++r) {
    for (int b = 0; b < blocks; ++b, sums += kLinearBlock) {
      int64_t first = (block + b) / 2 * kLinearBlock;
      bool is_up = (block + b) % 2 != 0;
      int n = static_cast<int>(min64(width - first, kLinearBlock));
      F32x16 sum = load(sums);
      if (params.bias != nullptr) {
        const T* bias = static_cast<const T*>(params.bias) + (is_up ? width : 0);
        sum = add(sum, load_partial(bias + first, n));
      }
      T* out = static_cast<T*>(params.out) + (row + r) * width + first;
      if (is_up) {
        T up[kLinearBlock];
        store_partial(up, sum, kLinearBlock);
        sum = silu_mul_of(load_partial(out, n), load_partial(up, n));
      }
      store_partial(out, sum, n);
    }
  }
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
