// SPDX-License-Identifier: Apache-2.0
// What the checks of the sampling family share, and its registration.
#include "sampling/ops.h"

#include <array>
#include <cmath>

#include "common/philox.h"
#include "sampling/checks.h"
#include "sampling/sample.h"

namespace specops {

std::string at(const char* name, int64_t index) {
  return std::string(name) + "[" + std::to_string(index) + "]";
}

std::string at(const char* name, int64_t i, int64_t j) {
  return std::string(name) + "[" + std::to_string(i) + ", " + std::to_string(j) + "]";
}

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

void check_vocab(Checker& check, const Dim& vocab_size) {
  // ids are int32, and one more leaf must still be countable
  check.that(vocab_size >= 1 && vocab_size <= INT32_MAX - 4096,
             "logits",
             "between 1 and 2^31 - 4097 tokens wide",
             vocab_size.value);
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

void check_streams(Checker& check,
                   FilterArrays& filters,
                   const TensorView& seeds,
                   const TensorView& choice_index,
                   Dim& count) {
  check.optional("seeds", seeds, {DType::kInt64}, {&count});
  filters.seeds = seeds.data<int64_t>();
  filters.choice_index = check.per_row("choice_index", choice_index, count, int32_t{0});
}

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

namespace {

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

// The generator itself, so that tests can hold it against published vectors.
std::array<uint32_t, 4> philox(uint64_t seed, const std::array<uint32_t, 4>& counter) {
  PhiloxBlock block = philox4x32(seed, {{counter[0], counter[1], counter[2], counter[3]}});
  return {block.word[0], block.word[1], block.word[2], block.word[3]};
}

}  // namespace

void register_sampling(pybind11::module_& m) {
  register_sample(m);
  register_verify(m);
  register_top_logprobs(m);
  register_commit(m);
  m.def("sampling_workspace_bytes", &sampling_workspace_bytes);
  m.def("philox4x32", &philox);
}

}  // namespace specops
