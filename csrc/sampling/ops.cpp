// SPDX-License-Identifier: Apache-2.0
// Argument checks and registration of the sampling family.
#include "sampling/ops.h"

#include <pybind11/stl.h>

#include <array>
#include <cmath>
#include <optional>
#include <vector>

#include "common/philox.h"
#include "common/tensor_view.h"
#include "sampling/accept_walk.h"
#include "sampling/commit_walk.h"
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
  const TensorView &temperature, &top_k, &top_p, &min_p, &typical_p;
};

template <typename T>
std::string at(const char* name, const PerRow<T>& parameter, int64_t index) {
  return parameter.values ? at(name, index) : name;
}

// The comparisons are written so that NaN fails them.
void check_filter_values(Checker& check, const FilterArrays& arrays, int64_t i) {
  SamplingParams values = filters_of(arrays, i);
  float t = values.temperature, p = values.top_p, m = values.min_p, typical = values.typical_p;
  auto refuse = [&](const char* name, const auto& parameter, const char* expected, auto got) {
    check.fail(at(name, parameter, i), expected, std::to_string(got));
  };
  bool finite = t >= 0.0f && t <= 3.402823466e38f;
  if (!finite) refuse("temperature", arrays.temperature, "finite and at least 0", t);
  if (values.top_k < -1) {
    refuse("top_k", arrays.top_k, "at least 1, or 0 or -1 for off", values.top_k);
  }
  if (!(p >= 0.0f && p <= 1.0f)) refuse("top_p", arrays.top_p, "within [0, 1]", p);
  if (!(m >= 0.0f && m <= 1.0f)) refuse("min_p", arrays.min_p, "within [0, 1]", m);
  if (!(typical > 0.0f && typical <= 1.0f)) {
    refuse("typical_p", arrays.typical_p, "within (0, 1]", typical);
  }
}

// Shapes, and the values of numbers; those of tensors are looked at where they are.
FilterArrays check_filters(Checker& check, const FilterViews& views, Dim& count) {
  FilterArrays out, numbers;
  auto take = [&](const char* name, const TensorView& view, auto field) {
    out.*field = check.per_row(name, view, count, (out.*field).value);
    if (view.defined() && !views.temperature.defined()) {
      check.fail(name, "None without temperature (greedy decoding ignores it)", "a value");
    }
    if ((out.*field).values == nullptr) numbers.*field = out.*field;
  };
  take("temperature", views.temperature, &FilterArrays::temperature);
  take("top_k", views.top_k, &FilterArrays::top_k);
  take("top_p", views.top_p, &FilterArrays::top_p);
  take("min_p", views.min_p, &FilterArrays::min_p);
  take("typical_p", views.typical_p, &FilterArrays::typical_p);
  check_filter_values(check, numbers, 0);
  return out;
}

// Which uniforms a row or request consumes.
void check_streams(Checker& check,
                   FilterArrays& filters,
                   const TensorView& seeds,
                   const TensorView& choice_index,
                   Dim& count) {
  check.optional("seeds", seeds, {DType::kInt64}, {&count});
  filters.seeds = seeds.data<int64_t>();
  filters.choice_index = check.per_row("choice_index", choice_index, count, int32_t{0});
}

// The fields of specops.sampling.LogitsProcessors in their order; none at all where it is None.
using ProcessorViews = std::vector<TensorView>;

// Checks shapes, and that what needs another field has it. `batch`: requests.
LogitsProcessors check_processors(Checker& check,
                                  const ProcessorViews& views,
                                  Dim& batch,
                                  Dim& output_rows,
                                  const Dim& vocab_size) {
  constexpr size_t kNumFields = 15;
  if (views.empty()) return {};
  if (views.size() != kNumFields) {
    check.fail("processors", "a LogitsProcessors", std::to_string(views.size()) + " values");
  }
  size_t field = 0;
  const TensorView &slots = views[field++], &token_ids = views[field++],
                   &prompt_lens = views[field++], &counted = views[field++],
                   &counts = views[field++], &repetition = views[field++],
                   &presence = views[field++], &frequency = views[field++],
                   &bias_ids = views[field++], &bias = views[field++], &bad_words = views[field++],
                   &stop_ids = views[field++], &min_tokens = views[field++], &mask = views[field++],
                   &mask_indices = views[field++];
  static_cast<void>(field);
  Dim num_slots{"num_slots"}, max_len{"max_len"}, max_counted{"counted"}, max_biases{"biases"};
  Dim num_words{"bad words"}, word_len{"length"}, num_stop{"stop tokens"}, num_masks{"num_masks"};
  Dim mask_words{"ceil(vocab_size / 32)", (vocab_size + 31) / 32};
  check.optional("processors.slots", slots, {DType::kInt32}, {&batch});
  check.optional(
      "processors.token_ids", token_ids, {DType::kInt32}, {&num_slots, &max_len}, Layout::kRows);
  check.optional("processors.prompt_lens", prompt_lens, {DType::kInt32}, {&num_slots});
  check.optional(
      "processors.counted_token_ids", counted, {DType::kInt32}, {&num_slots, &max_counted});
  check.optional("processors.token_counts", counts, {DType::kInt32}, {&num_slots, &max_counted});
  check.optional("processors.repetition_penalty", repetition, {DType::kFloat32}, {&num_slots});
  check.optional("processors.presence_penalty", presence, {DType::kFloat32}, {&num_slots});
  check.optional("processors.frequency_penalty", frequency, {DType::kFloat32}, {&num_slots});
  check.optional(
      "processors.logit_bias_token_ids", bias_ids, {DType::kInt32}, {&num_slots, &max_biases});
  check.optional("processors.logit_bias", bias, {DType::kFloat32}, {&num_slots, &max_biases});
  check.optional(
      "processors.bad_words", bad_words, {DType::kInt32}, {&num_slots, &num_words, &word_len});
  check.optional("processors.stop_token_ids", stop_ids, {DType::kInt32}, {&num_slots, &num_stop});
  check.optional("processors.min_tokens", min_tokens, {DType::kInt32}, {&num_slots});
  check.optional("processors.allowed_token_mask", mask, {DType::kInt32}, {&num_masks, &mask_words});
  check.optional("processors.mask_indices", mask_indices, {DType::kInt32}, {&output_rows});

  bool fits = !check.on_cuda() || vocab_size <= kMaxProcessedVocab;
  check.that(fits,
             "logits",
             "at most " + std::to_string(kMaxProcessedVocab) +
                 " tokens wide on CUDA, where processors are given",
             vocab_size.value);
  auto needs = [&](const char* name, const TensorView& view, bool wanted, const char* why) {
    check.that(view.defined() || !wanted, name, std::string("given with ") + why, "None");
  };
  bool penalizes = repetition.defined() || presence.defined() || frequency.defined();
  bool by_slot = penalizes || bias_ids.defined() || bad_words.defined() || min_tokens.defined();
  needs("processors.slots", slots, by_slot, "any table that has a row per slot");
  needs("processors.counted_token_ids", counted, penalizes || counts.defined(), "a penalty");
  needs("processors.token_counts", counts, counted.defined(), "processors.counted_token_ids");
  needs("processors.logit_bias", bias, bias_ids.defined(), "processors.logit_bias_token_ids");
  needs("processors.logit_bias_token_ids", bias_ids, bias.defined(), "processors.logit_bias");
  needs("processors.token_ids", token_ids, bad_words.defined(), "processors.bad_words");
  needs("processors.prompt_lens", prompt_lens, min_tokens.defined(), "processors.min_tokens");
  needs("processors.stop_token_ids", stop_ids, min_tokens.defined(), "processors.min_tokens");
  needs("processors.allowed_token_mask", mask, mask_indices.defined(), "processors.mask_indices");
  needs("processors.mask_indices", mask_indices, mask.defined(), "processors.allowed_token_mask");
  return {.slots = by_slot ? slots.data<int32_t>() : nullptr,
          .token_ids = token_ids.data<int32_t>(),
          .prompt_lens = prompt_lens.data<int32_t>(),
          .counted_token_ids = counted.data<int32_t>(),
          .token_counts = counts.data<int32_t>(),
          .repetition_penalty = repetition.data<float>(),
          .presence_penalty = presence.data<float>(),
          .frequency_penalty = frequency.data<float>(),
          .logit_bias_token_ids = bias_ids.data<int32_t>(),
          .logit_bias = bias.data<float>(),
          .bad_words = bad_words.data<int32_t>(),
          .stop_token_ids = stop_ids.data<int32_t>(),
          .min_tokens = min_tokens.data<int32_t>(),
          .allowed_token_mask = mask.data<int32_t>(),
          .mask_indices = mask_indices.data<int32_t>(),
          .num_slots = num_slots,
          .max_len = max_len,
          .token_ids_stride = token_ids.defined() ? token_ids.stride(0) : 0,
          .max_counted = max_counted,
          .max_biases = max_biases,
          .max_bad_words = num_words,
          .max_bad_word_len = word_len,
          .max_stop_tokens = num_stop,
          .num_masks = num_masks,
          .mask_words = mask_words};
}

// Values of one request, on cpu. `position`: of its first token. Rows [first_row, end_row) are its.
void check_processor_values(Checker& check,
                            const LogitsProcessors& processors,
                            int64_t i,
                            int64_t position,
                            int64_t max_len,
                            int64_t first_row,
                            int64_t end_row) {
  for (int64_t row = first_row; processors.mask_indices && row < end_row; ++row) {
    int32_t index = processors.mask_indices[row];
    if (index >= -1 && index < processors.num_masks) continue;
    check.fail(at("processors.mask_indices", row),
               "-1 or below num_masks = " + std::to_string(processors.num_masks),
               std::to_string(index));
  }
  if (processors.slots == nullptr) return;
  int32_t slot = processors.slots[i];
  if (slot < -1 || slot >= processors.num_slots) {
    check.fail(at("processors.slots", i),
               "-1 or below num_slots = " + std::to_string(processors.num_slots),
               std::to_string(slot));
  }
  if (slot < 0) return;
  float repetition = processors.repetition_penalty ? processors.repetition_penalty[slot] : 1.0f;
  if (!(repetition > 0.0f && repetition <= 3.402823466e38f)) {
    check.fail(at("processors.repetition_penalty", slot),
               "finite and above 0",
               std::to_string(repetition));
  }
  const std::pair<const char*, const float*> penalties[] = {
      {"processors.presence_penalty", processors.presence_penalty},
      {"processors.frequency_penalty", processors.frequency_penalty}};
  for (auto [name, values] : penalties) {
    if (values == nullptr || std::isfinite(values[slot])) continue;
    check.fail(at(name, slot), "finite", std::to_string(values[slot]));
  }
  if (processors.bad_words && position > max_len) {
    check.fail(
        "processors.token_ids",
        "as wide as the tokens of request " + std::to_string(i) + ", " + std::to_string(position),
        std::to_string(max_len) + " wide");
  }
}

int64_t history_len(const ProcessorViews& views) {
  constexpr size_t kTokenIds = 1;
  return views.empty() || !views[kTokenIds].is_tensor ? 0 : views[kTokenIds].size(1);
}

void sample(const TensorView& logits,
            const TensorView& positions,
            const TensorView& temperature,
            const TensorView& top_k,
            const TensorView& top_p,
            const TensorView& min_p,
            const TensorView& typical_p,
            const TensorView& seeds,
            const TensorView& choice_index,
            const ProcessorViews& processor_views,
            int64_t purpose,
            const TensorView& anchors,
            bool processed_logprobs,
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
  FilterArrays filters = check_filters(check, {temperature, top_k, top_p, min_p, typical_p}, rows);
  check_streams(check, filters, seeds, choice_index, rows);
  LogitsProcessors processors = check_processors(check, processor_views, rows, rows, vocab_size);
  bool purpose_ok = purpose == static_cast<int64_t>(Purpose::kTarget) ||
                    purpose == static_cast<int64_t>(Purpose::kDraft);
  check.that(purpose_ok, "purpose", "0 (DRAFT) or 3 (TARGET)", purpose);
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
      .processed_logprobs = processed_logprobs,
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
  for (int64_t row = 0; row < rows; ++row) {
    check_filter_values(check, params.filters, row);
    bool unseeded = params.filters.seeds == nullptr && params.filters.temperature[row] > 0.0f;
    check.that(!unseeded, "seeds", "given where a temperature is above 0", "None");
    check_processor_values(
        check, processors, row, params.positions[row], history_len(processor_views), row, row + 1);
  }
  run_on_cpu<SampleParams>(sample_cpu, params, rows * vocab_size);
}

// The rows of request i in output_indptr; on cpu.
void check_indptr(
    Checker& check, const int32_t* indptr, int64_t i, int64_t capacity, int64_t rows) {
  if (indptr[0] != 0) check.fail("output_indptr[0]", "0", std::to_string(indptr[0]));
  int64_t num_rows = int64_t{indptr[i + 1]} - indptr[i];
  if (num_rows >= 0 && num_rows <= capacity && indptr[i + 1] <= rows) return;
  check.fail(at("output_indptr", i + 1),
             "ascending by at most k + 1 = " + std::to_string(capacity) +
                 " and at most num_output_rows = " + std::to_string(rows),
             std::to_string(indptr[i + 1]) + " after " + std::to_string(indptr[i]));
}

std::string at(const char* name, int64_t i, int64_t j) {
  return std::string(name) + "[" + std::to_string(i) + ", " + std::to_string(j) + "]";
}

// The tree of request i, on cpu.
void check_parents(Checker& check,
                   const int32_t* parents,
                   int64_t i,
                   int64_t num_drafts,
                   int64_t max_draft_tokens) {
  for (int64_t j = 0; parents != nullptr && j < num_drafts; ++j) {
    int32_t parent = parents[i * max_draft_tokens + j];
    if (parent < -1 || parent >= j) {
      check.fail(at("parents", i, j), "at least -1 and below the node", std::to_string(parent));
    }
  }
}

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

void top_logprobs(const TensorView& logits,
                  bool processed_logprobs,
                  const TensorView& output_indptr,
                  const TensorView& draft_token_ids,
                  const TensorView& parents,
                  const TensorView& positions,
                  const TensorView& temperature,
                  const TensorView& top_k,
                  const TensorView& top_p,
                  const TensorView& min_p,
                  const TensorView& typical_p,
                  const ProcessorViews& processor_views,
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
  FilterArrays filters = check_filters(check, {temperature, top_k, top_p, min_p, typical_p}, batch);
  LogitsProcessors processors = check_processors(check, processor_views, batch, rows, vocab_size);
  bool placed = positions.defined() || !has_processors(processors);
  check.that(placed, "positions", "given with processors", "None");
  bool useful = processed_logprobs || (!temperature.defined() && !has_processors(processors));
  check.that(useful, "processed_logprobs", "True with filters or processors", "False");
  if (rows == 0) return;
  check_vocab(check, vocab_size);
  check.that(
      n <= vocab_size, "n", "at most vocab_size = " + std::to_string(vocab_size.value), n.value);
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
  for (int64_t i = 0; processed_logprobs && i < batch; ++i) {
    int64_t first = i, end = i + 1;
    if (params.output_indptr) {
      check_indptr(check, params.output_indptr, i, drafts + 1, rows);
      first = params.output_indptr[i], end = params.output_indptr[i + 1];
    }
    if (first == end) continue;
    check_filter_values(check, params.filters, i);
    check_processor_values(check,
                           processors,
                           i,
                           params.positions ? params.positions[i] : 0,
                           history_len(processor_views),
                           first,
                           end);
    check_parents(check, params.parents, i, end - first - 1, drafts);
  }
  run_on_cpu<TopLogprobsParams>(top_logprobs_cpu, params, rows * vocab_size);
}

// Values, on cpu: all of them before anything is written.
void check_commit_values(Checker& check, const CommitParams& params) {
  std::vector<bool> is_taken(params.num_slots);
  for (int64_t i = 0; i < params.batch; ++i) {
    int32_t slot = params.slots[i];
    if (slot < -1 || slot >= params.num_slots) {
      check.fail(at("slots", i),
                 "-1 or below num_slots = " + std::to_string(params.num_slots),
                 std::to_string(slot));
    }
    if (slot < 0) continue;
    if (is_taken[slot]) {
      check.fail(at("slots", i), "of no other request", std::to_string(slot) + " again");
    }
    is_taken[slot] = true;
    int64_t len = params.lens[slot];
    const int32_t* ids = params.counted_token_ids;
    if (ids != nullptr) ids += slot * params.num_counted;
    int64_t used = ids != nullptr ? counted_place(ids, params.num_counted, -1) : 0;
    bool is_roomy = len >= 0 && len + params.max_tokens <= params.max_len &&
                    (ids == nullptr || used + params.max_tokens <= params.num_counted);
    if (is_roomy) continue;  // whatever the walk says
    CommitWalk walk{};
    if (len >= 0 && len <= params.max_len) walk = commit_walk(params, i, slot);
    if (len < 0 || len + walk.count > params.max_len) {
      check.fail(at("lens", slot),
                 "at least 0, with room for " + std::to_string(walk.count) +
                     " tokens more below max_len = " + std::to_string(params.max_len),
                 std::to_string(len));
    }
    if (ids == nullptr) continue;
    CommitTokens tokens = committed_tokens(params, i, slot, walk);
    int64_t num_new = 0;
    for (int64_t j = 0; j < walk.count; ++j) {
      num_new += is_new_token(ids, params.num_counted, tokens, j);
    }
    if (used + num_new > params.num_counted) {
      check.fail(at("counted_token_ids", slot),
                 "with room for " + std::to_string(num_new) + " tokens more",
                 std::to_string(used) + " of " + std::to_string(params.num_counted) + " in use");
    }
  }
}

void commit(const TensorView& output_token_ids,
            const TensorView& slots,
            const TensorView& token_ids,
            const TensorView& lens,
            const TensorView& logprobs,
            const TensorView& ranks,
            const TensorView& prompt_lens,
            const TensorView& max_lens,
            const TensorView& min_tokens,
            const TensorView& stop_token_ids,
            const TensorView& stop_sequences,
            const TensorView& counted_token_ids,
            const TensorView& token_counts,
            const TensorView& think_end_token_id,
            const TensorView& thinking_budget,
            const TensorView& reply_budget,
            const TensorView& inject_token_ids,
            const TensorView& thinking_state,
            const TensorView& finish_reasons,
            const TensorView& stop_indices,
            const TensorView& num_committed_tokens) {
  Checker check("commit");
  Dim batch{"batch"}, max_tokens{"k + 1"}, num_slots{"num_slots"}, max_len{"max_len"};
  Dim stop_tokens{"n"}, sequences{"n"}, sequence_len{"m"}, counted{"n"}, inject{"n"};
  check.tensor("output_token_ids", output_token_ids, {DType::kInt32}, {&batch, &max_tokens});
  check.tensor("slots", slots, {DType::kInt32}, {&batch});
  check.tensor("token_ids", token_ids, {DType::kInt32}, {&num_slots, &max_len}, Layout::kRows);
  check.tensor("lens", lens, {DType::kInt32}, {&num_slots});
  check.optional("logprobs", logprobs, {DType::kFloat32}, {&batch, &max_tokens});
  check.optional("ranks", ranks, {DType::kInt32}, {&batch, &max_tokens});
  check.optional("prompt_lens", prompt_lens, {DType::kInt32}, {&num_slots});
  check.optional("max_lens", max_lens, {DType::kInt32}, {&num_slots});
  check.optional("min_tokens", min_tokens, {DType::kInt32}, {&num_slots});
  check.optional("stop_token_ids", stop_token_ids, {DType::kInt32}, {&num_slots, &stop_tokens});
  check.optional(
      "stop_sequences", stop_sequences, {DType::kInt32}, {&num_slots, &sequences, &sequence_len});
  check.optional("counted_token_ids", counted_token_ids, {DType::kInt32}, {&num_slots, &counted});
  check.optional("token_counts", token_counts, {DType::kInt32}, {&num_slots, &counted});
  check.optional("think_end_token_id", think_end_token_id, {DType::kInt32}, {&num_slots});
  check.optional("thinking_budget", thinking_budget, {DType::kInt32}, {&num_slots});
  check.optional("reply_budget", reply_budget, {DType::kInt32}, {&num_slots});
  check.optional("inject_token_ids", inject_token_ids, {DType::kInt32}, {&num_slots, &inject});
  check.optional("thinking_state", thinking_state, {DType::kInt32}, {&num_slots});
  check.optional("finish_reasons", finish_reasons, {DType::kInt32}, {&num_slots});
  check.optional("stop_indices", stop_indices, {DType::kInt32}, {&num_slots});
  check.optional("num_committed_tokens", num_committed_tokens, {DType::kInt32}, {&batch});

  // A rule without what it needs would be a rule that silently does something else.
  auto needs = [&](const char* name, const TensorView& view, const char* with, bool is_given) {
    if (is_given && !view.defined()) {
      check.fail(name, std::string("given with ") + with, "None");
    }
  };
  bool thinks = think_end_token_id.defined() || thinking_budget.defined() ||
                reply_budget.defined() || inject_token_ids.defined();
  needs("counted_token_ids", counted_token_ids, "token_counts", token_counts.defined());
  needs("token_counts", token_counts, "counted_token_ids", counted_token_ids.defined());
  needs("prompt_lens", prompt_lens, "min_tokens", min_tokens.defined());
  needs("prompt_lens", prompt_lens, "stop_sequences", stop_sequences.defined());
  needs("prompt_lens", prompt_lens, "thinking_budget", thinking_budget.defined());
  needs("thinking_state", thinking_state, "any thinking argument", thinks);
  needs("finish_reasons",
        finish_reasons,
        "any rule that ends a request",
        stop_token_ids.defined() || stop_sequences.defined() || max_lens.defined() ||
            reply_budget.defined());
  if (batch == 0) return;
  CommitParams params{
      .output_token_ids = output_token_ids.data<int32_t>(),
      .slots = slots.data<int32_t>(),
      .token_ids = token_ids.data<int32_t>(),
      .lens = lens.data<int32_t>(),
      .logprobs = logprobs.data<float>(),
      .ranks = ranks.data<int32_t>(),
      .prompt_lens = prompt_lens.data<int32_t>(),
      .max_lens = max_lens.data<int32_t>(),
      .min_tokens = min_tokens.data<int32_t>(),
      .stop_token_ids = stop_token_ids.data<int32_t>(),
      .stop_sequences = stop_sequences.data<int32_t>(),
      .counted_token_ids = counted_token_ids.data<int32_t>(),
      .token_counts = token_counts.data<int32_t>(),
      .think_end_token_id = think_end_token_id.data<int32_t>(),
      .thinking_budget = thinking_budget.data<int32_t>(),
      .reply_budget = reply_budget.data<int32_t>(),
      .inject_token_ids = inject_token_ids.data<int32_t>(),
      .thinking_state = thinking_state.data<int32_t>(),
      .finish_reasons = finish_reasons.data<int32_t>(),
      .stop_indices = stop_indices.data<int32_t>(),
      .num_committed_tokens = num_committed_tokens.data<int32_t>(),
      .batch = batch,
      .max_tokens = max_tokens,
      .num_slots = num_slots,
      .max_len = max_len,
      .token_ids_stride = token_ids.stride(0),
      .num_stop_tokens = stop_token_ids.defined() ? stop_tokens.value : 0,
      .num_stop_sequences = stop_sequences.defined() ? sequences.value : 0,
      .stop_sequence_len = stop_sequences.defined() ? sequence_len.value : 0,
      .num_counted = counted_token_ids.defined() ? counted.value : 0,
      .num_inject = inject_token_ids.defined() ? inject.value : 0,
      .error = check.error_flag(),
  };
  if (check.on_cuda()) return commit_cuda(params, check.stream());
  check_commit_values(check, params);
  int64_t num_moved = max_tokens * (16 + params.num_counted / 16);
  run_on_cpu<CommitParams>(commit_cpu, params, batch * num_moved);
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
  m.def("commit", &commit);
  m.def("philox4x32", &philox);
}

}  // namespace specops
