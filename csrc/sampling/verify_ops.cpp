// SPDX-License-Identifier: Apache-2.0
// Argument checks and registration of verify.
#include "sampling/checks.h"
#include "sampling/ops.h"
#include "sampling/row_rule.h"
#include "sampling/verify.h"

namespace specops {
namespace {

// Strategy and policy of request i.
void check_rules(Checker& check, const VerifyParams& params, int64_t i) {
  bool tree = params.parents != nullptr;
  if (!is_strategy(params.strategy[i], tree)) {
    check.fail(at("strategy", params.strategy, i),
               tree ? "0 (GREEDY), 1 (TARGET_MATCH) or 2 (REJECTION) where parents are given"
                    : "0 (GREEDY), 1 (TARGET_MATCH), 2 (REJECTION), 3 (BLOCK) or 4 (TOPP)",
               std::to_string(params.strategy[i]));
  }
  if (!is_policy(params.policy[i], tree)) {
    check.fail(at("policy", params.policy, i),
               tree ? "0 (NORMAL) or 2 (REJECT_ALL) where parents are given"
                    : "0 (NORMAL), 1 (ACCEPT_ALL), 2 (REJECT_ALL) or 3 (SYNTHETIC)",
               std::to_string(params.policy[i]));
  }
}

// Values, on cpu: all of them before anything is written.
void check_verify_values(Checker& check, const VerifyParams& params, int64_t max_len) {
  const int32_t* indptr = params.output_indptr;
  for (int64_t i = 0; i < params.batch; ++i) {
    check_indptr(check, indptr, i, params.max_draft_tokens + 1, params.rows);
    int64_t num_rows = int64_t{indptr[i + 1]} - indptr[i];
    if (num_rows == 0) continue;  // an idle slot may hold anything
    check_filter_values(check, params.filters, i);
    check_processor_values(
        check, params.processors, i, params.positions[i], max_len, indptr[i], indptr[i + 1]);
    check_rules(check, params, i);
    auto rule = static_cast<VerifyStrategy>(params.strategy[i]);
    auto choice = static_cast<AcceptPolicy>(params.policy[i]);
    bool unseeded =
        params.filters.seeds == nullptr && draws(rule, choice, params.filters.temperature[i]);
    check.that(!unseeded,
               "seeds",
               "given where a temperature is above 0 or a policy is 3 (SYNTHETIC)",
               "None");
    int64_t source = params.draft_prob_rows ? params.draft_prob_rows[i] : -1;
    if (source < -1 || source >= params.num_draft_prob_rows) {
      check.fail(
          at("draft_prob_rows", i),
          "-1 or below the rows of draft_probs = " + std::to_string(params.num_draft_prob_rows),
          std::to_string(source));
    }
    bool synthetic = choice == AcceptPolicy::kSynthetic;
    if (synthetic && params.max_draft_tokens > 0 && params.accept_rates == nullptr) {
      check.fail("accept_rates", "given where a policy is 3 (SYNTHETIC)", "None");
    }
    check_parents(check, params.parents, i, num_rows - 1, params.max_draft_tokens);
    for (int64_t j = 0; j + 1 < num_rows; ++j) {
      int64_t draft = i * params.max_draft_tokens + j;
      float rate = synthetic ? params.accept_rates[draft] : 0.0f;
      if (!(rate >= 0.0f && rate <= 1.0f)) {
        check.fail(at("accept_rates", i, j), "within [0, 1]", std::to_string(rate));
      }
      int64_t begin = params.draft_prob_token_ids ? draft_probs_begin(params, i, j) : -1;
      for (int64_t n = 0; begin >= 0 && n < params.num_draft_probs; ++n) {
        int32_t token = params.draft_prob_token_ids[begin + n];
        if (token >= -1 && token < params.vocab_size) continue;
        check.fail(at("draft_prob_token_ids", i, j),
                   "-1 or below vocab_size = " + std::to_string(params.vocab_size),
                   std::to_string(token));
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
            const ProcessorViews& processor_views,
            const TensorView& draft_probs,
            const TensorView& draft_prob_token_ids,
            const TensorView& draft_prob_rows,
            const TensorView& accept_rates,
            bool processed_logprobs,
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
  auto strategies = check.per_row(
      "strategy", strategy, batch, static_cast<int32_t>(VerifyStrategy::kTargetMatch));
  auto policies =
      check.per_row("policy", policy, batch, static_cast<int32_t>(AcceptPolicy::kNormal));
  FilterArrays filters = check_filters(check, {temperature, top_k, top_p, min_p, typical_p}, batch);
  check_streams(check, filters, seeds, choice_index, batch);
  LogitsProcessors processors = check_processors(check, processor_views, batch, rows, vocab_size);
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
  check_rules(check, numbers, 0);
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
      .processed_logprobs = processed_logprobs,
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
  };
  if (check.on_cuda()) return verify_cuda(params, check.stream());
  check_verify_values(check, params, history_len(processor_views));
  run_on_cpu<VerifyParams>(verify_cpu, params, params.output_indptr[batch] * vocab_size);
}

}  // namespace

void register_verify(pybind11::module_& m) { m.def("verify", &verify); }

}  // namespace specops
