// SPDX-License-Identifier: Apache-2.0
#include "common/parallel.h"
#include "common/philox.h"
#include "sampling/row_cpu.h"
#include "sampling/sample.h"

namespace specops::SPECOPS_ISA {
namespace {

// token = inverse CDF of filtered softmax(logits / temperature) at the row's own uniform.
// Cost:    one read of rows * vocab_size logits; with top-p a few passes over the row in L2.
// Assumes: rows contiguous, positions >= 0, parameters in range.
// Order:   row_cpu.h; a row depends on nothing but itself.
// Source:  inverse transform sampling; filters in the order of transformers' logits warpers.
// Threads: rows.
template <typename T>
void run(const SampleParams& params) {
  const T* logits = static_cast<const T*>(params.logits);
  parallel_for(params.rows, row_grain(params.vocab_size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      UniformKey key = uniform_key_of(params.filters, row, params.positions[row]);
      RowChoice choice = choose_token(logits + row * params.logits_stride,
                                      params.vocab_size,
                                      filters_of(params.filters, row),
                                      params.logprobs != nullptr,
                                      PhiloxSource{key});
      params.token_ids[row] = choice.token_id;
      if (params.logprobs) params.logprobs[row] = choice.logprob;
    }
  });
}

}  // namespace

void sample_cpu(const SampleParams& params) {
  return params.dtype == DType::kBFloat16 ? run<bfloat16>(params) : run<float>(params);
}

}  // namespace specops::SPECOPS_ISA
