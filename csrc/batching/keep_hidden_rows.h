// SPDX-License-Identifier: Apache-2.0
// keep_hidden_rows: stores the target's states of a request's last positions, for rows that run
// again.
#pragma once

#include <cstdint>

#include "common/error_flag.h"
#include "common/host_device.h"
#include "common/index_rule.h"
#include "common/isa.h"

namespace specops {

struct KeepHiddenRowsParams {
  const void* hidden;    // [rows, width], of the target's step; rows are hidden_stride_bytes apart
  const int32_t* slots;  // [batch]; -1: keep nothing
  const int32_t* qo_indptr;  // [batch + 1], row offsets
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

SPECOPS_FAULT(3033, kKeepHiddenRowsSlots) =
    "keep_hidden_rows: slots must be -1 or a row of lens{, below #}";
SPECOPS_FAULT(3034, kKeepHiddenRowsQoIndptr) =
    "keep_hidden_rows: qo_indptr must be non-decreasing from 0, at least the entry before it{ = #} "
    "and at most the rows of hidden{, #}";
SPECOPS_FAULT(3035, kKeepHiddenRowsKvLens) =
    "keep_hidden_rows: kv_lens must be at least the request's {# }rows by qo_indptr";

SPECOPS_HOST_DEVICE Fault find_fault(const KeepHiddenRowsParams& params, int64_t request) {
  int32_t slot = params.slots[request];
  if (slot == -1) return {};
  int32_t first_row = params.qo_indptr[request], end_row = params.qo_indptr[request + 1];
  int32_t kv_len = params.kv_lens[request];
  Fault fault = find_slot_fault(kKeepHiddenRowsSlots, slot, request, params.num_slots);
  if (fault.found()) return fault;
  fault = find_range_fault(kKeepHiddenRowsQoIndptr, first_row, end_row, request, params.rows);
  if (fault.found() || kv_len >= end_row - first_row) return fault;
  return fault_at(kKeepHiddenRowsKvLens, kv_len, request).with(end_row - first_row);
}

SPECOPS_DECLARE_CPU(keep_hidden_rows_cpu, KeepHiddenRowsParams);
SPECOPS_DECLARE_CUDA(keep_hidden_rows_cuda, KeepHiddenRowsParams);

}  // namespace specops
