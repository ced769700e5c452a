// SPDX-License-Identifier: Apache-2.0
// gather_input_ids: looks up the token id of every row of a step, in known tokens or drafts.
#pragma once

#include <cstdint>

#include "common/error_flag.h"
#include "common/host_device.h"
#include "common/isa.h"
#include "common/token_at.h"

namespace specops {

struct GatherInputIdsParams {
  const int32_t* row_to_request;   // [rows]; -1 = padding
  const int32_t* positions;        // [rows]
  const int32_t* slots;            // [batch], row of the per-slot arrays
  const int32_t* token_ids;        // [num_slots, max_len], rows token_stride apart
  const int32_t* lens;             // [num_slots]
  const int32_t* draft_token_ids;  // [batch, capacity]; nullptr with a capacity of 0
  int32_t* out;                    // [rows], 0 for padding
  int64_t rows;
  int64_t batch;
  int64_t num_slots;
  int64_t max_len;
  int64_t token_stride;
  int64_t capacity;
  ErrorFlag error;
};

// The token id of a row; 0 for padding and for an invalid row.
struct InputId {
  int32_t token_id = 0;
  Fault fault;
};

SPECOPS_FAULT(3010, kGatherInputIdsRequest) =
    "gather_input_ids: row_to_request must be -1 or below batch{ = #}";
SPECOPS_FAULT(3011, kGatherInputIdsSlot) =
    "gather_input_ids: slots must be a row of lens{, below #}, where the request has rows";
SPECOPS_FAULT(3012, kGatherInputIdsLength) =
    "gather_input_ids: lens must be at least 0 and at most max_len{ = #}";
SPECOPS_FAULT(3013, kGatherInputIdsPosition) =
    "gather_input_ids: positions must be at least 0 and below lens{[#]} + k{ = #}";
SPECOPS_FAULT(3014, kGatherInputIdsTokenId) =
    "gather_input_ids: token_ids must be a token id, at least 0, where a row takes it{, as "
    "positions[#] does}";
SPECOPS_FAULT(3015, kGatherInputIdsDraftTokenId) =
    "gather_input_ids: draft_token_ids must be a token id, at least 0, where a row takes it{, as "
    "positions[#] does}";

SPECOPS_HOST_DEVICE InputId input_id(const GatherInputIdsParams& params, int64_t row) {
  int64_t request = params.row_to_request[row];
  if (request == -1) return {};
  if (request < 0 || request >= params.batch) {
    return {0, fault_at(kGatherInputIdsRequest, request, row).with(params.batch)};
  }
  int64_t slot = params.slots[request];
  if (slot < 0 || slot >= params.num_slots) {
    return {0, fault_at(kGatherInputIdsSlot, slot, request).with(params.num_slots)};
  }
  int64_t len = params.lens[slot];
  if (len < 0 || len > params.max_len) {
    return {0, fault_at(kGatherInputIdsLength, len, slot).with(params.max_len)};
  }
  int64_t position = params.positions[row];
  if (position < 0 || position - len >= params.capacity) {
    return {0, fault_at(kGatherInputIdsPosition, position, row).with(slot, len + params.capacity)};
  }
  int32_t token_id = token_at(params.token_ids + slot * params.token_stride,
                              len,
                              params.draft_token_ids + request * params.capacity,
                              params.capacity,
                              position);
  if (token_id >= 0) return {token_id, {}};
  if (position < len) {
    return {0, fault_at(kGatherInputIdsTokenId, token_id, slot, position).with(row)};
  }
  return {0, fault_at(kGatherInputIdsDraftTokenId, token_id, request, position - len).with(row)};
}

SPECOPS_DECLARE_CPU(gather_input_ids_cpu, GatherInputIdsParams);
SPECOPS_DECLARE_CUDA(gather_input_ids_cuda, GatherInputIdsParams);

}  // namespace specops
