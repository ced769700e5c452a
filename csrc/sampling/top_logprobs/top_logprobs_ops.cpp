// SPDX-License-Identifier: Apache-2.0
// Argument checks and registration of top_logprobs.
#include "sampling/checks.h"
#include "sampling/ops.h"
#include "sampling/top_logprobs/top_logprobs.h"

namespace specops {
namespace {

TopLogprobsOutputs check_top_outputs(Checker& check, Argument given, Dim& rows, Dim& n) {
  auto [token_ids, logprobs, ranks, lse] = check.fields<4>("outputs", "TopLogprobsOutputs", given);
  check.tensor("outputs.token_ids", token_ids, {DType::kInt32}, {&rows, &n});
  check.tensor("outputs.logprobs", logprobs, {DType::kFloat32}, {&rows, &n});
  check.optional("outputs.ranks", ranks, {DType::kInt32}, {&rows, &n});
  check.tensor("outputs.lse", lse, {DType::kFloat32}, {&rows});
  return {.token_ids = token_ids.data<int32_t>(),
          .logprobs = logprobs.data<float>(),
          .ranks = ranks.data<int32_t>(),
          .lse = lse.data<float>()};
}

void top_logprobs(const TensorView& logits,
                  Argument n_given,
                  Argument processed_logprobs_given,
                  Argument drafts_given,
                  const TensorView& positions,
                  Argument sampling_given,
                  Argument processors_given,
                  Argument outputs_given,
                  const TensorView& workspace) {
  Checker check("top_logprobs");
  Dim rows{"rows"}, vocab_size{"vocab_size"}, n{"n"}, batch{"batch"}, max_draft_tokens{"k"};
  check.tensor(
      "logits", logits, {DType::kFloat32, DType::kBFloat16}, {&rows, &vocab_size}, Layout::kRows);
  n.value = check.integer("n", n_given, 0, vocab_size);
  bool processed_logprobs = check.flag("processed_logprobs", processed_logprobs_given);
  TopLogprobsOutputs outputs = check_top_outputs(check, outputs_given, rows, n);
  Drafts drafts;
  if (drafts_given.defined()) {
    drafts = check_drafts(check, drafts_given, batch, max_draft_tokens);
  } else {
    batch.value = rows;
  }
  check.optional("positions", positions, {DType::kInt32}, {&batch});
  SamplingTensors sampling = check_sampling(check, SamplingOp::kTopLogprobs, sampling_given, batch);
  LogitsProcessors processors = check_processors(check, processors_given, batch, rows, vocab_size);
  bool placed = positions.defined() || !has_processors(processors);
  check.that(placed, "positions", "given with processors", "None");
  bool useful = processed_logprobs || (!sampling_given.defined() && !has_processors(processors));
  check.that(useful, "processed_logprobs", "True with filters or processors", "False");
  if (rows == 0) return;
  check_vocab(check, vocab_size);
  Workspace space = check_workspace(check, workspace, logits, 0);
  TopLogprobsParams params{
      .logits = logits.raw(),
      .processed_logprobs = processed_logprobs,
      .drafts = drafts,
      .positions = positions.data<int32_t>(),
      .sampling = sampling,
      .processors = processors,
      .outputs = outputs,
      .rows = rows,
      .batch = batch,
      .vocab_size = vocab_size,
      .n = n,
      .logits_stride = logits.stride(0),
      .dtype = logits.dtype(),
      .workspace = space.data,
      .workspace_bytes = space.num_bytes,
      .error = check.error_flag(),
  };
  if (check.on_cuda()) return top_logprobs_cuda(params, check.stream());
  for (int64_t b = 0; processed_logprobs && b < batch; ++b) {
    TopLogprobsValues values = values_of(params, b, static_cast<int32_t>(b));
    check.refuse(find_fault(params, values, b));
    for (int32_t i = 0; i < values.end - values.begin; ++i) {
      check.refuse(find_row_fault(params, values, b, i));
    }
  }
  run_on_cpu<TopLogprobsParams>(top_logprobs_cpu, params, rows * vocab_size);
}

}  // namespace

void register_top_logprobs(pybind11::module_& m) { m.def("top_logprobs", &top_logprobs); }

}  // namespace specops
