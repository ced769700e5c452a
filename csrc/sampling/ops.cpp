// SPDX-License-Identifier: Apache-2.0
// Argument checks and registration of the sampling family.
#include "sampling/ops.h"

#include <pybind11/stl.h>

#include <array>
#include <optional>

#include "common/philox.h"
#include "common/tensor_view.h"
#include "sampling/accept_walk.h"
#include "sampling/commit_tokens.h"
#include "sampling/sample.h"
#include "sampling/top_logprobs.h"
#include "sampling/verify.h"

namespace specops {
namespace {

// Below this many logits an op is over before releasing the GIL would pay.
constexpr int64_t kSmallWork = 32768;

template <typename Params>
void launch(void (*fn)(const Params&), const Params& params, int64_t num_logits) {
  std::optional<pybind11::gil_scoped_release> release;
  if (num_logits > kSmallWork) release.emplace();
  fn(params);
}

std::string at(const char* name, int64_t index) {
  return std::string(name) + "[" + std::to_string(index) + "]";
}

void check_vocab(Checker& check, const Dim& vocab_size) {
  // ids are int32, and one more leaf must still be countable
  check.that(vocab_size >= 1 && vocab_size <= INT32_MAX - 4096,
             "logits",
             "between 1 and 2^31 - 4097 tokens wide",
             vocab_size.value);
}

struct FilterViews {
  const TensorView &temperature, &top_k, &top_p, &min_p, &seeds, &choice_index;

  void check_shapes(Checker& check, Dim& count) const {
    check.tensor("temperature", temperature, {DType::kFloat32}, {&count});
    check.tensor("top_k", top_k, {DType::kInt32}, {&count});
    check.tensor("top_p", top_p, {DType::kFloat32}, {&count});
    check.tensor("min_p", min_p, {DType::kFloat32}, {&count});
    check.tensor("seeds", seeds, {DType::kInt64}, {&count});
    check.optional("choice_index", choice_index, {DType::kInt32}, {&count});
  }

  // The comparisons are written so that NaN fails them.
  void check_values(Checker& check, int64_t i) const {
    float t = temperature.data<float>()[i];
    float p = top_p.data<float>()[i];
    float m = min_p.data<float>()[i];
    int32_t k = top_k.data<int32_t>()[i];
    bool finite = t >= 0.0f && t <= 3.402823466e38f;
    if (!finite) check.fail(at("temperature", i), "finite and at least 0", std::to_string(t));
    if (k < -1) check.fail(at("top_k", i), "at least 1, or 0 or -1 for off", std::to_string(k));
    if (!(p >= 0.0f && p <= 1.0f)) check.fail(at("top_p", i), "within [0, 1]", std::to_string(p));
    if (!(m >= 0.0f && m <= 1.0f)) check.fail(at("min_p", i), "within [0, 1]", std::to_string(m));
  }
};

void sample(const TensorView& logits,
            const TensorView& positions,
            const TensorView& temperature,
            const TensorView& top_k,
            const TensorView& top_p,
            const TensorView& min_p,
            const TensorView& seeds,
            const TensorView& choice_index,
            const TensorView& logprobs,
            const TensorView& out) {
  Checker check("sample");
  Dim rows{"rows"}, vocab_size{"vocab_size"};
  check.tensor(
      "logits", logits, {DType::kFloat32, DType::kBFloat16}, {&rows, &vocab_size}, Layout::kRows);
  check.tensor("positions", positions, {DType::kInt32}, {&rows});
  FilterViews filters{temperature, top_k, top_p, min_p, seeds, choice_index};
  filters.check_shapes(check, rows);
  check.optional("logprobs", logprobs, {DType::kFloat32}, {&rows});
  check.tensor("out", out, {DType::kInt32}, {&rows});
  if (rows == 0) return;
  check_vocab(check, vocab_size);
  for (int64_t row = 0; row < rows; ++row) filters.check_values(check, row);
  SampleParams params{
      .logits = logits.raw(),
      .positions = positions.data<int32_t>(),
      .temperature = temperature.data<float>(),
      .top_k = top_k.data<int32_t>(),
      .top_p = top_p.data<float>(),
      .min_p = min_p.data<float>(),
      .seeds = seeds.data<int64_t>(),
      .choice_index = choice_index.data<int32_t>(),
      .logprobs = logprobs.data<float>(),
      .token_ids = out.data<int32_t>(),
      .rows = rows,
      .vocab_size = vocab_size,
      .logits_stride = logits.stride(0),
      .dtype = logits.dtype(),
  };
  launch<SampleParams>(sample_cpu, params, rows * vocab_size);
}

void verify(const TensorView& logits,
            const TensorView& output_indptr,
            const TensorView& draft_token_ids,
            const TensorView& positions,
            const TensorView& strategy,
            const TensorView& policy,
            const TensorView& temperature,
            const TensorView& top_k,
            const TensorView& top_p,
            const TensorView& min_p,
            const TensorView& seeds,
            const TensorView& choice_index,
            const TensorView& output_token_ids,
            const TensorView& num_accepted_tokens,
            const TensorView& logprobs) {
  Checker check("verify");
  Dim rows{"num_output_rows"}, vocab_size{"vocab_size"}, batch{"batch"}, drafts{"k"};
  Dim batch_plus_one{"batch + 1"}, capacity{"k + 1"};
  check.tensor(
      "logits", logits, {DType::kFloat32, DType::kBFloat16}, {&rows, &vocab_size}, Layout::kRows);
  check.tensor("draft_token_ids", draft_token_ids, {DType::kInt32}, {&batch, &drafts});
  batch_plus_one.value = batch + 1;
  capacity.value = drafts + 1;
  check.tensor("output_indptr", output_indptr, {DType::kInt32}, {&batch_plus_one});
  check.tensor("positions", positions, {DType::kInt32}, {&batch});
  check.tensor("strategy", strategy, {DType::kInt32}, {&batch});
  check.tensor("policy", policy, {DType::kInt32}, {&batch});
  FilterViews filters{temperature, top_k, top_p, min_p, seeds, choice_index};
  filters.check_shapes(check, batch);
  check.tensor("output_token_ids", output_token_ids, {DType::kInt32}, {&batch, &capacity});
  check.tensor("num_accepted_tokens", num_accepted_tokens, {DType::kInt32}, {&batch});
  check.optional("logprobs", logprobs, {DType::kFloat32}, {&batch, &capacity});
  if (batch == 0) return;
  check_vocab(check, vocab_size);

  // values: all of them before anything is written
  const int32_t* indptr = output_indptr.data<int32_t>();
  if (indptr[0] != 0) check.fail("output_indptr[0]", "0", std::to_string(indptr[0]));
  for (int64_t i = 0; i < batch; ++i) {
    int64_t num_rows = int64_t{indptr[i + 1]} - indptr[i];
    if (num_rows < 0 || num_rows > capacity || indptr[i + 1] > rows) {
      check.fail(at("output_indptr", i + 1),
                 "ascending by at most k + 1 = " + std::to_string(capacity.value) +
                     " and at most num_output_rows = " + std::to_string(rows.value),
                 std::to_string(indptr[i + 1]) + " after " + std::to_string(indptr[i]));
    }
    if (num_rows == 0) continue;  // an idle slot may hold anything
    filters.check_values(check, i);
    int32_t rule = strategy.data<int32_t>()[i];
    if (rule < 0 || rule > static_cast<int32_t>(VerifyStrategy::kTargetMatch)) {
      check.fail(at("strategy", i), "0 (GREEDY) or 1 (TARGET_MATCH)", std::to_string(rule));
    }
    int32_t choice = policy.data<int32_t>()[i];
    if (choice < 0 || choice > static_cast<int32_t>(AcceptPolicy::kRejectAll)) {
      check.fail(
          at("policy", i), "0 (NORMAL), 1 (ACCEPT_ALL) or 2 (REJECT_ALL)", std::to_string(choice));
    }
    for (int64_t j = 0; j + 1 < num_rows; ++j) {
      int32_t token = draft_token_ids.data<int32_t>()[i * drafts + j];
      if (token < -1 || token >= vocab_size) {
        check.fail("draft_token_ids[" + std::to_string(i) + ", " + std::to_string(j) + "]",
                   "-1 or below vocab_size = " + std::to_string(vocab_size.value),
                   std::to_string(token));
      }
    }
  }
  VerifyParams params{
      .logits = logits.raw(),
      .output_indptr = indptr,
      .draft_token_ids = draft_token_ids.data<int32_t>(),
      .positions = positions.data<int32_t>(),
      .strategy = strategy.data<int32_t>(),
      .policy = policy.data<int32_t>(),
      .temperature = temperature.data<float>(),
      .top_k = top_k.data<int32_t>(),
      .top_p = top_p.data<float>(),
      .min_p = min_p.data<float>(),
      .seeds = seeds.data<int64_t>(),
      .choice_index = choice_index.data<int32_t>(),
      .output_token_ids = output_token_ids.data<int32_t>(),
      .num_accepted_tokens = num_accepted_tokens.data<int32_t>(),
      .logprobs = logprobs.data<float>(),
      .batch = batch,
      .max_draft_tokens = drafts,
      .vocab_size = vocab_size,
      .logits_stride = logits.stride(0),
      .dtype = logits.dtype(),
  };
  launch<VerifyParams>(verify_cpu, params, indptr[batch] * vocab_size);
}

void top_logprobs(const TensorView& logits,
                  const TensorView& token_ids,
                  const TensorView& logprobs,
                  const TensorView& lse) {
  Checker check("top_logprobs");
  Dim rows{"rows"}, vocab_size{"vocab_size"}, n{"n"};
  check.tensor(
      "logits", logits, {DType::kFloat32, DType::kBFloat16}, {&rows, &vocab_size}, Layout::kRows);
  check.tensor("token_ids", token_ids, {DType::kInt32}, {&rows, &n});
  check.tensor("logprobs", logprobs, {DType::kFloat32}, {&rows, &n});
  check.tensor("lse", lse, {DType::kFloat32}, {&rows});
  if (rows == 0) return;
  check_vocab(check, vocab_size);
  check.that(
      n <= vocab_size, "n", "at most vocab_size = " + std::to_string(vocab_size.value), n.value);
  TopLogprobsParams params{
      .logits = logits.raw(),
      .token_ids = token_ids.data<int32_t>(),
      .logprobs = logprobs.data<float>(),
      .lse = lse.data<float>(),
      .rows = rows,
      .vocab_size = vocab_size,
      .n = n,
      .logits_stride = logits.stride(0),
      .dtype = logits.dtype(),
  };
  launch<TopLogprobsParams>(top_logprobs_cpu, params, rows * vocab_size);
}

void commit_tokens(const TensorView& output_token_ids,
                   const TensorView& slots,
                   const TensorView& token_ids,
                   const TensorView& lens) {
  Checker check("commit_tokens");
  Dim batch{"batch"}, max_tokens{"k + 1"}, num_slots{"num_slots"}, max_len{"max_len"};
  check.tensor("output_token_ids", output_token_ids, {DType::kInt32}, {&batch, &max_tokens});
  check.tensor("slots", slots, {DType::kInt32}, {&batch});
  check.tensor("token_ids", token_ids, {DType::kInt32}, {&num_slots, &max_len}, Layout::kRows);
  check.tensor("lens", lens, {DType::kInt32}, {&num_slots});
  if (batch == 0) return;
  CommitTokensParams params{
      .output_token_ids = output_token_ids.data<int32_t>(),
      .slots = slots.data<int32_t>(),
      .token_ids = token_ids.data<int32_t>(),
      .lens = lens.data<int32_t>(),
      .batch = batch,
      .max_tokens = max_tokens,
      .num_slots = num_slots,
      .max_len = max_len,
      .token_ids_stride = token_ids.stride(0),
      .error = check.error_flag(),
  };
  if (check.on_cuda()) return commit_tokens_cuda(params, check.stream());
  for (int64_t i = 0; i < batch; ++i) {
    int32_t slot = params.slots[i];
    if (slot < -1 || slot >= num_slots) {
      check.fail(at("slots", i),
                 "-1 or below num_slots = " + std::to_string(num_slots.value),
                 std::to_string(slot));
    }
    if (slot < 0) continue;
    int64_t count = 0;
    while (count < max_tokens && params.output_token_ids[i * max_tokens + count] >= 0) ++count;
    if (params.lens[slot] < 0 || params.lens[slot] + count > max_len) {
      check.fail(at("lens", slot),
                 "at least 0, with room for " + std::to_string(count) +
                     " tokens more below max_len = " + std::to_string(max_len.value),
                 std::to_string(params.lens[slot]));
    }
  }
  commit_tokens_cpu(params);
}

// The generator itself, so that tests can hold it against published vectors.
std::array<uint32_t, 4> philox(uint64_t seed, const std::array<uint32_t, 4>& counter) {
  PhiloxBlock block = philox4x32(seed, {{counter[0], counter[1], counter[2], counter[3]}});
  return {block.word[0], block.word[1], block.word[2], block.word[3]};
}

}  // namespace

void register_sampling(pybind11::module_& m) {
  m.def("sample", &sample);
  m.def("verify", &verify);
  m.def("top_logprobs", &top_logprobs);
  m.def("commit_tokens", &commit_tokens);
  m.def("philox4x32", &philox);
}

}  // namespace specops
