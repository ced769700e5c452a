// SPDX-License-Identifier: Apache-2.0
// gather_output_rows: copies the hidden rows that need logits to a dense array for the LM head.
#pragma once

#include <cstdint>

#include "common/error_flag.h"
#include "common/host_device.h"
#include "common/isa.h"

namespace specops {

struct GatherOutputRowsParams {
  const void* hidden;          // [rows, width]; rows are hidden_stride_bytes apart
  const int32_t* output_rows;  // [num_output_rows], a row of hidden or -1
  void* out;                   // [num_output_rows, width], contiguous
  int64_t rows;
  int64_t num_output_rows;
  int64_t row_bytes;
  int64_t hidden_stride_bytes;
  ErrorFlag error;
};

SPECOPS_FAULT(3016, kGatherOutputRowsRow) =
    "gather_output_rows: output_rows must be -1 or a row of hidden{, below #}";

SPECOPS_HOST_DEVICE Fault find_fault(const GatherOutputRowsParams& params, int64_t output) {
  int32_t row = params.output_rows[output];
  if (row >= -1 && row < params.rows) return {};
  return fault_at(kGatherOutputRowsRow, row, output).with(params.rows);
}

SPECOPS_DECLARE_CPU(gather_output_rows_cpu, GatherOutputRowsParams);
SPECOPS_DECLARE_CUDA(gather_output_rows_cuda, GatherOutputRowsParams);

}  // namespace specops
