// SPDX-License-Identifier: Apache-2.0
// Validity rules for indices that ops of several families share. The functions take values instead
// of pointers, so that a kernel can load everything it needs at once. Plain C++ and CUDA.
#pragma once

#include <cstdint>

#include "common/error_flag.h"
#include "common/host_device.h"

namespace specops {

// Checks the entries idx and idx + 1 of an indptr: both must be in 0 .. size, and in ascending
// order. The entries are compared, not subtracted, because the difference of invalid values may
// overflow an int.
SPECOPS_HOST_DEVICE Fault find_range_fault(
    ErrorCode code, int32_t begin, int32_t end, int64_t idx, int64_t size = INT32_MAX) {
  if (begin < 0) return fault_at(code, begin, idx).with(-1, size);
  if (end < begin || end > size) return fault_at(code, end, idx + 1).with(begin, size);
  return {};
}

// Checks that a request's pages [begin, end) have enough slots for its first `tokens` tokens.
SPECOPS_HOST_DEVICE Fault find_pages_fault(
    ErrorCode code, int64_t begin, int64_t end, int64_t idx, int64_t page_size, int64_t tokens) {
  if ((end - begin) * page_size >= tokens) return {};
  return fault_at(code, end, idx + 1).with(tokens, begin + (tokens + page_size - 1) / page_size);
}

// Checks the KV length of a request that has `rows` rows in this step: against these rows and
// against the slots of its pages.
SPECOPS_HOST_DEVICE Fault
find_kv_len_fault(ErrorCode code, int32_t kv_len, int64_t idx, int64_t rows, int64_t slots) {
  if (kv_len >= rows && kv_len <= slots) return {};
  return fault_at(code, kv_len, idx).with(rows, slots);
}

// Returns whether a page id is not negative. An OR of several page ids may be passed: it passes the
// check exactly if all of them do.
SPECOPS_HOST_DEVICE bool is_page_id(int32_t page_id) { return page_id >= 0; }

SPECOPS_HOST_DEVICE Fault find_page_id_fault(ErrorCode code, int32_t page_id, int64_t place) {
  if (is_page_id(page_id)) return {};
  return fault_at(code, page_id, place);
}

// Returns whether page_id is valid for caches of num_pages pages.
SPECOPS_HOST_DEVICE bool is_page_of(int64_t num_pages, int32_t page_id) {
  return page_id >= 0 && page_id < num_pages;
}

// Checks an index into per-slot arrays; -1 means that the request has no slot.
SPECOPS_HOST_DEVICE Fault find_slot_fault(ErrorCode code,
                                          int32_t slot,
                                          int64_t idx,
                                          int64_t num_slots) {
  if (slot >= -1 && slot < num_slots) return {};
  return fault_at(code, slot, idx).with(num_slots);
}

// Returns whether `parent` may be the parent of `node` in a draft tree; -1 is the root.
SPECOPS_HOST_DEVICE bool is_parent(int32_t parent, int32_t node) {
  return parent >= -1 && parent < node;
}

}  // namespace specops
