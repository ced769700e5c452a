// SPDX-License-Identifier: Apache-2.0
// prepare_batch: every index array of one step over a ragged batch, in one pass.
#pragma once

#include <cstdint>

#include "common/error_flag.h"
#include "common/host_device.h"
#include "common/isa.h"

namespace specops {

// Which rows of a request produce logits.
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
  int32_t* output_padding_offset;  // [num_output_rows], may be nullptr
  int32_t* output_cum_offsets;     // [batch], nullptr when output_padding_offset is
  int64_t batch;
  int64_t num_indices;
  int64_t total_rows;       // capacity; entries past the real rows become -1
  int64_t num_output_rows;  // capacity, likewise
  int64_t page_size;
  int64_t max_seq_len;  // row length of the padded view; unused without it
  ErrorFlag error;
};

// How many of a request's rows produce logits.
SPECOPS_HOST_DEVICE int32_t num_outputs(OutputMode mode, int32_t qo_len) {
  if (mode == OutputMode::kNone || qo_len == 0) return 0;
  return mode == OutputMode::kLast ? 1 : qo_len;
}

// What is wrong with a request's lengths, mode or place in kv_indices; the page ids are another
// matter, of the rows that lie in them.
SPECOPS_HOST_DEVICE ErrorCode fault_of(const PrepareBatchParams& params, int64_t request) {
  int32_t qo_len = params.qo_lens[request];
  int32_t kv_len = params.kv_lens[request];
  int32_t mode = params.output_modes[request];
  if (qo_len < 0) return ErrorCode::kPrepareBatchQoLens;
  if (kv_len < qo_len) return ErrorCode::kPrepareBatchKvLens;
  if (mode < 0 || mode > 2) return ErrorCode::kPrepareBatchOutputModes;
  if (params.kv_indptr) {
    int64_t first_page = params.kv_indptr[request];
    int64_t num_pages = params.kv_indptr[request + 1] - first_page;
    if (first_page < 0 || num_pages < 0 || first_page + num_pages > params.num_indices ||
        (qo_len > 0 && num_pages * params.page_size < kv_len)) {
      return ErrorCode::kPrepareBatchKvIndptr;
    }
  }
  if (params.output_cum_offsets &&
      num_outputs(static_cast<OutputMode>(mode), qo_len) > params.max_seq_len) {
    return ErrorCode::kPrepareBatchMaxSeqLen;
  }
  return ErrorCode::kNone;
}

SPECOPS_DECLARE_CPU(prepare_batch_cpu, PrepareBatchParams);
SPECOPS_DECLARE_CUDA(prepare_batch_cuda, PrepareBatchParams);

}  // namespace specops
