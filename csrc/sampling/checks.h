// SPDX-License-Identifier: Apache-2.0
// Argument checks that the ops of the sampling family share; rules about values are in value_rule.h.
#pragma once

#include <array>
#include <optional>

#include "common/tensor_view.h"
#include "sampling/row/filters.h"
#include "sampling/row/logits_processors.h"

namespace specops {

template <typename Params>
void run_on_cpu(void (*fn)(const Params&), const Params& params, int64_t num_logits) {
  constexpr int64_t kSmallWork = 32768;  // below it an op is over before releasing the GIL pays
  std::optional<pybind11::gil_scoped_release> release;
  if (num_logits > kSmallWork) release.emplace();
  fn(params);
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
FilterArrays check_filters(Checker& check, SamplingOp op, const FilterViews& views, Dim& count);

// Which uniforms a row or request consumes.
void check_streams(Checker& check,
                   FilterArrays& filters,
                   const TensorView& seeds,
                   const TensorView& choice_index,
                   Dim& count);

// Checks shapes, and that what needs another field has it. processors: the fields of
// specops.sampling.LogitsProcessors in their order, or none at all. batch: requests.
LogitsProcessors check_processors(
    Checker& check, Argument processors, Dim& batch, Dim& output_rows, const Dim& vocab_size);

}  // namespace specops
