// SPDX-License-Identifier: Apache-2.0
// append_attention on the CPU for queries of one dtype. Each dtype has a source file of its own: an
// instruction set that adds only bf16 products compiles only that file, and no file takes long to
// compile.
#pragma once

#include "attention/append_attention/append_attention.h"
#include "attention/append_attention/cpu/split.h"
#include "attention/append_attention/cpu/walk.h"
#include "common/parallel.h"

namespace specops::SPECOPS_ISA {
namespace {

// Computes out = softmax(q k^T * sm_scale) v over the tokens of its request that each row sees, and
// its log-sum-exp. With sinks, the sink of the row's head is added to the softmax denominator.
// Cost:    the KV in use read once per tile of rows (all rows of a verification, all query heads of
//          a KV head); 4 * tokens * head_dim flops per row and head. Latents: 2,176 flops for 1,152
//          bytes in bf16, so compute-bound from a few rows and heads on.
// Assumes: indices checked; kv_lens >= the request's rows.
// Order:   fp32 states; leaves of 64 tokens, each from a fresh state, folded left into chunks of 8
//          leaves, the chunks folded left into the row's result; a sink last. A dot product is 16
//          lanes over head_dim, then one tree; an output column is one chain over tokens.
//          Probabilities are rounded to bf16 if q is bf16. Tokens that a row does not see never
//          enter its arithmetic. 8-bit elements are exact in the dtype of q and multiplied as such;
//          a score is scaled after sm_scale, a probability before it is rounded.
// Source:  Milakov and Gimelshein 2018 (online softmax), Dao et al. 2022 and 2023 (FlashAttention).
// Threads: (request, tile of rows, chunks, KV heads): as few pieces as keep the threads busy. A
//          thread takes all KV heads of a leaf in turn, so that pages are read in memory order.
// Shared:  leaves that neighboring requests share are reduced first if that pays: read once and
//          multiplied for the rows of all, tile by tile. Each request continues from these states.
// Latents: the first kLatentDim columns of K are V. Query heads form groups that are planned like
//          KV heads, and all read the same leaves; a row's arithmetic is that of any other head.
template <typename T, int D, bool kScaled>
void run_all(const AppendAttentionParams& params) {
  Plan plan;
  for (int64_t first = 0; first < params.batch; first += kPlanned) {
    make_plan(params, first, plan);
    int64_t grain = plan.small ? plan.bundle_units : 1;
    parallel_for(plan.bundle_units, grain, [&](int64_t begin, int64_t end) {
      run_shared_units<T, D, kScaled>(params, plan, begin, end);
    });
    parallel_for(plan.units, plan.small ? plan.units : 1, [&](int64_t begin, int64_t end) {
      run_units<T, D, kScaled>(params, plan, begin, end);
    });
    for (int64_t i = 0; i < plan.count; ++i) {
      const Request& r = plan.requests[i];
      if (r.qo_len > 0 && r.chunks > 1) finish_sequence<T, D>(params, r);
    }
  }
  zero_padding<T, D>(params);
}

template <typename T, int D>
void run(const AppendAttentionParams& params) {
  if constexpr (D != kLatentKeyDim) {
    if (params.k_scales != nullptr) return run_all<T, D, true>(params);
  }
  run_all<T, D, false>(params);
}

template <typename T>
void run_dtype(const AppendAttentionParams& params) {
  switch (params.head_dim) {
    case 64:
      return run<T, 64>(params);
    case 96:
      return run<T, 96>(params);
    case 128:
      return run<T, 128>(params);
    case 512:
      return run<T, 512>(params);
    case kLatentKeyDim:
      return run<T, kLatentKeyDim>(params);
    default:
      return run<T, 256>(params);
  }
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
