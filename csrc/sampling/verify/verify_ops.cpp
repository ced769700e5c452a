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

// Checks the values of tensors on the CPU, all of them before anything is written.
void check_verify_values(const Checker& check, const VerifyParams& params) {
  constexpr SamplingOp kOp = SamplingOp::kVerify;
  for (int64_t b = 0; b < params.batch; ++b) {
    VerifyValues values = values_of(params, b);
    check.refuse(find_fault(params, values, b));
    int32_t num_rows = values.end - values.begin;
    for (int32_t i = 0; i < num_rows; ++i) {
      check.refuse(find_mask_fault(kOp, params.processors, int64_t{values.begin} + i));
      if (i + 1 == num_rows) break;
      check.refuse(
          find_parent_fault(kOp, params.drafts.parents, params.drafts.max_draft_tokens, b, i));
      int64_t begin = params.draft_probs.token_ids ? draft_probs_begin(params, b, i) : -1;
      for (int64_t n = 0; begin >= 0 && n < params.draft_probs.width; ++n) {
        check.refuse(find_listed_fault(params, b, i, params.draft_probs.token_ids[begin + n]));
      }
    }
  }
}

DraftProbs check_draft_probs(Checker& check,
                             Argument given,
                             Dim& batch,
                             const Dim& max_draft_tokens,
                             const Dim& vocab_size) {
  if (!given.defined()) return {};
  auto [probs, token_ids, rows] = check.fields<3>("draft_probs", "DraftProbs", given);
  Dim num_rows{"rows"}, max_drafts{"at most k"}, width{"num_draft_probs"};
  if (!token_ids.defined()) width.value = vocab_size;
  if (!rows.defined()) num_rows = batch, max_drafts = max_draft_tokens;
  check.optional("draft_probs.rows", rows, {DType::kInt32}, {&batch});
  check.tensor("draft_probs.probs", probs, {DType::kFloat32}, {&num_rows, &max_drafts, &width});
  check.that(max_drafts <= max_draft_tokens,
             "draft_probs.probs",
             "of at most k = " + std::to_string(max_draft_tokens.value) + " drafts a row",
             max_drafts.value);
  check.optional(
      "draft_probs.token_ids", token_ids, {DType::kInt32}, {&num_rows, &max_drafts, &width});
  return {.probs = probs.data<float>(),
          .token_ids = token_ids.data<int32_t>(),
          .rows = rows.data<int32_t>(),
          .num_rows = num_rows,
          .max_drafts = max_drafts,
          .width = width};
}

VerifyOutputs check_verify_outputs(Checker& check,
                                   Argument given,
                                   Dim& batch,
                                   Dim& max_draft_tokens) {
  auto [token_ids, num_accepted_tokens, accepted_nodes, logprobs, ranks] =
      check.fields<5>("outputs", "VerifyOutputs", given);
  Dim capacity{"k + 1", max_draft_tokens + 1};
  check.tensor("outputs.token_ids", token_ids, {DType::kInt32}, {&batch, &capacity});
  check.tensor("outputs.num_accepted_tokens", num_accepted_tokens, {DType::kInt32}, {&batch});
  check.optional(
      "outputs.accepted_nodes", accepted_nodes, {DType::kInt32}, {&batch, &max_draft_tokens});
  check.optional("outputs.logprobs", logprobs, {DType::kFloat32}, {&batch, &capacity});
  check.optional("outputs.ranks", ranks, {DType::kInt32}, {&batch, &capacity});
  return {.token_ids = token_ids.data<int32_t>(),
          .num_accepted_tokens = num_accepted_tokens.data<int32_t>(),
          .accepted_nodes = accepted_nodes.data<int32_t>(),
          .logprobs = logprobs.data<float>(),
          .ranks = ranks.data<int32_t>()};
}

void verify(const TensorView& logits,
            Argument drafts_given,
            const TensorView& positions,
            const TensorView& strategy,
            const TensorView& policy,
            const TensorView& accept_rates,
            Argument sampling_given,
            Argument processors_given,
            Argument draft_probs_given,
            Argument processed_logprobs,
            Argument outputs_given,
            const TensorView& workspace) {
  Checker check("verify");
  Dim rows{"num_output_rows"}, vocab_size{"vocab_size"}, batch{"batch"}, max_draft_tokens{"k"};
  check.tensor(
      "logits", logits, {DType::kFloat32, DType::kBFloat16}, {&rows, &vocab_size}, Layout::kRows);
  Drafts drafts = check_drafts(check, drafts_given, batch, max_draft_tokens);
  check.that(drafts.parents == nullptr || max_draft_tokens <= kMaxTreeDrafts,
             "drafts.token_ids",
             "of at most " + std::to_string(kMaxTreeDrafts) + " drafts a request where parents are",
             max_draft_tokens.value);
  check.tensor("positions", positions, {DType::kInt32}, {&batch});
  auto strategies = check.per_row("strategy",
                                  strategy,
                                  batch,
                                  static_cast<int32_t>(VerifyStrategy::kTargetMatch),
                                  "a VerifyStrategy");
  auto policies = check.per_row(
      "policy", policy, batch, static_cast<int32_t>(AcceptPolicy::kNormal), "an AcceptPolicy");
  check.optional("accept_rates", accept_rates, {DType::kFloat32}, {&batch, &max_draft_tokens});
  SamplingTensors sampling = check_sampling(check, SamplingOp::kVerify, sampling_given, batch);
  LogitsProcessors processors = check_processors(check, processors_given, batch, rows, vocab_size);
  DraftProbs draft_probs =
      check_draft_probs(check, draft_probs_given, batch, max_draft_tokens, vocab_size);
  bool of_processed = check.flag("processed_logprobs", processed_logprobs);
  VerifyOutputs outputs = check_verify_outputs(check, outputs_given, batch, max_draft_tokens);
  VerifyParams numbers{};
  numbers.drafts = drafts;
  numbers.strategy.value = strategies.value;
  numbers.policy.value = policies.value;
  check.refuse(find_rules_fault(numbers, strategies.value, policies.value, 0));
  if (batch == 0) return;
  check_vocab(check, vocab_size);

  Workspace space = check_workspace(check, workspace, logits, batch);
  VerifyParams params{
      .logits = logits.raw(),
      .drafts = drafts,
      .positions = positions.data<int32_t>(),
      .strategy = strategies,
      .policy = policies,
      .accept_rates = accept_rates.data<float>(),
      .sampling = sampling,
      .processors = processors,
      .draft_probs = draft_probs,
      .processed_logprobs = of_processed,
      .outputs = outputs,
      .rows = rows,
      .batch = batch,
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
  run_on_cpu<VerifyParams>(verify_cpu, params, drafts.output_indptr[batch] * vocab_size);
}

}  // namespace

void register_verify(pybind11::module_& m) {
  m.def("verify", &verify);
  m.def("set_verify_stamps", &set_verify_stamps);
}

}  // namespace specops
