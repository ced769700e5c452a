// SPDX-License-Identifier: Apache-2.0
// prepare_batch: computes every index array of one step over a ragged batch, in one pass.
#pragma once

#include <cstdint>

#include "common/error_flag.h"
#include "common/host_device.h"
#include "common/index_rule.h"
#include "common/isa.h"

namespace specops {

// Selects the rows of a request that produce logits.
enum class OutputMode : int32_t {
  kNone = 0,  // a prefill chunk that does not end the prompt
  kLast = 1,  // plain decoding, or the chunk that ends the prompt
  kAll = 2,   // verification
};

struct PrepareBatchParams {
  const int32_t* qo_lens;          // [batch], rows of each request in this step
  const int32_t* kv_lens;          // [batch], including this step's rows
  const int32_t* output_modes;     // [batch], OutputMode
  const int32_t* kv_indptr;        // [batch + 1], in pages; nullptr: no row has a cache slot
  const int32_t* kv_indices;       // [num_indices], page ids
  int32_t* qo_indptr;              // [batch + 1]
  int32_t* row_to_request;         // [total_rows]
  int32_t* positions;              // [total_rows]
  int64_t* cache_slots;            // [total_rows], all -1 without kv_indptr
  int32_t* output_indptr;          // [batch + 1]
  int32_t* output_rows;            // [num_output_rows]
  int32_t* output_row_to_request;  // [num_output_rows]
  int32_t* output_padding_offset;  // [num_output_rows]; nullptr if not requested
  int32_t* output_cum_offsets;     // [batch]; nullptr if output_padding_offset is
  int64_t batch;
  int64_t num_indices;
  int64_t total_rows;       // capacity; entries past the real rows become -1
  int64_t num_output_rows;  // capacity; entries past the real output rows become -1
  int64_t page_size;
  int64_t max_seq_len;  // row length of the padded view; unused without that view
  ErrorFlag error;
};

// Returns the number of a request's rows that produce logits.
SPECOPS_HOST_DEVICE int32_t num_outputs(OutputMode mode, int32_t qo_len) {
  if (mode == OutputMode::kNone || qo_len == 0) return 0;
  return mode == OutputMode::kLast ? 1 : qo_len;
}

SPECOPS_FAULT(3001, kPrepareBatchQoLens) = "prepare_batch: qo_lens must be at least 0";
SPECOPS_FAULT(3002, kPrepareBatchKvLens) =
    "prepare_batch: kv_lens must be at least qo_lens{[#]}{ = #} (it includes this step's rows)";
SPECOPS_FAULT(3003, kPrepareBatchOutputModes) =
    "prepare_batch: output_modes must be 0 (none), 1 (last) or 2 (all)";
SPECOPS_FAULT(3004, kPrepareBatchKvIndptr) =
    "prepare_batch: kv_indptr must be non-decreasing from 0, at least the entry before it{ = #} "
    "and at most the size of kv_indices{ = #}";
SPECOPS_FAULT(3005, kPrepareBatchPages) =
    "prepare_batch: kv_indptr must be wide enough for the pages of kv_lens{ = #}{, which end at #}";
SPECOPS_FAULT(3006,
              kPrepareBatchKvIndices) = "prepare_batch: kv_indices must be a page id, at least 0";
SPECOPS_FAULT(3007, kPrepareBatchTotalRows) =
    "prepare_batch: total_rows must be at least {#, }the sum of qo_lens";
SPECOPS_FAULT(3008, kPrepareBatchNumOutputRows) =
    "prepare_batch: num_output_rows must be at least {#, }the output rows asked for";
SPECOPS_FAULT(3009, kPrepareBatchMaxSeqLen) =
    "prepare_batch: max_seq_len must be at least the {# }output rows of each request{, as of "
    "request #}";

// Checks a request's lengths, mode and range of kv_indices. The page ids of its rows are checked
// with is_page_id.
SPECOPS_HOST_DEVICE Fault find_fault(const PrepareBatchParams& params, int64_t request) {
  int32_t qo_len = params.qo_lens[request];
  int32_t kv_len = params.kv_lens[request];
  int32_t mode = params.output_modes[request];
  if (qo_len < 0) return fault_at(kPrepareBatchQoLens, qo_len, request);
  if (kv_len < qo_len) {
    return fault_at(kPrepareBatchKvLens, kv_len, request).with(request, qo_len);
  }
  if (mode < 0 || mode > 2) return fault_at(kPrepareBatchOutputModes, mode, request);
  if (params.kv_indptr) {
    int32_t begin = params.kv_indptr[request], end = params.kv_indptr[request + 1];
    Fault fault = find_range_fault(kPrepareBatchKvIndptr, begin, end, request, params.num_indices);
    if (!fault.found() && qo_len > 0) {
      fault = find_pages_fault(kPrepareBatchPages, begin, end, request, params.page_size, kv_len);
    }
    if (fault.found()) return fault;
  }
  int32_t outputs = num_outputs(static_cast<OutputMode>(mode), qo_len);
  if (params.output_cum_offsets && outputs > params.max_seq_len) {
    return fault_at(kPrepareBatchMaxSeqLen, params.max_seq_len).with(outputs, request);
  }
  return {};
}

// Checks the capacities, given the rows of all requests.
SPECOPS_HOST_DEVICE Fault find_capacity_fault(const PrepareBatchParams& params,
                                              int64_t rows,
                                              int64_t outputs) {
  if (rows > params.total_rows) {
    return fault_at(kPrepareBatchTotalRows, params.total_rows).with(rows);
  }
  if (outputs > params.num_output_rows) {
    return fault_at(kPrepareBatchNumOutputRows, params.num_output_rows).with(outputs);
  }
  return {};
}

SPECOPS_DECLARE_CPU(prepare_batch_cpu, PrepareBatchParams);
SPECOPS_DECLARE_CUDA(prepare_batch_cuda, PrepareBatchParams);

}  // namespace specops
