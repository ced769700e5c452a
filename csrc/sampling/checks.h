// SPDX-License-Identifier: Apache-2.0
// Argument checks shared by the ops of the sampling family; rules about values are in value_rule.h.
#pragma once

#include <array>
#include <optional>

#include "common/tensor_view.h"
#include "sampling/row/value_rule.h"

namespace specops {

template <typename Params>
void run_on_cpu(void (*fn)(const Params&), const Params& params, int64_t num_logits) {
  constexpr int64_t kSmallWork = 32768;  // with less work, releasing the GIL costs more than the op
  std::optional<pybind11::gil_scoped_release> release;
  if (num_logits > kSmallWork) release.emplace();
  fn(params);
}

struct Workspace {
  void* data = nullptr;
  int64_t num_bytes = 0;
};

// Checks that `workspace` is as large as the call needs. `batch` is verify's, else 0.
Workspace check_workspace(Checker& check,
                          const TensorView& workspace,
                          const TensorView& logits,
                          int64_t batch);

void check_vocab(Checker& check, const Dim& vocab_size);

struct FilterViews {
  const TensorView &temperature, &top_k, &top_p, &min_p, &typical_p;
};

// Checks shapes, and the values of plain numbers. Values in tensors are checked where they are
// read.
FilterArrays check_filters(Checker& check, SamplingOp op, const FilterViews& views, Dim& count);

// Checks the seeds and choice indices, which select the uniforms that a row or request consumes.
void check_streams(Checker& check,
                   FilterArrays& filters,
                   const TensorView& seeds,
                   const TensorView& choice_index,
                   Dim& count);

// Checks shapes, and that fields that depend on each other are set together. `processors` holds the
// fields of specops.sampling.LogitsProcessors in order, or is empty. `batch` counts requests.
LogitsProcessors check_processors(
    Checker& check, Argument processors, Dim& batch, Dim& output_rows, const Dim& vocab_size);

}  // namespace specops
