// SPDX-License-Identifier: Apache-2.0
#include "common/parallel.h"
#include "common/philox.h"
#include "sampling/accept_walk.h"
#include "sampling/row_cpu.h"
#include "sampling/verify.h"

namespace specops::SPECOPS_ISA {
namespace {

AcceptPolicy policy_of(const VerifyParams& params, int64_t batch_idx) {
  return params.policy ? static_cast<AcceptPolicy>(params.policy[batch_idx])
                       : AcceptPolicy::kNormal;
}

// Each output row's own choice, exactly as sample makes it, then the walk along the drafts.
// Cost:    one read of num_output_rows * vocab_size logits; with top-p a few passes in L2.
// Assumes: output_indptr ascending within the rows, at most max_draft_tokens + 1 rows a request.
// Order:   row_cpu.h; a row depends on its request's parameters and position alone.
// Source:  Leviathan et al. 2023 with a deterministic drafter; the row's own choice is the coin.
// Threads: output rows, then the walk on the caller.
template <typename T>
void run(const VerifyParams& params) {
  const T* logits = static_cast<const T*>(params.logits);
  int64_t capacity = params.max_draft_tokens + 1;
  // The walk's arrays hold the choices meanwhile: request b's row i is at [b, i].
  parallel_for(
      params.batch * capacity, row_grain(params.vocab_size), [&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; ++item) {
          int64_t batch_idx = item / capacity;
          int idx = static_cast<int>(item % capacity);
          int64_t first = params.output_indptr[batch_idx];
          int num_rows = static_cast<int>(params.output_indptr[batch_idx + 1] - first);
          AcceptPolicy policy = policy_of(params, batch_idx);
          if (idx >= (policy == AcceptPolicy::kRejectAll && num_rows > 0 ? 1 : num_rows)) continue;
          const T* row = logits + (first + idx) * params.logits_stride;
          const int32_t* drafts = params.draft_token_ids + batch_idx * params.max_draft_tokens;
          SamplingParams filters = filters_of(params.filters, batch_idx);
          if (params.strategy &&
              params.strategy[batch_idx] == static_cast<int32_t>(VerifyStrategy::kGreedy)) {
            filters.temperature = 0.0f;
          }
          RowChoice choice{-1, 0.0f};
          if (takes_draft(policy, drafts, num_rows, idx)) {
            choice = score_token(row, params.vocab_size, drafts[idx], params.logprobs != nullptr);
          } else {
            UniformKey key =
                uniform_key_of(params.filters, batch_idx, params.positions[batch_idx] + idx);
            choice = choose_token(
                row, params.vocab_size, filters, params.logprobs != nullptr, PhiloxSource{key});
          }
          params.output_token_ids[item] = choice.token_id;
          if (params.logprobs) params.logprobs[item] = choice.logprob;
        }
      });
  for (int64_t batch_idx = 0; batch_idx < params.batch; ++batch_idx) {
    params.num_accepted_tokens[batch_idx] =
        accept_walk(policy_of(params, batch_idx),
                    params.draft_token_ids + batch_idx * params.max_draft_tokens,
                    params.output_indptr[batch_idx + 1] - params.output_indptr[batch_idx],
                    static_cast<int>(capacity),
                    params.output_token_ids + batch_idx * capacity,
                    params.logprobs ? params.logprobs + batch_idx * capacity : nullptr);
  }
}

}  // namespace

void verify_cpu(const VerifyParams& params) {
  return params.dtype == DType::kBFloat16 ? run<bfloat16>(params) : run<float>(params);
}

}  // namespace specops::SPECOPS_ISA
