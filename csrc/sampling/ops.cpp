// SPDX-License-Identifier: Apache-2.0
// Argument checks shared by the sampling ops, and the registration of the ops.
#include "sampling/ops.h"

#include <array>

#include "common/philox.h"
#include "sampling/checks.h"
#include "sampling/commit/commit.h"
#include "sampling/sample/sample.h"
#include "sampling/verify/verify.h"

namespace specops {

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
  // Token ids are int32, and the first id of a leaf after the last one must not overflow.
  check.that(vocab_size >= 1 && vocab_size <= INT32_MAX - 4096,
             "logits",
             "between 1 and 2^31 - 4097 tokens wide",
             vocab_size.value);
}

SamplingTensors check_sampling(Checker& check, SamplingOp op, Argument sampling, Dim& count) {
  auto [temperature, top_k, top_p, min_p, typical_p, seeds, choice_index] =
      check.fields<7>("sampling", "SamplingTensors", sampling);
  SamplingTensors out, numbers;
  bool is_greedy = !temperature.defined();
  auto take = [&](const char* name, const TensorView& view, auto field) {
    out.*field = check.per_row(name, view, count, (out.*field).value);
    if (view.defined() && is_greedy) {
      check.fail(name, "None without temperature (greedy decoding ignores it)", "a value");
    }
    if ((out.*field).values == nullptr) numbers.*field = out.*field;
  };
  take("sampling.temperature", temperature, &SamplingTensors::temperature);
  take("sampling.top_k", top_k, &SamplingTensors::top_k);
  take("sampling.top_p", top_p, &SamplingTensors::top_p);
  take("sampling.min_p", min_p, &SamplingTensors::min_p);
  take("sampling.typical_p", typical_p, &SamplingTensors::typical_p);
  check.refuse(find_filters_fault(op, numbers, filters_of(numbers, 0), 0));
  check.optional("sampling.seeds", seeds, {DType::kInt64}, {&count});
  out.seeds = seeds.data<int64_t>();
  out.choice_index = check.per_row("sampling.choice_index", choice_index, count, int32_t{0});
  return out;
}

Drafts check_drafts(Checker& check, Argument drafts, Dim& batch, Dim& max_draft_tokens) {
  auto [output_indptr, token_ids, parents] = check.fields<3>("drafts", "Drafts", drafts);
  check.tensor("drafts.token_ids", token_ids, {DType::kInt32}, {&batch, &max_draft_tokens});
  Dim batch_plus_one{"batch + 1", batch + 1};
  check.tensor("drafts.output_indptr", output_indptr, {DType::kInt32}, {&batch_plus_one});
  check.optional("drafts.parents", parents, {DType::kInt32}, {&batch, &max_draft_tokens});
  return {.output_indptr = output_indptr.data<int32_t>(),
          .token_ids = token_ids.data<int32_t>(),
          .parents = parents.data<int32_t>(),
          .max_draft_tokens = max_draft_tokens};
}

LogitsProcessors check_processors(
    Checker& check, Argument processors, Dim& batch, Dim& output_rows, const Dim& vocab_size) {
  if (!processors.defined()) return {};
  auto [slots,
        token_ids,
        prompt_lens,
        counted,
        counts,
        repetition,
        presence,
        frequency,
        bias_ids,
        bias,
        bad_words,
        stop_ids,
        min_tokens,
        mask,
        mask_indices] = check.fields<15>("processors", "LogitsProcessors", processors);
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

namespace {

// Returns the size in bytes of the workspace of a call. device_index is as in torch; -1 for the
// CPU.
int64_t sampling_workspace_bytes(Argument rows_given,
                                 Argument vocab_size_given,
                                 Argument element_bytes_given,
                                 Argument batch_given,
                                 Argument device_given) {
  Checker check("sampling_workspace");
  int64_t rows = check.integer("rows", rows_given, 0);
  int64_t vocab_size = check.integer("vocab_size", vocab_size_given, 0);
  int64_t element_bytes = check.integer("element_bytes", element_bytes_given, 0);
  int64_t batch = check.integer("batch", batch_given, 0, Checker::kMaxInt32);
  int64_t device = check.integer("device_index", device_given, -1, Checker::kMaxInt32);
  if (device < 0 && !interprets_cuda()) return 0;
  int64_t num_bytes = 0;
  // Accept shapes that the op itself rejects.
  if (rows > Checker::kMaxInt32 || vocab_size < 1 || vocab_size > Checker::kMaxInt32 ||
      element_bytes < 1 || element_bytes > 16) {
    return 0;
  }
  sampling_workspace_cuda({.num_bytes = &num_bytes,
                           .rows = rows,
                           .vocab_size = vocab_size,
                           .element_bytes = element_bytes,
                           .batch = batch},
                          {.device = static_cast<int>(device)});
  return num_bytes;
}

// Exposes the random number generator, so that tests can compare it with published vectors.
std::array<uint32_t, 4> philox(uint64_t seed, const std::array<uint32_t, 4>& counter) {
  PhiloxBlock block = philox4x32(seed, {{counter[0], counter[1], counter[2], counter[3]}});
  return {block.word[0], block.word[1], block.word[2], block.word[3]};
}

}  // namespace

void register_sampling(pybind11::module_& m) {
  register_faults<4000>();
  register_faults<4400>();
  register_faults<0>(static_cast<int32_t>(SamplingOp::kSample), "sample: ");
  register_faults<0>(static_cast<int32_t>(SamplingOp::kVerify), "verify: ");
  register_faults<0>(static_cast<int32_t>(SamplingOp::kTopLogprobs), "top_logprobs: ");
  register_sample(m);
  register_verify(m);
  register_top_logprobs(m);
  register_commit(m);
  m.def("sampling_workspace_bytes", &sampling_workspace_bytes);
  m.def("philox4x32", &philox);
}

}  // namespace specops
