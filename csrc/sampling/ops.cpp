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
void run_on_cpu(void (*fn)(const Params&), const Params& params, int64_t num_logits) {
  std::optional<pybind11::gil_scoped_release> release;
  if (num_logits > kSmallWork) release.emplace();
  fn(params);
}

std::string at(const char* name, int64_t index) {
  return std::string(name) + "[" + std::to_string(index) + "]";
}

struct Workspace {
  void* data = nullptr;
  int64_t num_bytes = 0;
};

Workspace check_workspace(Checker& check,
                          const TensorView& workspace,
                          const TensorView& logits,
                          int64_t batch) {
  Dim num_bytes{"bytes"};
  check.optional("workspace", workspace, {DType::kUInt8}, {&num_bytes});
  if (!check.on_cuda()) return {};
  int64_t needed = 0;
  sampling_workspace_cuda({.num_bytes = &needed,
                           .rows = logits.size(0),
                           .vocab_size = logits.size(1),
                           .element_bytes = dtype_bytes(logits.dtype()),
                           .batch = batch},
                          check.stream());
  if (needed == 0) return {};
  if (!workspace.defined() || num_bytes < needed) {
    check.fail("workspace",
               "at least " + std::to_string(needed) + " bytes of zeros",
               workspace.defined() ? std::to_string(num_bytes.value) : "None");
  }
  constexpr int64_t kAlignment = 16;
  bool aligned = reinterpret_cast<uintptr_t>(workspace.raw()) % kAlignment == 0;
  check.that(aligned, "workspace", "aligned to 16 bytes", "another address");
  return {workspace.raw(), num_bytes / kAlignment * kAlignment};
}

// What a call on the device needs; device_index as torch gives it, -1 for cpu.
int64_t sampling_workspace_bytes(
    int64_t rows, int64_t vocab_size, int64_t element_bytes, int64_t batch, int device_index) {
#if !defined(SPECOPS_SIMT)
  if (device_index < 0) return 0;
#endif
  int64_t num_bytes = 0;
  if (vocab_size < 1 || element_bytes < 1) return 0;  // the op refuses it
  sampling_workspace_cuda({.num_bytes = &num_bytes,
                           .rows = rows,
                           .vocab_size = vocab_size,
                           .element_bytes = element_bytes,
                           .batch = batch},
                          {.device = device_index});
  return num_bytes;
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
    check.optional("temperature", temperature, {DType::kFloat32}, {&count});
    check.optional("top_k", top_k, {DType::kInt32}, {&count});
    check.optional("top_p", top_p, {DType::kFloat32}, {&count});
    check.optional("min_p", min_p, {DType::kFloat32}, {&count});
    check.optional("seeds", seeds, {DType::kInt64}, {&count});
    check.optional("choice_index", choice_index, {DType::kInt32}, {&count});
    bool seeded = seeds.defined() || !temperature.defined();
    check.that(seeded, "seeds", "given where temperature is", "None");
    if (temperature.defined()) return;
    for (const TensorView* view : {&top_k, &top_p, &min_p, &seeds, &choice_index}) {
      if (!view->defined()) continue;
      const char* name = view == &top_k   ? "top_k"
                         : view == &top_p ? "top_p"
                         : view == &min_p ? "min_p"
                         : view == &seeds ? "seeds"
                                          : "choice_index";
      check.fail(name, "None where temperature is (greedy needs no more)", "a tensor");
    }
  }

  // The comparisons are written so that NaN fails them.
  void check_values(Checker& check, int64_t i) const {
    float t = temperature.defined() ? temperature.data<float>()[i] : 0.0f;
    float p = top_p.defined() ? top_p.data<float>()[i] : 1.0f;
    float m = min_p.defined() ? min_p.data<float>()[i] : 0.0f;
    int32_t k = top_k.defined() ? top_k.data<int32_t>()[i] : 0;
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
            const TensorView& out,
            const TensorView& workspace) {
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
  Workspace space = check_workspace(check, workspace, logits, 0);
  if (!check.on_cuda()) {
    for (int64_t row = 0; row < rows; ++row) filters.check_values(check, row);
  }
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
      .workspace = space.data,
      .workspace_bytes = space.num_bytes,
      .error = check.error_flag(),
  };
  if (check.on_cuda()) return sample_cuda(params, check.stream());
  run_on_cpu<SampleParams>(sample_cpu, params, rows * vocab_size);
}

// Values, on cpu: all of them before anything is written.
void check_verify_values(Checker& check, const VerifyParams& params, const FilterViews& filters) {
  const int32_t* indptr = params.output_indptr;
  if (indptr[0] != 0) check.fail("output_indptr[0]", "0", std::to_string(indptr[0]));
  int64_t capacity = params.max_draft_tokens + 1;
  for (int64_t i = 0; i < params.batch; ++i) {
    int64_t num_rows = int64_t{indptr[i + 1]} - indptr[i];
    if (num_rows < 0 || num_rows > capacity || indptr[i + 1] > params.rows) {
      check.fail(at("output_indptr", i + 1),
                 "ascending by at most k + 1 = " + std::to_string(capacity) +
                     " and at most num_output_rows = " + std::to_string(params.rows),
                 std::to_string(indptr[i + 1]) + " after " + std::to_string(indptr[i]));
    }
    if (num_rows == 0) continue;  // an idle slot may hold anything
    filters.check_values(check, i);
    int32_t rule = params.strategy ? params.strategy[i] : 0;
    if (rule < 0 || rule > static_cast<int32_t>(VerifyStrategy::kTargetMatch)) {
      check.fail(at("strategy", i), "0 (GREEDY) or 1 (TARGET_MATCH)", std::to_string(rule));
    }
    int32_t choice = params.policy ? params.policy[i] : 0;
    if (choice < 0 || choice > static_cast<int32_t>(AcceptPolicy::kRejectAll)) {
      check.fail(
          at("policy", i), "0 (NORMAL), 1 (ACCEPT_ALL) or 2 (REJECT_ALL)", std::to_string(choice));
    }
    for (int64_t j = 0; j + 1 < num_rows; ++j) {
      int32_t token = params.draft_token_ids[i * params.max_draft_tokens + j];
      if (token < -1 || token >= params.vocab_size) {
        check.fail("draft_token_ids[" + std::to_string(i) + ", " + std::to_string(j) + "]",
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
            const TensorView& logprobs,
            const TensorView& workspace) {
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
  check.optional("strategy", strategy, {DType::kInt32}, {&batch});
  check.optional("policy", policy, {DType::kInt32}, {&batch});
  FilterViews filters{temperature, top_k, top_p, min_p, seeds, choice_index};
  filters.check_shapes(check, batch);
  check.tensor("output_token_ids", output_token_ids, {DType::kInt32}, {&batch, &capacity});
  check.tensor("num_accepted_tokens", num_accepted_tokens, {DType::kInt32}, {&batch});
  check.optional("logprobs", logprobs, {DType::kFloat32}, {&batch, &capacity});
  if (batch == 0) return;
  check_vocab(check, vocab_size);

  Workspace space = check_workspace(check, workspace, logits, batch);
  VerifyParams params{
      .logits = logits.raw(),
      .output_indptr = output_indptr.data<int32_t>(),
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
      .rows = rows,
      .batch = batch,
      .max_draft_tokens = drafts,
      .vocab_size = vocab_size,
      .logits_stride = logits.stride(0),
      .dtype = logits.dtype(),
      .workspace = space.data,
      .workspace_bytes = space.num_bytes,
      .error = check.error_flag(),
  };
  if (check.on_cuda()) return verify_cuda(params, check.stream());
  check_verify_values(check, params, filters);
  run_on_cpu<VerifyParams>(verify_cpu, params, params.output_indptr[batch] * vocab_size);
}

void top_logprobs(const TensorView& logits,
                  const TensorView& token_ids,
                  const TensorView& logprobs,
                  const TensorView& lse,
                  const TensorView& workspace) {
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
  Workspace space = check_workspace(check, workspace, logits, 0);
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
      .workspace = space.data,
      .workspace_bytes = space.num_bytes,
  };
  if (check.on_cuda()) return top_logprobs_cuda(params, check.stream());
  run_on_cpu<TopLogprobsParams>(top_logprobs_cpu, params, rows * vocab_size);
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
  m.def("sampling_workspace_bytes", &sampling_workspace_bytes);
  m.def("commit_tokens", &commit_tokens);
  m.def("philox4x32", &philox);
}

}  // namespace specops
