// SPDX-License-Identifier: Apache-2.0
#include "common/parallel.h"
#include "gemm/integer_tile_cpu.h"
#include "gemm/ranges_cpu.h"
#include "moe/moe_linear.h"

namespace specops::SPECOPS_ISA {
namespace {

// The experts that have rows, of the call at hand.
thread_local GrowingArray<int32_t> busy_experts;

// part(product of one expert, first column, last column): columns are blocks or panels, of which
// `together` are never parted.
template <typename Fn>
void run(const MoeLinearParams& params, int64_t num_columns, int64_t together, const Fn& part) {
  int32_t* busy = busy_experts.reserve(params.num_experts);
  int64_t count = 0;
  for (int64_t e = 0; e < params.num_experts; ++e) {
    if (params.expert_indptr[e + 1] > params.expert_indptr[e]) {
      busy[count++] = static_cast<int32_t>(e);
    }
  }
  if (count == 0) return;
  constexpr int64_t kRangesOfThread = 8;
  int64_t wanted = ceil_div(kRangesOfThread * num_threads(), count);
  int64_t ranges = max64(1, min64(wanted, num_columns / together));
  parallel_for(count * ranges, 1, [&](int64_t item, int64_t) {
    int64_t e = busy[item / ranges], r = item % ranges;
    int64_t first = params.expert_indptr[e];
    part(of_expert(params, e, first, params.expert_indptr[e + 1] - first),
         together * part_begin(num_columns / together, ranges, r),
         together * part_begin(num_columns / together, ranges, r + 1));
  });
}

template <typename S>
void run_blocks(const MoeLinearParams& params) {
  // A block of gates and that of their ups.
  int64_t together = is_gated(params.weight.activation) ? 2 : 1;
  int64_t blocks = packed_blocks(params.weight.num_outputs, params.weight.activation);
  run(params, blocks, together, [](const GemmParams& one, int64_t begin, int64_t end) {
    run_range<S>(one, 0, one.rows, begin, end, end);
  });
}

template <typename Codes>
void run_panels(const MoeLinearParams& params) {
  int64_t panels = weight_panels(params.weight.num_outputs, params.weight.activation);
  uint64_t call = next_call();
  run(params, panels, 1, [=](const GemmParams& one, int64_t begin, int64_t end) {
    integer_range<Codes>(one, 0, one.rows, begin, end, call);
  });
}

}  // namespace

// out[pair] = weight of the pair's expert * x[row of the pair], bits as linear makes them of that
// expert alone.
// Cost:    the weights of the experts that have rows once from memory, whatever rows these have.
// Assumes: weights packed by pack_weight, one expert behind the other; indices checked by ops.cpp.
// Order:   that of linear: a pair depends on its row and its expert alone.
// Source:  -
// Threads: ranges of blocks or panels of one expert, with all its rows; so many that threads end
//          together.
void moe_linear_cpu(const MoeLinearParams& params) {
  bool is_bf16 = params.dtype == DType::kBFloat16;
  switch (params.weight.kind) {
    case WeightKind::kPlain:
      return is_bf16 ? run_blocks<Step<bfloat16, bfloat16>>(params)
                     : run_blocks<Step<float, float>>(params);
    case WeightKind::kFp8:
      return is_bf16 ? run_blocks<Step<bfloat16, E4M3>>(params)
                     : run_blocks<Step<float, E4M3>>(params);
    default:
      with_codes(params.weight, [&]<typename Codes>() { run_panels<Codes>(params); });
  }
}

}  // namespace specops::SPECOPS_ISA
