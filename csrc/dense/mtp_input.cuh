// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "dense/mtp_input.h"
#include "dense/norm_row.cuh"

namespace specops {

// Writes the row at position i: norm(embedding[token i + ahead]) next to norm(hidden state of
// position i). If there is no token or no state, its half is zeros.
// Grid:    x = 2 * rows: one block per half of a row (unbounded).
// Block:   32 to 1,024 threads, by the width alone, as in rms_norm.
// Smem:    one float per warp.
// Cost:    2 elements moved per element of out, norms from cache; memory-bound.
// Assumes: shapes checked by ops.cpp; data not aligned to 16 bytes is processed element by element.
// Order:   that of norm_row. A row's bits depend only on the row.
// Source:  DeepSeek-V3, section 2.2: tokens shifted, states not.
template <typename T>
__global__ void __launch_bounds__(kRmsNormMaxThreads)
    mtp_input_kernel(MtpInputParams params, bool aligned) {
  wait_for_previous_kernel();
  int64_t row = blockIdx.x / 2;
  bool of_state = (blockIdx.x % 2 == 0) == params.hidden_first;
  T* out = static_cast<T*>(params.out) + int64_t{blockIdx.x} * params.width;
  const T* x = nullptr;
  int64_t request = params.row_to_request[row];
  Fault fault = find_fault(params, row);
  if (request != -1 && !fault.found()) {
    int64_t slot = params.slots[request];
    int64_t position = params.positions[row];
    int64_t source = params.source_rows[row];
    int64_t token = token_ahead(params, slot, position);
    if (of_state) {
      x = source >= 0 ? static_cast<const T*>(params.hidden) + source * params.hidden_stride
                      : static_cast<const T*>(params.kept) + (-2 - source) * params.width;
    } else if (token >= 0 && !(params.mask_first_position && position == 0)) {
      x = static_cast<const T*>(params.embedding) + token * params.width;
    }
  }
  if (x == nullptr) {
    if (fault.found() && threadIdx.x == 0) report_error(params.error, fault.code);
    for (int64_t i = threadIdx.x; i < params.width; i += blockDim.x) out[i] = from_float<T>(0.0f);
    return;
  }
  const void* weight = of_state ? params.hidden_norm : params.embedding_norm;
  norm_row(x,
           static_cast<T*>(nullptr),
           static_cast<const T*>(weight),
           out,
           params.width,
           params.eps,
           aligned);
}

}  // namespace specops
