// SPDX-License-Identifier: Apache-2.0
// Argument checks and registration of commit.
#include "sampling/checks.h"
#include "sampling/commit/commit_walk.h"
#include "sampling/ops.h"

namespace specops {
namespace {

// Checks values on cpu, all of them before anything is written.
void check_commit_values(Checker& check, const CommitParams& params) {
  std::vector<bool> is_taken(params.num_slots);
  for (int64_t i = 0; i < params.batch; ++i) {
    check.refuse(find_fault(params, i));
    int32_t slot = params.slots[i];
    if (slot < 0) continue;
    if (is_taken[slot]) check.refuse(fault_at(kCommitSlotTaken, slot, i));
    is_taken[slot] = true;
    const int32_t* ids = params.counted_token_ids;
    if (ids != nullptr) ids += slot * params.num_counted;
    int64_t used = ids != nullptr ? counted_place(ids, params.num_counted, -1) : 0;
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
      num_new += is_new_token(ids, params.num_counted, tokens, j);
    }
    check.refuse(find_counted_fault(params, slot, used, num_new));
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

  // A rule without its inputs would silently do something else.
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

}  // namespace

void register_commit(pybind11::module_& m) { m.def("commit", &commit); }

}  // namespace specops
