// SPDX-License-Identifier: Apache-2.0
// Argument checks and registration of sample.
#include "sampling/checks.h"
#include "sampling/ops.h"
#include "sampling/sample/sample.h"

namespace specops {
namespace {

void sample(const TensorView& logits,
            const TensorView& positions,
            const TensorView& temperature,
            const TensorView& top_k,
            const TensorView& top_p,
            const TensorView& min_p,
            const TensorView& typical_p,
            const TensorView& seeds,
            const TensorView& choice_index,
            Argument processor_fields,
            Argument purpose_given,
            const TensorView& anchors,
            Argument processed_logprobs,
            const TensorView& logprobs,
            const TensorView& ranks,
            const TensorView& probs,
            const TensorView& out,
            const TensorView& workspace) {
  Checker check("sample");
  Dim rows{"rows"}, vocab_size{"vocab_size"};
  check.tensor(
      "logits", logits, {DType::kFloat32, DType::kBFloat16}, {&rows, &vocab_size}, Layout::kRows);
  check.tensor("positions", positions, {DType::kInt32}, {&rows});
  FilterArrays filters = check_filters(
      check, SamplingOp::kSample, {temperature, top_k, top_p, min_p, typical_p}, rows);
  check_streams(check, filters, seeds, choice_index, rows);
  LogitsProcessors processors = check_processors(check, processor_fields, rows, rows, vocab_size);
  constexpr int64_t kDraft = static_cast<int64_t>(Purpose::kDraft);
  constexpr int64_t kTarget = static_cast<int64_t>(Purpose::kTarget);
  int64_t purpose = check.integer("purpose", purpose_given, kDraft, kTarget);
  check.that(
      purpose == kDraft || purpose == kTarget, "purpose", "0 (DRAFT) or 3 (TARGET)", purpose);
  bool of_processed = check.flag("processed_logprobs", processed_logprobs);
  check.optional("anchors", anchors, {DType::kInt32}, {&rows});
  check.optional("logprobs", logprobs, {DType::kFloat32}, {&rows});
  check.optional("ranks", ranks, {DType::kInt32}, {&rows});
  check.optional("probs", probs, {DType::kFloat32}, {&rows, &vocab_size}, Layout::kRows);
  check.tensor("out", out, {DType::kInt32}, {&rows});
  if (rows == 0) return;
  check_vocab(check, vocab_size);
  Workspace space = check_workspace(check, workspace, logits, 0);
  SampleParams params{
      .logits = logits.raw(),
      .positions = positions.data<int32_t>(),
      .anchors = anchors.data<int32_t>(),
      .filters = filters,
      .processors = processors,
      .purpose = static_cast<Purpose>(purpose),
      .logprobs = logprobs.data<float>(),
      .ranks = ranks.data<int32_t>(),
      .probs = probs.data<float>(),
      .token_ids = out.data<int32_t>(),
      .processed_logprobs = of_processed,
      .rows = rows,
      .vocab_size = vocab_size,
      .probs_stride = probs.defined() ? probs.stride(0) : 0,
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
