// SPDX-License-Identifier: Apache-2.0
// rope_append_latent: rotate the rotary part of q and k, and write latents and keys to the paged
// cache.
#pragma once

#include <cstdint>

#include "attention/latent.h"
#include "common/cuda_stream.h"
#include "common/dtype.h"
#include "common/error_flag.h"
#include "common/host_device.h"
#include "common/isa.h"

namespace specops {

struct RopeAppendLatentParams {
  const void* q;               // [rows, num_qo_heads, kLatentKeyDim], rows q_stride apart
  const void* kv;              // [rows, kLatentKeyDim], rows kv_stride apart
  void* q_out;                 // [rows, num_qo_heads, kLatentKeyDim], contiguous; may be q
  void* latent_cache;          // [num_pages, page_size, 1, kLatentKeyDim]
  const int64_t* cache_slots;  // [rows]; -1: do not write the row's latent and key
  const int32_t* positions;    // [rows]; -1: padding row
  const float* cos_sin;        // [max_positions, kLatentRopeDim]: cos of each pair, then sin
  const void* norm_weight;     // [kLatentDim]; may be nullptr
  int64_t rows;
  int64_t num_qo_heads;
  int64_t num_slots;  // slots in the cache
  int64_t max_positions;
  int64_t q_stride;
  int64_t kv_stride;
  float norm_eps;
  bool interleaved;  // pairs are adjacent; otherwise element i of each half of the rotary part
  DType dtype;       // dtype of all but cos_sin: float32, bfloat16 or float16
  ErrorFlag error;   // CUDA: reports slots and positions out of range
};

SPECOPS_FAULT(2015, kLatentSlot) =
    "rope_append_latent: cache_slots must be -1 or in [0, num_pages * page_size{=#})";
SPECOPS_FAULT(2016, kLatentPosition) =
    "rope_append_latent: positions must be in [0, max_positions{=#}), or -1 where cache_slots is "
    "-1";

SPECOPS_HOST_DEVICE Fault find_fault(const RopeAppendLatentParams& params, int64_t row) {
  int64_t slot = params.cache_slots[row];
  int32_t position = params.positions[row];
  if (slot < -1 || slot >= params.num_slots) {
    return fault_at(kLatentSlot, slot, row).with(params.num_slots);
  }
  if (position < (slot == -1 ? -1 : 0) || position >= params.max_positions) {
    return fault_at(kLatentPosition, position, row).with(params.max_positions);
  }
  return {};
}

SPECOPS_DECLARE_CPU(rope_append_latent_cpu, RopeAppendLatentParams);
SPECOPS_DECLARE_CUDA(rope_append_latent_cuda, RopeAppendLatentParams);

}  // namespace specops
