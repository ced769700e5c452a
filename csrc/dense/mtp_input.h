// SPDX-License-Identifier: Apache-2.0
// mtp_input: computes the input rows of an MTP module's projection: a normalized embedding next to
// a normalized hidden state.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/error_flag.h"
#include "common/host_device.h"
#include "common/isa.h"
#include "common/token_at.h"

namespace specops {

struct MtpInputParams {
  const int32_t* row_to_request;   // [rows]; -1: a row of zeros
  const int32_t* positions;        // [rows]
  const int32_t* source_rows;      // [rows], a row of hidden, or -2 - r for row r of kept
  const int32_t* slots;            // [batch]
  const int32_t* token_ids;        // [num_slots, max_len], rows are token_stride apart
  const int32_t* lens;             // [num_slots]
  const int32_t* draft_token_ids;  // [num_slots, capacity]
  const void* embedding;           // [vocab, width]
  const void* embedding_norm;      // [width]
  const void* hidden_norm;         // [width]
  const void* hidden;              // [hidden_rows, width], rows are hidden_stride apart
  const void* kept;                // [kept_rows, width]; may be nullptr
  void* out;                       // [rows, 2 * width]
  int64_t rows;
  int64_t batch;
  int64_t num_slots;
  int64_t max_len;
  int64_t token_stride;
  int64_t capacity;
  int64_t vocab;
  int64_t width;
  int64_t hidden_rows;
  int64_t hidden_stride;  // elements between rows
  int64_t kept_rows;
  int32_t ahead;  // index of the module: its row i takes token i + ahead
  float eps;
  bool hidden_first;         // the half of the hidden state comes first
  bool mask_first_position;  // position 0 gets zeros instead of its token's embedding
  DType dtype;               // of all floating-point tensors
  ErrorFlag error;
};

// Returns the token `ahead` positions after a row's position, from the known tokens or the drafts
// that follow them; -1 if there is none.
SPECOPS_HOST_DEVICE int32_t token_ahead(const MtpInputParams& params,
                                        int64_t slot,
                                        int64_t position) {
  int64_t index = position + params.ahead;
  return token_at(params.token_ids + slot * params.token_stride,
                  params.lens[slot],
                  params.draft_token_ids + slot * params.capacity,
                  params.capacity,
                  index);
}

SPECOPS_FAULT(1002,
              kMtpInputRequest) = "mtp_input: rows.row_to_request must be -1 or below batch{ = #}";
SPECOPS_FAULT(1003, kMtpInputSlot) =
    "mtp_input: tokens.slots must be a row of tokens.lens{, below #}, where the request has rows";
SPECOPS_FAULT(1004, kMtpInputLength) =
    "mtp_input: tokens.lens must be at least 0 and at most max_len{ = #}";
SPECOPS_FAULT(1005, kMtpInputPosition) = "mtp_input: rows.positions must be at least 0";
SPECOPS_FAULT(1006, kMtpInputSourceRow) =
    "mtp_input: rows.source_rows must be a row of hidden{, below #}, or -2 - a row of kept{, of #}";
SPECOPS_FAULT(1007, kMtpInputTokenId) =
    "mtp_input: tokens.token_ids must be -1 or in [0, vocab{ = #}) where a row takes them";
SPECOPS_FAULT(1008, kMtpInputDraftTokenId) =
    "mtp_input: tokens.draft_token_ids must be -1 or in [0, vocab{ = #}) where a row takes them";

// Checks a row. Padding rows are valid, and so are rows whose token is not known yet.
SPECOPS_HOST_DEVICE Fault find_fault(const MtpInputParams& params, int64_t row) {
  int64_t request = params.row_to_request[row];
  if (request == -1) return {};
  if (request < 0 || request >= params.batch) {
    return fault_at(kMtpInputRequest, request, row).with(params.batch);
  }
  int64_t slot = params.slots[request];
  if (slot < 0 || slot >= params.num_slots) {
    return fault_at(kMtpInputSlot, slot, request).with(params.num_slots);
  }
  int64_t len = params.lens[slot];
  if (len < 0 || len > params.max_len) {
    return fault_at(kMtpInputLength, len, slot).with(params.max_len);
  }
  int64_t position = params.positions[row];
  if (position < 0) return fault_at(kMtpInputPosition, position, row);
  int64_t source = params.source_rows[row];
  if (source == -1 || source >= params.hidden_rows || -2 - source >= params.kept_rows) {
    return fault_at(kMtpInputSourceRow, source, row).with(params.hidden_rows, params.kept_rows);
  }
  int64_t token = token_ahead(params, slot, position);
  if (token >= -1 && token < params.vocab) return {};
  int64_t place = position + params.ahead;
  Fault fault = place < len ? fault_at(kMtpInputTokenId, token, slot, place)
                            : fault_at(kMtpInputDraftTokenId, token, slot, place - len);
  return fault.with(params.vocab);
}

SPECOPS_DECLARE_CPU(mtp_input_cpu, MtpInputParams);
SPECOPS_DECLARE_CUDA(mtp_input_cuda, MtpInputParams);

}  // namespace specops
