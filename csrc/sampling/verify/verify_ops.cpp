// SPDX-License-Identifier: Apache-2.0
// Argument checks and registration of verify.
#include "common/stamps_checks.h"
#include "sampling/checks.h"
#include "sampling/ops.h"
#include "sampling/verify/verify.h"

namespace specops {
namespace {

// The buffer in which verify on CUDA records phase times.
GivenPhaseStamps given_verify_stamps;

void set_verify_stamps(const TensorView& stamps) {
  given_verify_stamps.set("set_verify_stamps", stamps, kVerifyStampWords);
}

// Checks values on cpu, all of them before anything is written.
void check_verify_values(const Checker& check, const VerifyParams& params) {
  constexpr SamplingOp kOp = SamplingOp::kVerify;
  for (int64_t b = 0; b < params.batch; ++b) {
    VerifyValues values = values_of(params, b);
    check.refuse(find_fault(params, values, b));
    int32_t num_rows = values.end - values.begin;
    for (int32_t i = 0; i < num_rows; ++i) {
      check.refuse(find_mask_fault(kOp, params.processors, int64_t{values.begin} + i));
      if (i + 1 == num_rows) break;
      check.refuse(find_parent_fault(kOp, params.parents, params.max_draft_tokens, b, i));
      int64_t begin = params.draft_prob_token_ids ? draft_probs_begin(params, b, i) : -1;
      for (int64_t n = 0; begin >= 0 && n < params.num_draft_probs; ++n) {
        check.refuse(find_listed_fault(params, b, i, params.draft_prob_token_ids[begin + n]));
      }
    }
  }
}

void verify(const TensorView& logits,
            const TensorView& output_indptr,
            const TensorView& draft_token_ids,
            const TensorView& positions,
            const TensorView& parents,
            const TensorView& strategy,
            const TensorView& policy,
            const TensorView& temperature,
            const TensorView& top_k,
            const TensorView& top_p,
            const TensorView& min_p,
            const TensorView& typical_p,
            const TensorView& seeds,
            const TensorView& choice_index,
            Argument processor_fields,
            const TensorView& draft_probs,
            const TensorView& draft_prob_token_ids,
            const TensorView& draft_prob_rows,
            const TensorView& accept_rates,
            Argument processed_logprobs,
            const TensorView& logprobs,
            const TensorView& ranks,
            const TensorView& output_token_ids,
            const TensorView& num_accepted_tokens,
            const TensorView& accepted_nodes,
            const TensorView& workspace) {
  Checker check("verify");
  Dim rows{"num_output_rows"}, vocab_size{"vocab_size"}, batch{"batch"};
  Dim drafts{"k"}, batch_plus_one{"batch + 1"}, capacity{"k + 1"};
  Dim num_draft_probs{"num_draft_probs"};
  check.tensor(
      "logits", logits, {DType::kFloat32, DType::kBFloat16}, {&rows, &vocab_size}, Layout::kRows);
  check.tensor("draft_token_ids", draft_token_ids, {DType::kInt32}, {&batch, &drafts});
  batch_plus_one.value = batch + 1;
  capacity.value = drafts + 1;
  check.tensor("output_indptr", output_indptr, {DType::kInt32}, {&batch_plus_one});
  check.optional("parents", parents, {DType::kInt32}, {&batch, &drafts});
  check.that(!parents.defined() || drafts <= kMaxTreeDrafts,
             "draft_token_ids",
             "of at most " + std::to_string(kMaxTreeDrafts) + " drafts a request where parents are",
             drafts.value);
  check.tensor("positions", positions, {DType::kInt32}, {&batch});
  auto strategies = check.per_row("strategy",
                                  strategy,
                                  batch,
                                  static_cast<int32_t>(VerifyStrategy::kTargetMatch),
                                  "a VerifyStrategy");
  auto policies = check.per_row(
      "policy", policy, batch, static_cast<int32_t>(AcceptPolicy::kNormal), "an AcceptPolicy");
  FilterArrays filters = check_filters(
      check, SamplingOp::kVerify, {temperature, top_k, top_p, min_p, typical_p}, batch);
  check_streams(check, filters, seeds, choice_index, batch);
  LogitsProcessors processors = check_processors(check, processor_fields, batch, rows, vocab_size);
  if (!draft_prob_token_ids.defined()) num_draft_probs.value = vocab_size;
  Dim source_rows{"rows"}, drawn{"at most k"};
  check.optional("draft_prob_rows", draft_prob_rows, {DType::kInt32}, {&batch});
  if (!draft_prob_rows.defined()) source_rows = batch, drawn = drafts;
  check.optional(
      "draft_probs", draft_probs, {DType::kFloat32}, {&source_rows, &drawn, &num_draft_probs});
  check.that(drawn <= drafts,
             "draft_probs",
             "of at most k = " + std::to_string(drafts.value) + " drafts a row",
             drawn.value);
  check.optional("draft_prob_token_ids",
                 draft_prob_token_ids,
                 {DType::kInt32},
                 {&source_rows, &drawn, &num_draft_probs});
  bool probs_ok = draft_probs.defined() || !draft_prob_token_ids.defined();
  check.that(probs_ok, "draft_probs", "given with draft_prob_token_ids", "None");
  bool rows_ok = draft_probs.defined() || !draft_prob_rows.defined();
  check.that(rows_ok, "draft_probs", "given with draft_prob_rows", "None");
  bool of_processed = check.flag("processed_logprobs", processed_logprobs);
  check.optional("accept_rates", accept_rates, {DType::kFloat32}, {&batch, &drafts});
  check.tensor("output_token_ids", output_token_ids, {DType::kInt32}, {&batch, &capacity});
  check.tensor("num_accepted_tokens", num_accepted_tokens, {DType::kInt32}, {&batch});
  check.optional("accepted_nodes", accepted_nodes, {DType::kInt32}, {&batch, &drafts});
  check.optional("logprobs", logprobs, {DType::kFloat32}, {&batch, &capacity});
  check.optional("ranks", ranks, {DType::kInt32}, {&batch, &capacity});
  VerifyParams numbers{};
  numbers.parents = parents.data<int32_t>();
  numbers.strategy.value = strategies.value;
  numbers.policy.value = policies.value;
  check.refuse(find_rules_fault(numbers, strategies.value, policies.value, 0));
  if (batch == 0) return;
  check_vocab(check, vocab_size);

  Workspace space = check_workspace(check, workspace, logits, batch);
  VerifyParams params{
      .logits = logits.raw(),
      .output_indptr = output_indptr.data<int32_t>(),
      .draft_token_ids = draft_token_ids.data<int32_t>(),
      .parents = parents.data<int32_t>(),
      .positions = positions.data<int32_t>(),
      .strategy = strategies,
      .policy = policies,
      .filters = filters,
      .processors = processors,
      .draft_probs = draft_probs.data<float>(),
      .draft_prob_token_ids = draft_prob_token_ids.data<int32_t>(),
      .draft_prob_rows = draft_prob_rows.data<int32_t>(),
      .accept_rates = accept_rates.data<float>(),
      .output_token_ids = output_token_ids.data<int32_t>(),
      .num_accepted_tokens = num_accepted_tokens.data<int32_t>(),
      .accepted_nodes = accepted_nodes.data<int32_t>(),
      .logprobs = logprobs.data<float>(),
      .ranks = ranks.data<int32_t>(),
      .processed_logprobs = of_processed,
      .rows = rows,
      .batch = batch,
      .max_draft_tokens = drafts,
      .num_draft_prob_rows = source_rows,
      .max_drawn_drafts = drawn,
      .num_draft_probs = num_draft_probs,
      .vocab_size = vocab_size,
      .logits_stride = logits.stride(0),
      .dtype = logits.dtype(),
      .workspace = space.data,
      .workspace_bytes = space.num_bytes,
      .error = check.error_flag(),
      .stamps = nullptr,
      .stamped_blocks = 0,
  };
  if (check.on_cuda()) {
    PhaseStamps to = given_verify_stamps.get();
    params.stamps = to.words;
    params.stamped_blocks = to.blocks;
    check.that(to.words == nullptr || has_stamped_kernel(params),
               "logits",
               "bfloat16, without processors, while phases are stamped",
               "another call");
    return verify_cuda(params, check.stream());
  }
  check_verify_values(check, params);
  run_on_cpu<VerifyParams>(verify_cpu, params, params.output_indptr[batch] * vocab_size);
}

}  // namespace

void register_verify(pybind11::module_& m) {
  m.def("verify", &verify);
  m.def("set_verify_stamps", &set_verify_stamps);
}

}  // namespace specops
