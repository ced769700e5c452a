// SPDX-License-Identifier: Apache-2.0
#include "common/growing_array.h"
#include "common/parallel.h"
#include "gemm/finish_cpu.h"
#include "gemm/gemm_range.h"
#include "moe/moe_linear.h"

namespace specops::SPECOPS_ISA {
namespace {

// The experts that have rows in the current call.
thread_local GrowingArray<int32_t> busy_experts;

// Computes the products of the experts that have rows. The length of a range of columns is a
// multiple of `together`.
void run(const ExpertsParams& params, int64_t num_columns, int64_t together) {
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
  int64_t parts = num_columns / together;
  int64_t ranges = max64(1, min64(wanted, parts));
  uint64_t product = next_product();
  parallel_for(count * ranges, 1, [&](int64_t item, int64_t) {
    int64_t e = busy[item / ranges], r = item % ranges;
    int64_t first = params.expert_indptr[e];
    GemmParams one = of_expert(params, e, first, params.expert_indptr[e + 1] - first);
    int64_t end = together * part_begin(parts, ranges, r + 1);
    gemm_range(one,
               {.row_begin = 0,
                .row_end = one.rows,
                .begin = together * part_begin(parts, ranges, r),
                .end = end,
                .next = end,
                .product = product});
  });
}

}  // namespace

// Computes out[pair] = (weight of the pair's expert) * x[row of the pair], with the same bits as
// linear with that expert's weight.
// Cost:    the weights of the experts that have rows once from memory, for any number of rows.
// Assumes: weights packed by pack_weight, experts in sequence; indices checked by ops.cpp.
// Order:   that of linear: a pair depends on its row and its expert alone.
// Source:  -
// Threads: ranges of blocks or panels of one expert, with all its rows; enough of them that all
//          threads end at about the same time.
void moe_linear_cpu(const ExpertsParams& params) {
  const WeightParams& weight = params.weight;
  if (is_in_panels(weight.kind)) {
    return run(params, weight_panels(weight.num_outputs, weight.activation), 1);
  }
  // A range never separates a block of gates from the block of its ups.
  int64_t together = is_gated(weight.activation) ? 2 : 1;
  run(params, packed_blocks(weight.num_outputs, weight.activation), together);
}

}  // namespace specops::SPECOPS_ISA
