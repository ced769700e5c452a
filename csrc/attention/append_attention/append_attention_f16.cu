// SPDX-License-Identifier: Apache-2.0
#include "attention/append_attention/cuda/form.cuh"

namespace specops {

AttentionForm attention_form_f16(const AppendAttentionParams& params,
                                 int64_t rows,
                                 int64_t most_rows) {
  return form_for<float16>(params, rows, most_rows);
}

}  // namespace specops
