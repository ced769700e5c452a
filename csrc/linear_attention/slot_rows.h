// SPDX-License-Identifier: Apache-2.0
// The rows of a request in a step, and the slot that stores the states of its earlier rows; used by
// all ops of this folder.
//
// The state after position i is stored at i % window of the slot. A step therefore finds the state
// before its first row even if later rows were rejected, and nothing has to be rolled back.
#pragma once

#include <cstdint>

#include "common/error_flag.h"
#include "common/host_device.h"
#include "common/index_rule.h"

namespace specops {

struct SlotRows {
  const int32_t* slots;      // [batch]; -1: the request has no slot, and its rows become zeros
  const int32_t* qo_indptr;  // [batch + 1]
  const int32_t* kv_lens;    // [batch], including this step's rows
  int64_t batch;
  int64_t num_slots;
  int64_t window;  // positions per slot
  int64_t rows;
};

// Slot and rows of one request in a step.
struct SlotRange {
  int64_t slot;   // -1: rows become zeros
  int64_t first;  // first row
  int64_t end;    // end row
  int64_t begin;  // absolute position of the first row
};

// Returns the rows of a request. Request number `batch` stands for the padding rows after all
// requests.
SPECOPS_HOST_DEVICE SlotRange range_of(const SlotRows& rows, int64_t request) {
  int64_t first = rows.qo_indptr[request];
  if (request == rows.batch) return {-1, first, rows.rows, 0};
  int64_t end = rows.qo_indptr[request + 1];
  return {rows.slots[request], first, end, rows.kv_lens[request] - (end - first)};
}

// Checks request `request`, which may be `batch` (the padding rows). Returns a fault with one of
// the three codes.
SPECOPS_HOST_DEVICE Fault find_fault(const SlotRows& rows,
                                     int64_t request,
                                     ErrorCode slots,
                                     ErrorCode qo_indptr,
                                     ErrorCode kv_lens) {
  int32_t first = rows.qo_indptr[request];
  if (request == rows.batch) {
    int32_t before = request > 0 ? rows.qo_indptr[request - 1] : 0;
    return find_range_fault(qo_indptr, before, first, request - 1, rows.rows);
  }
  Fault fault = find_slot_fault(slots, rows.slots[request], request, rows.num_slots);
  if (fault.found()) return fault;
  int32_t end = rows.qo_indptr[request + 1], kv_len = rows.kv_lens[request];
  fault = find_range_fault(qo_indptr, first, end, request, rows.rows);
  if (fault.found() || kv_len >= end - first) return fault;
  return fault_at(kv_lens, kv_len, request).with(end - first);
}

}  // namespace specops
