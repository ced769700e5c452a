// SPDX-License-Identifier: Apache-2.0
// Argument checks and registration of the suffix_tree family.
#include "suffix_tree/ops.h"

#include <limits>
#include <string>

#include "common/tensor_view.h"
#include "suffix_tree/ngram_index.h"
#include "suffix_tree/ngram_propose.h"
#include "suffix_tree/ngram_share.h"

namespace specops {
namespace {

std::string at(const char* name, int64_t index) {
  return std::string(name) + "[" + std::to_string(index) + "]";
}

// No row is longer, so a larger size means no other.
int32_t as_size(int64_t value) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  return static_cast<int32_t>(value < kMax ? value : kMax);
}

// A number given once for the batch, as an int, or per request, as a tensor.
struct PerRequest {
  const int32_t* values = nullptr;
  int64_t value = 0;

  int64_t operator[](int64_t index) const { return values ? values[index] : value; }
};

PerRequest per_request(Checker& check, const char* name, const TensorView& view, Dim* batch) {
  if (view.object != nullptr && PyLong_Check(view.object)) {
    PerRequest out{.value = PyLong_AsLongLong(view.object)};
    if (PyErr_Occurred()) throw pybind11::error_already_set();
    return out;
  }
  if (!view.is_tensor) {
    check.fail(name, "an int or int32 [batch]", Checker::describe_object(view.object));
  }
  check.tensor(name, view, {DType::kInt32}, {batch});
  return {.values = view.data<int32_t>()};
}

std::string name_of(const char* argument, const PerRequest& values, int64_t index) {
  return values.values ? at(argument, index) : argument;
}

void check_sizes(const Checker& check,
                 const PerRequest& min_sizes,
                 const PerRequest& max_sizes,
                 int64_t count) {
  for (int64_t b = 0; b < count; ++b) {
    int64_t low = min_sizes[b];
    int64_t high = max_sizes[b];
    if (low < 1) {
      check.fail(name_of("min_ngram_size", min_sizes, b), "at least 1", std::to_string(low));
    }
    if (high < low) {
      check.fail(name_of("max_ngram_size", max_sizes, b),
                 "at least min_ngram_size = " + std::to_string(low),
                 std::to_string(high));
    }
  }
}

void check_leftmost(const Checker& check, const PerRequest& leftmost, int64_t count) {
  for (int64_t b = 0; b < count; ++b) {
    if (leftmost[b] != 0 && leftmost[b] != 1) {
      check.fail(name_of("leftmost", leftmost, b), "0 or 1", std::to_string(leftmost[b]));
    }
  }
}

void check_lengths(const Checker& check, const NgramProposeParams& params) {
  for (int64_t b = 0; b < params.batch; ++b) {
    if (params.lens[b] < 0 || params.lens[b] > params.max_len) {
      check.fail(at("lens", b),
                 "in 0 .. max_len = " + std::to_string(params.max_len),
                 std::to_string(params.lens[b]));
    }
    if (params.max_draft_tokens[b] < 0) {
      check.fail(
          at("max_draft_tokens", b), "at least 0", std::to_string(params.max_draft_tokens[b]));
    }
    if (params.num_given_drafts == nullptr) continue;
    if (params.num_given_drafts[b] < 0 || params.num_given_drafts[b] > params.capacity) {
      check.fail(at("num_given_drafts", b),
                 "in 0 .. k = " + std::to_string(params.capacity),
                 std::to_string(params.num_given_drafts[b]));
    }
  }
}

// About how many tokens will be scanned, or could have been in the time that the index takes.
int64_t work_of(const NgramProposeParams& params) {
  constexpr int64_t kTokensPerIndexedOne = 256;
  int64_t tokens = 0;
  for (int64_t b = 0; b < params.batch; ++b) {
    ErrorCode fault;
    NgramRequest request = load_request(params, b, &fault);
    if (request.room <= 0) continue;
    const int32_t* state = params.table ? params.state + 2 * b : nullptr;
    NgramPlan plan = plan_index(params, request, state);
    tokens += request.len - plan.num_indexed + kTokensPerIndexedOne * plan.num_new;
  }
  return tokens;
}

void ngram_propose(const TensorView& token_ids,
                   const TensorView& lens,
                   const TensorView& max_draft_tokens,
                   const TensorView& min_ngram_size,
                   const TensorView& max_ngram_size,
                   const TensorView& leftmost,
                   const TensorView& num_given_drafts,
                   int64_t max_total_draft_tokens,
                   const TensorView& table,
                   const TensorView& state,
                   int64_t scan_tokens,
                   int64_t index_tokens,
                   const TensorView& draft_token_ids,
                   const TensorView& num_draft_tokens,
                   const TensorView& match_lens) {
  Checker check("ngram_propose");
  Dim batch{"batch"}, max_len{"max_len"}, capacity{"k"}, entries{"entries"}, two{"2", 2};
  check.tensor("token_ids", token_ids, {DType::kInt32}, {&batch, &max_len}, Layout::kRows);
  check.tensor("lens", lens, {DType::kInt32}, {&batch});
  check.tensor("max_draft_tokens", max_draft_tokens, {DType::kInt32}, {&batch});
  PerRequest min_sizes = per_request(check, "min_ngram_size", min_ngram_size, &batch);
  PerRequest max_sizes = per_request(check, "max_ngram_size", max_ngram_size, &batch);
  PerRequest are_leftmost = per_request(check, "leftmost", leftmost, &batch);
  check.optional("num_given_drafts", num_given_drafts, {DType::kInt32}, {&batch});
  check.that(max_total_draft_tokens >= -1,
             "max_total_draft_tokens",
             "at least 0, or -1 for no limit",
             max_total_draft_tokens);
  check.optional("table", table, {DType::kInt32}, {&batch, &entries});
  check.optional("state", state, {DType::kInt32}, {&batch, &two});
  check.that(table.defined() == state.defined(),
             table.defined() ? "state" : "table",
             std::string("given together with ") + (table.defined() ? "table" : "state"),
             "None");
  check.tensor("draft_token_ids", draft_token_ids, {DType::kInt32}, {&batch, &capacity});
  check.tensor("num_draft_tokens", num_draft_tokens, {DType::kInt32}, {&batch});
  check.optional("match_lens", match_lens, {DType::kInt32}, {&batch});
  check.that(max_total_draft_tokens < 0 || capacity <= kNgramMaxSharedDrafts,
             "draft_token_ids",
             "at most " + std::to_string(kNgramMaxSharedDrafts) +
                 " wide where max_total_draft_tokens is given",
             capacity.value);
  bool on_cuda = check.on_cuda();
  if (scan_tokens < 0) scan_tokens = on_cuda ? kNgramScanTokensCuda : kNgramScanTokensCpu;
  NgramProposeParams params{
      .token_ids = token_ids.data<int32_t>(),
      .lens = lens.data<int32_t>(),
      .max_draft_tokens = max_draft_tokens.data<int32_t>(),
      .min_sizes = min_sizes.values,
      .max_sizes = max_sizes.values,
      .leftmost = are_leftmost.values,
      .num_given_drafts = num_given_drafts.data<int32_t>(),
      .draft_token_ids = draft_token_ids.data<int32_t>(),
      .num_draft_tokens = num_draft_tokens.data<int32_t>(),
      .match_lens = match_lens.data<int32_t>(),
      .table = table.data<uint32_t>(),
      .state = state.data<int32_t>(),
      .batch = batch,
      .max_len = max_len,
      .stride = token_ids.stride(0),
      .capacity = capacity,
      .table_entries = table.defined() ? entries : 0,
      .scan_tokens = as_size(scan_tokens),
      .index_tokens = as_size(index_tokens < 0 ? kNgramIndexTokens : index_tokens),
      .work = 0,
      .min_size = as_size(min_sizes.value),
      .max_size = as_size(max_sizes.value),
      .is_leftmost = are_leftmost.value != 0,
      .max_total_draft_tokens = max_total_draft_tokens,
      .error = check.error_flag(),
  };
  bool sizes_in_tensors = min_sizes.values || max_sizes.values;
  if (!sizes_in_tensors) check_sizes(check, min_sizes, max_sizes, 1);
  if (!are_leftmost.values) check_leftmost(check, are_leftmost, 1);
  if (on_cuda) return ngram_propose_cuda(params, check.stream());
  check_lengths(check, params);
  if (sizes_in_tensors) check_sizes(check, min_sizes, max_sizes, batch);
  if (are_leftmost.values) check_leftmost(check, are_leftmost, batch);
  if (batch == 0) return;
  params.work = work_of(params);
  // A scan reads about twenty tokens in a nanosecond: half a million are worth other threads' time.
  if (params.work < (int64_t{1} << 19)) return ngram_propose_cpu(params);
  pybind11::gil_scoped_release release;
  ngram_propose_cpu(params);
}

}  // namespace

void register_suffix_tree(pybind11::module_& m) {
  m.def("ngram_propose", &ngram_propose);
  register_suffix_cache(m);
}

}  // namespace specops
