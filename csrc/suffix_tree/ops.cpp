// SPDX-License-Identifier: Apache-2.0
// Argument checks and registration of the suffix_tree family.
#include "suffix_tree/ops.h"

#include <string>

#include "common/tensor_view.h"
#include "suffix_tree/ngram_propose.h"

namespace specops {
namespace {

std::string at(const char* name, int64_t index) {
  return std::string(name) + "[" + std::to_string(index) + "]";
}

// A size given once for the batch, as an int, or per request, as a tensor.
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

void ngram_propose(const TensorView& token_ids,
                   const TensorView& lens,
                   const TensorView& max_draft_tokens,
                   const TensorView& min_ngram_size,
                   const TensorView& max_ngram_size,
                   const TensorView& draft_token_ids,
                   const TensorView& num_draft_tokens) {
  Checker check("ngram_propose");
  Dim batch{"batch"}, max_len{"max_len"}, capacity{"k"};
  check.tensor("token_ids", token_ids, {DType::kInt32}, {&batch, &max_len}, Layout::kRows);
  check.tensor("lens", lens, {DType::kInt32}, {&batch});
  check.tensor("max_draft_tokens", max_draft_tokens, {DType::kInt32}, {&batch});
  PerRequest min_sizes = per_request(check, "min_ngram_size", min_ngram_size, &batch);
  PerRequest max_sizes = per_request(check, "max_ngram_size", max_ngram_size, &batch);
  check.tensor("draft_token_ids", draft_token_ids, {DType::kInt32}, {&batch, &capacity});
  check.tensor("num_draft_tokens", num_draft_tokens, {DType::kInt32}, {&batch});
  const int32_t* len_values = lens.data<int32_t>();
  const int32_t* limits = max_draft_tokens.data<int32_t>();
  int64_t total_tokens = 0;
  for (int64_t b = 0; b < batch; ++b) {
    if (len_values[b] < 0 || len_values[b] > max_len) {
      check.fail(at("lens", b),
                 "in 0 .. max_len = " + std::to_string(max_len),
                 std::to_string(len_values[b]));
    }
    if (limits[b] < 0) {
      check.fail(at("max_draft_tokens", b), "at least 0", std::to_string(limits[b]));
    }
    total_tokens += len_values[b];
  }
  for (int64_t b = 0; b < (min_sizes.values || max_sizes.values ? batch.value : 1); ++b) {
    int64_t low = min_sizes[b];
    int64_t high = max_sizes[b];
    if (low < 1) {
      check.fail(min_sizes.values ? at("min_ngram_size", b) : "min_ngram_size",
                 "at least 1",
                 std::to_string(low));
    }
    if (high < low) {
      check.fail(max_sizes.values ? at("max_ngram_size", b) : "max_ngram_size",
                 "at least min_ngram_size = " + std::to_string(low),
                 std::to_string(high));
    }
  }
  if (batch == 0) return;
  NgramProposeParams params{
      .token_ids = token_ids.data<int32_t>(),
      .lens = len_values,
      .max_draft_tokens = limits,
      .min_sizes = min_sizes.values,
      .max_sizes = max_sizes.values,
      .draft_token_ids = draft_token_ids.data<int32_t>(),
      .num_draft_tokens = num_draft_tokens.data<int32_t>(),
      .batch = batch,
      .stride = token_ids.stride(0),
      .capacity = capacity,
      .total_tokens = total_tokens,
      .min_size = min_sizes.value,
      .max_size = max_sizes.value,
  };
  // A scan reads about twenty tokens in a nanosecond: half a million are worth other threads' time.
  if (total_tokens < (int64_t{1} << 19)) return ngram_propose_cpu(params);
  pybind11::gil_scoped_release release;
  ngram_propose_cpu(params);
}

}  // namespace

void register_suffix_tree(pybind11::module_& m) { m.def("ngram_propose", &ngram_propose); }

}  // namespace specops
