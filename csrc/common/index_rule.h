// SPDX-License-Identifier: Apache-2.0
// The rules about indices that ops of several families share. They take values, so that a kernel
// may read all it needs at once. Plain C++ and CUDA.
#pragma once

#include <cstdint>

#include "common/error_flag.h"
#include "common/host_device.h"

namespace specops {

// Of entries idx and idx + 1 of an indptr: both lie in 0 .. size, in order. Compared, not
// subtracted: the difference of wrong values may not fit an int.
SPECOPS_HOST_DEVICE Fault
fault_of_range(ErrorCode code, int32_t begin, int32_t end, int64_t idx, int64_t size = INT32_MAX) {
  if (begin < 0) return fault_at(code, begin, idx).with(-1, size);
  if (end < begin || end > size) return fault_at(code, end, idx + 1).with(begin, size);
  return {};
}

// Of a request with such a range of pages, whose first `tokens` tokens lie in them.
SPECOPS_HOST_DEVICE Fault fault_of_pages(
    ErrorCode code, int64_t begin, int64_t end, int64_t idx, int64_t page_size, int64_t tokens) {
  if ((end - begin) * page_size >= tokens) return {};
  return fault_at(code, end, idx + 1).with(tokens, begin + (tokens + page_size - 1) / page_size);
}

// The same as a rule about the length of a request with so many rows in this step.
SPECOPS_HOST_DEVICE Fault
fault_of_kv_len(ErrorCode code, int32_t kv_len, int64_t idx, int64_t rows, int64_t slots) {
  if (kv_len >= rows && kv_len <= slots) return {};
  return fault_at(code, kv_len, idx).with(rows, slots);
}

// An OR of page ids is one where they all are.
SPECOPS_HOST_DEVICE bool is_page_id(int32_t page_id) { return page_id >= 0; }

SPECOPS_HOST_DEVICE Fault fault_of_page_id(ErrorCode code, int32_t page_id, int64_t place) {
  if (is_page_id(page_id)) return {};
  return fault_at(code, page_id, place);
}

// A page id with caches of so many pages.
SPECOPS_HOST_DEVICE bool is_page_of(int64_t num_pages, int32_t page_id) {
  return page_id >= 0 && page_id < num_pages;
}

// A row of per-slot arrays, or -1: none.
SPECOPS_HOST_DEVICE Fault fault_of_slot(ErrorCode code,
                                        int32_t slot,
                                        int64_t idx,
                                        int64_t num_slots) {
  if (slot >= -1 && slot < num_slots) return {};
  return fault_at(code, slot, idx).with(num_slots);
}

// -1: the root.
SPECOPS_HOST_DEVICE bool is_parent(int32_t parent, int32_t node) {
  return parent >= -1 && parent < node;
}

}  // namespace specops
