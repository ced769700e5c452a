// SPDX-License-Identifier: Apache-2.0
#include "common/parallel.h"
#include "sampling/row/cpu/target_row.h"
#include "sampling/row/uniform_source.h"
#include "sampling/sample/sample.h"

namespace specops::SPECOPS_ISA {
namespace {

// Computes token = inverse CDF of filtered softmax(processed logits / temperature), at a uniform
// that depends only on the row's request and position.
// Cost:    one read of rows * vocab_size logits; with top-p a few passes over the row in L2, with
//          processors a copy of it.
// Assumes: rows contiguous, positions >= 0, parameters in range.
// Order:   row/cpu/row.h; a row depends only on its own inputs.
// Source:  inverse transform sampling; filters in the order of transformers' logits warpers.
// Threads: one item per row.
template <typename T>
void run(const SampleParams& params) {
  const T* logits = static_cast<const T*>(params.logits);
  bool any_processors = has_processors(params.processors);
  RowScores scores{.logprob = params.outputs.logprobs != nullptr,
                   .rank = params.outputs.ranks != nullptr,
                   .processed = params.processed_logprobs};
  parallel_for(params.rows, row_grain(params.vocab_size), [&](int64_t begin, int64_t end) {
    for (int64_t idx = begin; idx < end; ++idx) {
      RowProcessors processors;
      if (any_processors) {
        processors = row_processors(params.processors, idx, idx, params.positions[idx], {});
      }
      TargetRow<T> row(logits + idx * params.logits_stride,
                       params.vocab_size,
                       filters_of(params.sampling, idx),
                       any_processors ? &processors : nullptr,
                       scores);
      uint32_t anchor = params.anchors ? static_cast<uint32_t>(params.anchors[idx]) : 0u;
      UniformKey key = uniform_key_of(params.sampling, idx, params.positions[idx], anchor);
      int32_t token_id = row.choose(params.purpose, PhiloxSource{key});
      params.outputs.token_ids[idx] = token_id;
      if (params.outputs.logprobs) params.outputs.logprobs[idx] = row.logprob(token_id);
      if (params.outputs.ranks) params.outputs.ranks[idx] = row.rank(token_id);
      if (params.outputs.probs)
        write_target_probs(row.kept(), params.outputs.probs + idx * params.outputs.probs_stride);
    }
  });
}

}  // namespace

void sample_cpu(const SampleParams& params) {
  return params.dtype == DType::kBFloat16 ? run<bfloat16>(params) : run<float>(params);
}

}  // namespace specops::SPECOPS_ISA
