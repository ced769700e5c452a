// SPDX-License-Identifier: Apache-2.0
#include "attention/merge_states/merge_states.h"
#include "common/parallel.h"
#include "common/simd.h"

namespace specops::SPECOPS_ISA {
namespace {

// Computes out = sum_i e^(lse_i - lse) * out_i and lse = log sum_i e^lse_i, for each row and head.
// Cost:    every state read once; memory-bound.
// Assumes: contiguous tensors.
// Order:   states folded left in fp32: sums of weights relative to the running maximum; rounded
//          once. An empty state is skipped, whatever its out holds.
// Source:  Milakov and Gimelshein 2018; Ye et al. 2024 (cascade attention).
// Threads: blocks of (row, head) items of about 16,384 elements.
template <typename T>
void run(const MergeStatesParams& params) {
  int64_t head_dim = params.head_dim;
  int64_t grain = 16384 / (params.num_states * head_dim + 1) + 1;
  parallel_for(params.num_items, grain, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      auto lse_of = [&](int64_t state) { return params.lses[state * params.num_items + item]; };
      float top = -INFINITY, sum = 0.0f;
      for (int64_t state = 0; state < params.num_states; ++state) {
        float x = lse_of(state);
        if (x == -INFINITY) continue;
        float next = top > x ? top : x;
        float pair[kLanes] = {top - next, x - next};
        store(pair, exp(load(pair)));
        sum = scalar_fma(sum, pair[0], pair[1]);
        top = next;
      }
      T* out = static_cast<T*>(params.out) + item * head_dim;
      if (sum == 0.0f) {
        std::memset(static_cast<void*>(out), 0, head_dim * sizeof(T));
        params.lse[item] = -INFINITY;
        continue;
      }
      for (int64_t i = 0; i < head_dim; i += kLanes) {
        int n = static_cast<int>(head_dim - i);
        F32x16 acc = zero();
        for (int64_t state = 0; state < params.num_states; ++state) {
          if (lse_of(state) == -INFINITY) continue;
          const T* src =
              static_cast<const T*>(params.outs) + (state * params.num_items + item) * head_dim + i;
          F32x16 weight = exp(set1(lse_of(state) - top));
          acc = fma(weight, load_partial(src, n), acc);
        }
        store_partial(out + i, div(acc, set1(sum)), n);
      }
      params.lse[item] = top + std::log(sum);
    }
  });
}

}  // namespace

void merge_states_cpu(const MergeStatesParams& params) {
  switch (params.dtype) {
    case DType::kBFloat16:
      return run<bfloat16>(params);
    case DType::kFloat16:
      return run<float16>(params);
    default:
      return run<float>(params);
  }
}

}  // namespace specops::SPECOPS_ISA
