// SPDX-License-Identifier: Apache-2.0
// Argument checks that the ops of the sampling family share. Rules about single values are in
// value_rule.h.
#pragma once

#include <optional>

#include "common/tensor_view.h"
#include "sampling/row/row_rule.h"
#include "sampling/row/value_rule.h"

namespace specops {

template <typename Params>
void run_on_cpu(void (*fn)(const Params&), const Params& params, int64_t num_logits) {
  constexpr int64_t kSmallWork = 32768;  // with less work, releasing the GIL does not pay off
  std::optional<pybind11::gil_scoped_release> release;
  if (num_logits > kSmallWork) release.emplace();
  fn(params);
}

struct Workspace {
  void* data = nullptr;
  int64_t num_bytes = 0;
};

// Checks that `workspace` is as large as the call needs. `batch` is the batch size for verify, and
// 0 for other ops.
Workspace check_workspace(Checker& check,
                          const TensorView& workspace,
                          const TensorView& logits,
                          int64_t batch);

void check_vocab(Checker& check, const Dim& vocab_size);

// The following functions convert arguments that are named tuples of specops.sampling, or None.

// Checks shapes, and the values of arguments that are plain numbers. Values in tensors are checked
// where they are read.
SamplingTensors check_sampling(Checker& check, SamplingOp op, Argument sampling, Dim& count);

// Checks shapes. Sets `batch` and `max_draft_tokens`.
Drafts check_drafts(Checker& check, Argument drafts, Dim& batch, Dim& max_draft_tokens);

// Checks shapes, and that fields that depend on each other are set together. `batch` is the number
// of requests.
LogitsProcessors check_processors(
    Checker& check, Argument processors, Dim& batch, Dim& output_rows, const Dim& vocab_size);

}  // namespace specops
