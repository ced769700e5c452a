// SPDX-License-Identifier: Apache-2.0
#include "batching/prepare_batch.h"

namespace specops::SPECOPS_ISA {
namespace {

template <typename T>
void fill_none(T* values, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) values[i] = -1;
}

// Writes the cache slots of one request's rows.
void fill_slots(const PrepareBatchParams& params,
                int64_t batch_idx,
                int64_t first_position,
                int32_t qo_len,
                int64_t* slots) {
  const int32_t* pages = params.kv_indices + params.kv_indptr[batch_idx];
  int64_t page = first_position / params.page_size;
  int64_t offset = first_position % params.page_size;
  for (int32_t i = 0; i < qo_len; ++i) {
    slots[i] = pages[page] * params.page_size + offset;
    if (++offset == params.page_size) {
      offset = 0;
      ++page;
    }
  }
}

}  // namespace

// Computes the index arrays of a step. Row i of request b has position = kv_len - qo_len + i, and
// slot = first slot of its page plus the offset in the page, or -1 without a page table. The output
// rows of a request are its last row or all of its rows. The padded view places the first output
// row of request b at b * max_seq_len.
// Cost:    40 bytes written per row, 4 read per page of this step's rows.
// Assumes: lengths, modes, page table and capacities checked by ops.cpp.
// Order:   integers only.
// Source:  FastDeploy's virtual padding: the padded tensor is never built, only its offsets.
// Threads: one, because a step's indices are a few hundred bytes.
void prepare_batch_cpu(const PrepareBatchParams& params) {
  int64_t row = 0;
  int64_t output = 0;
  params.qo_indptr[0] = 0;
  params.output_indptr[0] = 0;
  for (int64_t batch_idx = 0; batch_idx < params.batch; ++batch_idx) {
    int32_t request = static_cast<int32_t>(batch_idx);
    int32_t qo_len = params.qo_lens[batch_idx];
    int64_t first_position = int64_t{params.kv_lens[batch_idx]} - qo_len;
    for (int32_t i = 0; i < qo_len; ++i) {
      params.row_to_request[row + i] = request;
      params.positions[row + i] = static_cast<int32_t>(first_position + i);
    }
    if (params.kv_indptr) {
      fill_slots(params, batch_idx, first_position, qo_len, params.cache_slots + row);
    } else {
      fill_none(params.cache_slots, row, row + qo_len);
    }
    int32_t outputs = num_outputs(static_cast<OutputMode>(params.output_modes[batch_idx]), qo_len);
    // Number of rows of the padded view that the requests before this one leave unused.
    int32_t padding = static_cast<int32_t>(batch_idx * params.max_seq_len - output);
    for (int32_t i = 0; i < outputs; ++i) {
      params.output_rows[output + i] = static_cast<int32_t>(row + qo_len - outputs + i);
      params.output_row_to_request[output + i] = request;
      if (params.output_padding_offset) params.output_padding_offset[output + i] = padding;
    }
    if (params.output_cum_offsets) params.output_cum_offsets[batch_idx] = padding;
    row += qo_len;
    output += outputs;
    params.qo_indptr[batch_idx + 1] = static_cast<int32_t>(row);
    params.output_indptr[batch_idx + 1] = static_cast<int32_t>(output);
  }
  fill_none(params.row_to_request, row, params.total_rows);
  fill_none(params.positions, row, params.total_rows);
  fill_none(params.cache_slots, row, params.total_rows);
  fill_none(params.output_rows, output, params.num_output_rows);
  fill_none(params.output_row_to_request, output, params.num_output_rows);
  if (params.output_padding_offset) {
    fill_none(params.output_padding_offset, output, params.num_output_rows);
  }
}

}  // namespace specops::SPECOPS_ISA
