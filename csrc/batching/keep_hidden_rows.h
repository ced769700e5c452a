// SPDX-License-Identifier: Apache-2.0
// keep_hidden_rows: the target's states of a request's last positions, for rows that run again.
#pragma once

#include <cstdint>

#include "common/error_flag.h"
#include "common/isa.h"

namespace specops {

struct KeepHiddenRowsParams {
  const void* hidden;        // [rows, width], of the target's step; rows hidden_stride_bytes apart
  const int32_t* slots;      // [batch]; -1: keeps nothing
  const int32_t* qo_indptr;  // [batch + 1]
  const int32_t* kv_lens;    // [batch]
  const int32_t* lens;       // [num_slots], tokens known after the step
  void* kept;  // [num_slots * window, width]: position i at slot * window + i % window
  int64_t batch;
  int64_t num_slots;
  int64_t rows;
  int64_t window;
  int64_t row_bytes;
  int64_t hidden_stride_bytes;
  ErrorFlag error;
};

SPECOPS_DECLARE_CPU(keep_hidden_rows_cpu, KeepHiddenRowsParams);
SPECOPS_DECLARE_CUDA(keep_hidden_rows_cuda, KeepHiddenRowsParams);

}  // namespace specops
