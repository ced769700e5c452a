// SPDX-License-Identifier: Apache-2.0
// Argument checks that the ops of the sampling family share.
#pragma once

#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "common/tensor_view.h"
#include "sampling/filters.h"
#include "sampling/logits_processors.h"

namespace specops {

template <typename Params>
void run_on_cpu(void (*fn)(const Params&), const Params& params, int64_t num_logits) {
  constexpr int64_t kSmallWork = 32768;  // below it an op is over before releasing the GIL pays
  std::optional<pybind11::gil_scoped_release> release;
  if (num_logits > kSmallWork) release.emplace();
  fn(params);
}

// An argument's element.
std::string at(const char* name, int64_t index);
std::string at(const char* name, int64_t i, int64_t j);

template <typename T>
std::string at(const char* name, const PerRow<T>& parameter, int64_t index) {
  return parameter.values ? at(name, index) : name;
}

struct Workspace {
  void* data = nullptr;
  int64_t num_bytes = 0;
};

// The workspace of `sampling_workspace`, as large as the call needs. batch: of verify, else 0.
Workspace check_workspace(Checker& check,
                          const TensorView& workspace,
                          const TensorView& logits,
                          int64_t batch);

void check_vocab(Checker& check, const Dim& vocab_size);

struct FilterViews {
  const TensorView &temperature, &top_k, &top_p, &min_p, &typical_p;
};

// Shapes, and the values of numbers; those of tensors are looked at where they are.
FilterArrays check_filters(Checker& check, const FilterViews& views, Dim& count);

// Values of row or request i, on cpu.
void check_filter_values(Checker& check, const FilterArrays& arrays, int64_t i);

// Which uniforms a row or request consumes.
void check_streams(Checker& check,
                   FilterArrays& filters,
                   const TensorView& seeds,
                   const TensorView& choice_index,
                   Dim& count);

// The fields of specops.sampling.LogitsProcessors in their order; none at all where it is None.
using ProcessorViews = std::vector<TensorView>;

// Checks shapes, and that what needs another field has it. batch: requests.
LogitsProcessors check_processors(Checker& check,
                                  const ProcessorViews& views,
                                  Dim& batch,
                                  Dim& output_rows,
                                  const Dim& vocab_size);

// Values of one request, on cpu. position: of its first token. Rows [first_row, end_row) are its.
void check_processor_values(Checker& check,
                            const LogitsProcessors& processors,
                            int64_t i,
                            int64_t position,
                            int64_t max_len,
                            int64_t first_row,
                            int64_t end_row);

// Of the tokens so far; 0 where there are none.
int64_t history_len(const ProcessorViews& views);

// The rows of request i in output_indptr, on cpu.
void check_indptr(Checker& check, const int32_t* indptr, int64_t i, int64_t capacity, int64_t rows);

// The tree of request i, on cpu.
void check_parents(Checker& check,
                   const int32_t* parents,
                   int64_t i,
                   int64_t num_drafts,
                   int64_t max_draft_tokens);

}  // namespace specops
