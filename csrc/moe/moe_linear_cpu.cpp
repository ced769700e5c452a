// SPDX-License-Identifier: Apache-2.0
#include "common/parallel.h"
#include "gemm/ranges_cpu.h"
#include "moe/moe_linear.h"

namespace specops::SPECOPS_ISA {
namespace {

// The experts that have rows, of the call at hand.
thread_local GrowingArray<int32_t> busy_experts;

// out[pair] = weight of the pair's expert * x[row of the pair], bits as linear makes them of that
// expert alone.
// Cost:    the weights of the experts that have rows once from memory, whatever rows these have.
// Assumes: weights packed by pack_weight, one expert behind the other; indices checked by ops.cpp.
// Order:   that of gemm/tile_cpu.h: a pair depends on its row and its expert alone.
// Source:  -
// Threads: ranges of blocks of one expert, with all its rows; so many that threads end together.
template <typename S>
void run(const MoeLinearParams& params) {
  int32_t* busy = busy_experts.reserve(params.num_experts);
  int64_t count = 0;
  for (int64_t e = 0; e < params.num_experts; ++e) {
    if (params.expert_indptr[e + 1] > params.expert_indptr[e]) {
      busy[count++] = static_cast<int32_t>(e);
    }
  }
  if (count == 0) return;
  int64_t together = is_gated(params.weight.activation) ? 2 : 1;
  int64_t blocks = packed_blocks(params.weight.num_outputs, params.weight.activation);
  constexpr int64_t kRangesOfThread = 8, kLeastBlocks = 4;
  int64_t wanted = ceil_div(kRangesOfThread * num_threads(), count);
  int64_t columns = max64(1, min64(wanted, blocks / max64(kLeastBlocks, together)));
  parallel_for(count * columns, 1, [&](int64_t item, int64_t) {
    int64_t e = busy[item / columns], c = item % columns;
    int64_t first = params.expert_indptr[e];
    GemmParams one = of_expert(params, e, first, params.expert_indptr[e + 1] - first);
    int64_t end = together * part_begin(blocks / together, columns, c + 1);
    run_range<S>(one, 0, one.rows, together * part_begin(blocks / together, columns, c), end, end);
  });
}

}  // namespace

void moe_linear_cpu(const MoeLinearParams& params) {
  bool is_bf16 = params.dtype == DType::kBFloat16;
  if (params.weight.kind == WeightKind::kInt8) {
    return is_bf16 ? run<Step<bfloat16, int8_t>>(params) : run<Step<float, int8_t>>(params);
  }
  return is_bf16 ? run<Step<bfloat16, bfloat16>>(params) : run<Step<float, float>>(params);
}

}  // namespace specops::SPECOPS_ISA
