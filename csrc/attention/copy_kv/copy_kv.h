// SPDX-License-Identifier: Apache-2.0
// copy_kv: copy the keys and values of tokens to other slots.
#pragma once

#include <cstdint>

#include "common/error_flag.h"
#include "common/host_device.h"
#include "common/isa.h"

namespace specops {

struct CopyKvParams {
  void* k_cache;              // [num_pages, page_size, num_kv_heads, head_dim]
  void* v_cache;              // same shape as k_cache; nullptr if there is only one cache
  const int64_t* from_slots;  // [copies]
  const int64_t* to_slots;    // [copies]; -1: skip this copy
  int64_t copies;
  int64_t num_slots;   // slots in a cache
  int64_t slot_bytes;  // bytes of one token in one cache
  ErrorFlag error;
};

SPECOPS_HOST_DEVICE int num_caches(const CopyKvParams& params) {
  return params.v_cache == nullptr ? 1 : 2;
}

SPECOPS_FAULT(2013, kCopyKvFromSlots) =
    "copy_kv: from_slots must be in [0, num_pages * page_size{ = #}) where a token is copied";
SPECOPS_FAULT(2014,
              kCopyKvToSlots) = "copy_kv: to_slots must be -1 or below num_pages * page_size{ = #}";

SPECOPS_HOST_DEVICE Fault find_fault(const CopyKvParams& params, int64_t copy_idx) {
  int64_t from = params.from_slots[copy_idx], to = params.to_slots[copy_idx];
  if (to == -1) return {};
  if (to < 0 || to >= params.num_slots) {
    return fault_at(kCopyKvToSlots, to, copy_idx).with(params.num_slots);
  }
  if (from < 0 || from >= params.num_slots) {
    return fault_at(kCopyKvFromSlots, from, copy_idx).with(params.num_slots);
  }
  return {};
}

SPECOPS_DECLARE_CPU(copy_kv_cpu, CopyKvParams);
SPECOPS_DECLARE_CUDA(copy_kv_cuda, CopyKvParams);

}  // namespace specops
