// SPDX-License-Identifier: Apache-2.0
// Argument checks and registration of commit.
#include "sampling/checks.h"
#include "sampling/commit/commit_walk.h"
#include "sampling/ops.h"

namespace specops {
namespace {

// Checks the values of tensors on the CPU, all of them before anything is written.
void check_commit_values(Checker& check, const CommitParams& params) {
  std::vector<bool> is_taken(params.num_slots);
  for (int64_t i = 0; i < params.batch; ++i) {
    check.refuse(find_fault(params, i));
    int32_t slot = params.slots[i];
    if (slot < 0) continue;
    if (is_taken[slot]) check.refuse(fault_at(kCommitSlotTaken, slot, i));
    is_taken[slot] = true;
    const int32_t* ids = params.counts.counted_token_ids;
    if (ids != nullptr) ids += slot * params.counts.num_counted;
    int64_t used = ids != nullptr ? counted_place(ids, params.counts.num_counted, -1) : 0;
    auto has_room = [&](int64_t count) {
      return !find_room_fault(params, slot, count).found() &&
             (ids == nullptr || !find_counted_fault(params, slot, used, count).found());
    };
    if (has_room(params.max_tokens)) continue;  // enough for any outcome of the walk
    check.refuse(find_room_fault(params, slot, 0));
    CommitWalk walk = commit_walk(params, i, slot);
    check.refuse(find_room_fault(params, slot, walk.count));
    if (ids == nullptr) continue;
    CommitTokens tokens = committed_tokens(params, i, slot, walk);
    int64_t num_new = 0;
    for (int64_t j = 0; j < walk.count; ++j) {
      num_new += is_new_token(ids, params.counts.num_counted, tokens, j);
    }
    check.refuse(find_counted_fault(params, slot, used, num_new));
  }
}

EmittedTokens check_emitted(Checker& check, Argument given, Dim& batch, Dim& max_tokens) {
  auto [token_ids, logprobs, ranks] = check.fields<3>("emitted", "EmittedTokens", given);
  check.tensor("emitted.token_ids", token_ids, {DType::kInt32}, {&batch, &max_tokens});
  check.optional("emitted.logprobs", logprobs, {DType::kFloat32}, {&batch, &max_tokens});
  check.optional("emitted.ranks", ranks, {DType::kInt32}, {&batch, &max_tokens});
  return {.token_ids = token_ids.data<int32_t>(),
          .logprobs = logprobs.data<float>(),
          .ranks = ranks.data<int32_t>()};
}

EndingRules check_rules(Checker& check, Argument given, Dim& num_slots) {
  auto [max_lens,
        min_tokens,
        stop_token_ids,
        stop_sequences,
        think_end_token_id,
        thinking_budget,
        reply_budget,
        inject_token_ids] = check.fields<8>("rules", "EndingRules", given);
  Dim stop_tokens{"n"}, sequences{"n"}, sequence_len{"m"}, inject{"n"};
  check.optional("rules.max_lens", max_lens, {DType::kInt32}, {&num_slots});
  check.optional("rules.min_tokens", min_tokens, {DType::kInt32}, {&num_slots});
  check.optional(
      "rules.stop_token_ids", stop_token_ids, {DType::kInt32}, {&num_slots, &stop_tokens});
  check.optional("rules.stop_sequences",
                 stop_sequences,
                 {DType::kInt32},
                 {&num_slots, &sequences, &sequence_len});
  check.optional("rules.think_end_token_id", think_end_token_id, {DType::kInt32}, {&num_slots});
  check.optional("rules.thinking_budget", thinking_budget, {DType::kInt32}, {&num_slots});
  check.optional("rules.reply_budget", reply_budget, {DType::kInt32}, {&num_slots});
  check.optional(
      "rules.inject_token_ids", inject_token_ids, {DType::kInt32}, {&num_slots, &inject});
  return {.max_lens = max_lens.data<int32_t>(),
          .min_tokens = min_tokens.data<int32_t>(),
          .stop_token_ids = stop_token_ids.data<int32_t>(),
          .stop_sequences = stop_sequences.data<int32_t>(),
          .think_end_token_id = think_end_token_id.data<int32_t>(),
          .thinking_budget = thinking_budget.data<int32_t>(),
          .reply_budget = reply_budget.data<int32_t>(),
          .inject_token_ids = inject_token_ids.data<int32_t>(),
          .num_stop_tokens = stop_token_ids.defined() ? stop_tokens.value : 0,
          .num_stop_sequences = stop_sequences.defined() ? sequences.value : 0,
          .stop_sequence_len = stop_sequences.defined() ? sequence_len.value : 0,
          .num_inject = inject_token_ids.defined() ? inject.value : 0};
}

TokenCounts check_counts(Checker& check, Argument given, Dim& num_slots) {
  if (!given.defined()) return {};
  auto [counted_token_ids, token_counts] = check.fields<2>("counts", "TokenCounts", given);
  Dim counted{"n"};
  check.tensor(
      "counts.counted_token_ids", counted_token_ids, {DType::kInt32}, {&num_slots, &counted});
  check.tensor("counts.token_counts", token_counts, {DType::kInt32}, {&num_slots, &counted});
  return {.counted_token_ids = counted_token_ids.data<int32_t>(),
          .token_counts = token_counts.data<int32_t>(),
          .num_counted = counted};
}

RequestStatus check_status(Checker& check, Argument given, Dim& num_slots) {
  auto [finish_reasons, stop_indices, thinking_state] =
      check.fields<3>("status", "RequestStatus", given);
  check.optional("status.finish_reasons", finish_reasons, {DType::kInt32}, {&num_slots});
  check.optional("status.stop_indices", stop_indices, {DType::kInt32}, {&num_slots});
  check.optional("status.thinking_state", thinking_state, {DType::kInt32}, {&num_slots});
  return {.finish_reasons = finish_reasons.data<int32_t>(),
          .stop_indices = stop_indices.data<int32_t>(),
          .thinking_state = thinking_state.data<int32_t>()};
}

// Checks that every enabled rule has all arrays it needs. Without one of them, the rule would
// silently do something else.
void check_inputs(const Checker& check,
                  const EndingRules& rules,
                  const int32_t* prompt_lens,
                  const RequestStatus& status) {
  auto needs = [&](const char* name, const int32_t* array, const char* with, bool is_given) {
    if (is_given && array == nullptr) {
      check.fail(name, std::string("given with ") + with, "None");
    }
  };
  bool thinks = rules.think_end_token_id != nullptr || rules.thinking_budget != nullptr ||
                rules.reply_budget != nullptr || rules.inject_token_ids != nullptr;
  needs("prompt_lens", prompt_lens, "rules.min_tokens", rules.min_tokens != nullptr);
  needs("prompt_lens", prompt_lens, "rules.stop_sequences", rules.stop_sequences != nullptr);
  needs("prompt_lens", prompt_lens, "rules.thinking_budget", rules.thinking_budget != nullptr);
  needs("status.thinking_state", status.thinking_state, "any thinking rule", thinks);
  needs("status.finish_reasons",
        status.finish_reasons,
        "any rule that ends a request",
        rules.stop_token_ids != nullptr || rules.stop_sequences != nullptr ||
            rules.max_lens != nullptr || rules.reply_budget != nullptr);
}

void commit(Argument emitted_given,
            const TensorView& slots,
            const TensorView& token_ids,
            const TensorView& lens,
            const TensorView& prompt_lens,
            Argument rules_given,
            Argument counts_given,
            Argument status_given,
            const TensorView& num_committed_tokens) {
  Checker check("commit");
  Dim batch{"batch"}, max_tokens{"k + 1"}, num_slots{"num_slots"}, max_len{"max_len"};
  EmittedTokens emitted = check_emitted(check, emitted_given, batch, max_tokens);
  check.tensor("slots", slots, {DType::kInt32}, {&batch});
  check.tensor("token_ids", token_ids, {DType::kInt32}, {&num_slots, &max_len}, Layout::kRows);
  check.tensor("lens", lens, {DType::kInt32}, {&num_slots});
  check.optional("prompt_lens", prompt_lens, {DType::kInt32}, {&num_slots});
  EndingRules rules = check_rules(check, rules_given, num_slots);
  TokenCounts counts = check_counts(check, counts_given, num_slots);
  RequestStatus status = check_status(check, status_given, num_slots);
  check.optional("num_committed_tokens", num_committed_tokens, {DType::kInt32}, {&batch});
  check_inputs(check, rules, prompt_lens.data<int32_t>(), status);
  if (batch == 0) return;
  CommitParams params{
      .emitted = emitted,
      .slots = slots.data<int32_t>(),
      .token_ids = token_ids.data<int32_t>(),
      .lens = lens.data<int32_t>(),
      .prompt_lens = prompt_lens.data<int32_t>(),
      .rules = rules,
      .counts = counts,
      .status = status,
      .num_committed_tokens = num_committed_tokens.data<int32_t>(),
      .batch = batch,
      .max_tokens = max_tokens,
      .num_slots = num_slots,
      .max_len = max_len,
      .token_ids_stride = token_ids.stride(0),
      .error = check.error_flag(),
  };
  if (check.on_cuda()) return commit_cuda(params, check.stream());
  check_commit_values(check, params);
  int64_t num_moved = max_tokens * (16 + params.counts.num_counted / 16);
  run_on_cpu<CommitParams>(commit_cpu, params, batch * num_moved);
}

}  // namespace

void register_commit(pybind11::module_& m) { m.def("commit", &commit); }

}  // namespace specops
