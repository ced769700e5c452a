// SPDX-License-Identifier: Apache-2.0
// Argument checks and registration of the suffix_tree ops.
#include "suffix_tree/ops.h"

#include <algorithm>
#include <string>

#include "common/tensor_view.h"
#include "suffix_tree/ngram_index.h"
#include "suffix_tree/ngram_propose.h"
#include "suffix_tree/ngram_share.h"

namespace specops {
namespace {

// Reads either one number for the whole batch, or a tensor with one number per request.
PerRow<int32_t> per_request(Checker& check,
                            const char* name,
                            const TensorView& view,
                            Dim& batch,
                            const char* one_of = "an int") {
  if (!view.defined()) check.fail(name, std::string(one_of) + " or int32 [batch]", "None");
  return check.per_row(name, view, batch, int32_t{0}, one_of);
}

// Reads an optional number of tokens. Numbers above INT32_MAX are clamped to it, because no row is
// longer.
int64_t tokens_or(const Checker& check, const char* name, Argument given, int64_t otherwise) {
  if (!given.defined()) return otherwise;
  return std::min(check.integer(name, given, 0), Checker::kMaxInt32);
}

// Estimates the number of tokens to scan. The time for the index is included as an equivalent
// number of tokens.
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
                   Argument max_total_given,
                   const TensorView& table,
                   const TensorView& state,
                   Argument scan_tokens,
                   Argument index_tokens,
                   const TensorView& draft_token_ids,
                   const TensorView& num_draft_tokens,
                   const TensorView& match_lens) {
  Checker check("ngram_propose");
  Dim batch{"batch"}, max_len{"max_len"}, capacity{"k"}, entries{"entries"}, two{"2", 2};
  check.tensor("token_ids", token_ids, {DType::kInt32}, {&batch, &max_len}, Layout::kRows);
  check.tensor("lens", lens, {DType::kInt32}, {&batch});
  check.tensor("max_draft_tokens", max_draft_tokens, {DType::kInt32}, {&batch});
  PerRow<int32_t> min_sizes = per_request(check, "min_ngram_size", min_ngram_size, batch);
  PerRow<int32_t> max_sizes = per_request(check, "max_ngram_size", max_ngram_size, batch);
  PerRow<int32_t> are_leftmost{};
  if (PyBool_Check(leftmost.object)) {
    are_leftmost.value = leftmost.object == Py_True;
  } else {
    are_leftmost = per_request(check, "leftmost", leftmost, batch, "a bool");
  }
  check.optional("num_given_drafts", num_given_drafts, {DType::kInt32}, {&batch});
  constexpr int64_t kNoLimit = -1;
  int64_t max_total_draft_tokens = max_total_given.defined()
                                       ? check.integer("max_total_draft_tokens", max_total_given, 0)
                                       : kNoLimit;
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
  int64_t usual_scan = on_cuda ? kNgramScanTokensCuda : kNgramScanTokensCpu;
  NgramProposeParams params{
      .token_ids = token_ids.data<int32_t>(),
      .lens = lens.data<int32_t>(),
      .max_draft_tokens = max_draft_tokens.data<int32_t>(),
      .min_sizes = min_sizes,
      .max_sizes = max_sizes,
      .leftmost = are_leftmost,
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
      .scan_tokens = tokens_or(check, "index.scan_tokens", scan_tokens, usual_scan),
      .index_tokens = tokens_or(check, "index.index_tokens", index_tokens, kNgramIndexTokens),
      .work = 0,
      .max_total_draft_tokens = max_total_draft_tokens,
      .error = check.error_flag(),
  };
  // On the host, only plain numbers are known, not the contents of CUDA tensors.
  bool sizes_in_tensors = min_sizes.values || max_sizes.values;
  if (!sizes_in_tensors) check.refuse(find_sizes_fault(min_sizes, max_sizes, 0));
  if (!are_leftmost.values) check.refuse(find_leftmost_fault(are_leftmost, 0));
  if (on_cuda) return ngram_propose_cuda(params, check.stream());
  for (int64_t b = 0; b < batch; ++b) check.refuse(find_fault(params, b));
  if (batch == 0) return;
  params.work = work_of(params);
  // A scan reads about twenty tokens per nanosecond, so it is worth releasing the GIL from half a
  // million on.
  if (params.work < (int64_t{1} << 19)) return ngram_propose_cpu(params);
  pybind11::gil_scoped_release release;
  ngram_propose_cpu(params);
}

}  // namespace

void register_suffix_tree(pybind11::module_& m) {
  register_faults<5000>();
  m.def("ngram_propose", &ngram_propose);
  register_suffix_cache(m);
}

}  // namespace specops
