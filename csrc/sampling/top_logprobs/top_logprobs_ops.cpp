// SPDX-License-Identifier: Apache-2.0
// Argument checks and registration of top_logprobs.
#include "sampling/checks.h"
#include "sampling/ops.h"
#include "sampling/top_logprobs/top_logprobs.h"

namespace specops {
namespace {

void top_logprobs(const TensorView& logits,
                  Argument n_given,
                  Argument processed_logprobs_given,
                  const TensorView& output_indptr,
                  const TensorView& draft_token_ids,
                  const TensorView& parents,
                  const TensorView& positions,
                  const TensorView& temperature,
                  const TensorView& top_k,
                  const TensorView& top_p,
                  const TensorView& min_p,
                  const TensorView& typical_p,
                  Argument processor_fields,
                  const TensorView& token_ids,
                  const TensorView& logprobs,
                  const TensorView& ranks,
                  const TensorView& lse,
                  const TensorView& workspace) {
  Checker check("top_logprobs");
  Dim rows{"rows"}, vocab_size{"vocab_size"}, n{"n"}, batch{"batch"}, drafts{"k"};
  Dim batch_plus_one{"batch + 1"};
  check.tensor(
      "logits", logits, {DType::kFloat32, DType::kBFloat16}, {&rows, &vocab_size}, Layout::kRows);
  n.value = check.integer("n", n_given, 0, vocab_size);
  bool processed_logprobs = check.flag("processed_logprobs", processed_logprobs_given);
  check.tensor("token_ids", token_ids, {DType::kInt32}, {&rows, &n});
  check.tensor("logprobs", logprobs, {DType::kFloat32}, {&rows, &n});
  check.optional("ranks", ranks, {DType::kInt32}, {&rows, &n});
  check.tensor("lse", lse, {DType::kFloat32}, {&rows});
  check.optional("output_indptr", output_indptr, {DType::kInt32}, {&batch_plus_one});
  batch.value = output_indptr.defined() ? batch_plus_one - 1 : rows.value;
  check.that(batch >= 0, "output_indptr", "at least 1 long", batch_plus_one.value);
  drafts.value = draft_token_ids.defined() ? -1 : 0;
  check.optional("draft_token_ids", draft_token_ids, {DType::kInt32}, {&batch, &drafts});
  check.optional("parents", parents, {DType::kInt32}, {&batch, &drafts});
  check.optional("positions", positions, {DType::kInt32}, {&batch});
  FilterArrays filters = check_filters(
      check, SamplingOp::kTopLogprobs, {temperature, top_k, top_p, min_p, typical_p}, batch);
  LogitsProcessors processors = check_processors(check, processor_fields, batch, rows, vocab_size);
  bool placed = positions.defined() || !has_processors(processors);
  check.that(placed, "positions", "given with processors", "None");
  bool useful = processed_logprobs || (!temperature.defined() && !has_processors(processors));
  check.that(useful, "processed_logprobs", "True with filters or processors", "False");
  if (rows == 0) return;
  check_vocab(check, vocab_size);
  Workspace space = check_workspace(check, workspace, logits, 0);
  TopLogprobsParams params{
      .logits = logits.raw(),
      .processed_logprobs = processed_logprobs,
      .output_indptr = output_indptr.data<int32_t>(),
      .draft_token_ids = draft_token_ids.data<int32_t>(),
      .parents = parents.data<int32_t>(),
      .positions = positions.data<int32_t>(),
      .filters = filters,
      .processors = processors,
      .token_ids = token_ids.data<int32_t>(),
      .logprobs = logprobs.data<float>(),
      .ranks = ranks.data<int32_t>(),
      .lse = lse.data<float>(),
      .rows = rows,
      .batch = batch,
      .max_draft_tokens = drafts,
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
