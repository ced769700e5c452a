// SPDX-License-Identifier: Apache-2.0
// rope_append_kv: rotate q and k, and write k and v into the paged cache.
#pragma once

#include <cstdint>

#include "common/cuda_stream.h"
#include "common/dtype.h"
#include "common/error_flag.h"
#include "common/host_device.h"
#include "common/isa.h"

namespace specops {

struct RopeAppendKvParams {
  const void* q;               // [rows, num_qo_heads, head_dim], rows q_stride apart
  const void* k;               // [rows, num_kv_heads, head_dim], rows k_stride apart
  const void* v;               // [rows, num_kv_heads, head_dim], rows v_stride apart
  void* q_out;                 // [rows, num_qo_heads, head_dim], contiguous
  void* k_cache;               // [num_pages, page_size, num_kv_heads, head_dim]
  void* v_cache;               // same shape as k_cache
  const int64_t* cache_slots;  // [rows]; -1: do not write the row's k and v
  const int32_t* positions;    // [rows]; -1: padding row
  const float* cos_sin;        // [max_positions, rotary_dim]: cos of each pair, then sin
  const void* q_norm_weight;   // [head_dim]; may be nullptr
  const void* k_norm_weight;   // [head_dim]; may be nullptr
  int64_t rows;
  int64_t num_qo_heads;
  int64_t num_kv_heads;
  int64_t head_dim;    // at most 512
  int64_t rotary_dim;  // even, at most head_dim
  int64_t num_slots;   // slots in each cache
  int64_t max_positions;
  int64_t q_stride;
  int64_t k_stride;
  int64_t v_stride;
  float norm_eps;
  bool interleaved;   // pairs are adjacent; otherwise element i of each half of the rotary part
  DType dtype;        // dtype of q, k, v, q_out, norm weights: float32, bfloat16 or float16
  DType cache_dtype;  // `dtype`, int8 or float8_e4m3fn
  ErrorFlag error;    // CUDA: reports slots and positions out of range
  float* k_scales;    // [num_pages, page_size, num_kv_heads]; nullptr if the caches have `dtype`
  float* v_scales;    // same shape as k_scales
};

SPECOPS_FAULT(2001, kRopeSlot) =
    "rope_append_kv: cache_slots must be -1 or in [0, num_pages * page_size{=#})";
SPECOPS_FAULT(2002, kRopePosition) =
    "rope_append_kv: positions must be in [0, max_positions{=#}), or -1 where cache_slots is -1";

SPECOPS_HOST_DEVICE Fault find_fault(const RopeAppendKvParams& params, int64_t row) {
  int64_t slot = params.cache_slots[row];
  int32_t position = params.positions[row];
  if (slot < -1 || slot >= params.num_slots) {
    return fault_at(kRopeSlot, slot, row).with(params.num_slots);
  }
  if (position < (slot == -1 ? -1 : 0) || position >= params.max_positions) {
    return fault_at(kRopePosition, position, row).with(params.max_positions);
  }
  return {};
}

SPECOPS_DECLARE_CPU(rope_append_kv_cpu, RopeAppendKvParams);
SPECOPS_DECLARE_CUDA(rope_append_kv_cuda, RopeAppendKvParams);

}  // namespace specops
