// SPDX-License-Identifier: Apache-2.0
// Argument checks and registration of sample.
#include "sampling/checks.h"
#include "sampling/ops.h"
#include "sampling/sample/sample.h"

namespace specops {
namespace {

SampleOutputs check_sample_outputs(Checker& check, Argument given, Dim& rows, Dim& vocab_size) {
  auto [token_ids, logprobs, ranks, probs] = check.fields<4>("outputs", "SampleOutputs", given);
  check.tensor("outputs.token_ids", token_ids, {DType::kInt32}, {&rows});
  check.optional("outputs.logprobs", logprobs, {DType::kFloat32}, {&rows});
  check.optional("outputs.ranks", ranks, {DType::kInt32}, {&rows});
  check.optional("outputs.probs", probs, {DType::kFloat32}, {&rows, &vocab_size}, Layout::kRows);
  return {.token_ids = token_ids.data<int32_t>(),
          .logprobs = logprobs.data<float>(),
          .ranks = ranks.data<int32_t>(),
          .probs = probs.data<float>(),
          .probs_stride = probs.defined() ? probs.stride(0) : 0};
}

void sample(const TensorView& logits,
            const TensorView& positions,
            Argument sampling_given,
            Argument processors_given,
            Argument purpose_given,
            const TensorView& anchors,
            Argument processed_logprobs,
            Argument outputs_given,
            const TensorView& workspace) {
  Checker check("sample");
  Dim rows{"rows"}, vocab_size{"vocab_size"};
  check.tensor(
      "logits", logits, {DType::kFloat32, DType::kBFloat16}, {&rows, &vocab_size}, Layout::kRows);
  check.tensor("positions", positions, {DType::kInt32}, {&rows});
  SamplingTensors sampling = check_sampling(check, SamplingOp::kSample, sampling_given, rows);
  LogitsProcessors processors = check_processors(check, processors_given, rows, rows, vocab_size);
  constexpr int64_t kDraft = static_cast<int64_t>(Purpose::kDraft);
  constexpr int64_t kTarget = static_cast<int64_t>(Purpose::kTarget);
  int64_t purpose = check.integer("purpose", purpose_given, kDraft, kTarget);
  check.that(
      purpose == kDraft || purpose == kTarget, "purpose", "0 (DRAFT) or 3 (TARGET)", purpose);
  bool of_processed = check.flag("processed_logprobs", processed_logprobs);
  check.optional("anchors", anchors, {DType::kInt32}, {&rows});
  SampleOutputs outputs = check_sample_outputs(check, outputs_given, rows, vocab_size);
  if (rows == 0) return;
  check_vocab(check, vocab_size);
  Workspace space = check_workspace(check, workspace, logits, 0);
  SampleParams params{
      .logits = logits.raw(),
      .positions = positions.data<int32_t>(),
      .sampling = sampling,
      .processors = processors,
      .purpose = static_cast<Purpose>(purpose),
      .anchors = anchors.data<int32_t>(),
      .processed_logprobs = of_processed,
      .outputs = outputs,
      .rows = rows,
      .vocab_size = vocab_size,
      .logits_stride = logits.stride(0),
      .dtype = logits.dtype(),
      .workspace = space.data,
      .workspace_bytes = space.num_bytes,
      .error = check.error_flag(),
  };
  if (check.on_cuda()) return sample_cuda(params, check.stream());
  for (int64_t row = 0; row < rows; ++row) check.refuse(find_fault<true>(params, row));
  run_on_cpu<SampleParams>(sample_cpu, params, rows * vocab_size);
}

}  // namespace

void register_sample(pybind11::module_& m) { m.def("sample", &sample); }

}  // namespace specops
