// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "attention/rope_append_kv/rope_head_cpu.h"
#include "attention/rope_append_latent/rope_append_latent.h"
#include "common/parallel.h"

namespace specops::SPECOPS_ISA {
namespace {

// Rotates the kLatentRopeDim elements that follow the latent.
template <typename T>
void turn(const T* src, T* dst, const float* cos_sin, bool interleaved) {
  float x[kLatentRopeDim];
  for (int64_t i = 0; i < kLatentRopeDim; i += kLanes) store(x + i, load(src + i));
  rotate(x, cos_sin, kLatentRopeDim, interleaved);
  for (int64_t i = 0; i < kLatentRopeDim; i += kLanes) store(dst + i, load(x + i));
}

template <typename T>
void append_row(const RopeAppendLatentParams& params, int64_t row, const float* cos_sin) {
  const T* kv = static_cast<const T*>(params.kv) + row * params.kv_stride;
  T* slot = static_cast<T*>(params.latent_cache) + params.cache_slots[row] * kLatentKeyDim;
  turn(kv + kLatentDim, slot + kLatentDim, cos_sin, params.interleaved);
  if (params.norm_weight == nullptr) {
    std::memcpy(static_cast<void*>(slot), kv, kLatentDim * sizeof(T));
    return;
  }
  float latent[kLatentDim];
  for (int64_t i = 0; i < kLatentDim; i += kLanes) store(latent + i, load(kv + i));
  normalize(latent, static_cast<const T*>(params.norm_weight), kLatentDim, params.norm_eps);
  for (int64_t i = 0; i < kLatentDim; i += kLanes) store(slot + i, load(latent + i));
}

// Copies q to q_out and rotates its rotary part; writes norm(latent) and the rotated key to the
// cache. One pass per row.
// Cost:    each element read and written once; if q_out is q, only the rotary part of q.
// Assumes: each row contiguous; slots and positions in range; q_out may be q itself.
// Order:   elementwise except the norm's sum of squares: 16 lane sums, then one tree.
// Source:  DeepSeek-AI 2024 (DeepSeek-V2); Su et al. 2021 (RoPE).
// Threads: groups of rows of about 16,384 elements, so a decode step stays on the calling thread.
template <typename T>
void run(const RopeAppendLatentParams& params) {
  int64_t width = params.num_qo_heads * kLatentKeyDim;
  int64_t grain = 16384 / (width + kLatentKeyDim) + 1;
  parallel_for(params.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* q = static_cast<const T*>(params.q) + row * params.q_stride;
      T* q_out = static_cast<T*>(params.q_out) + row * width;
      int64_t position = params.positions[row];
      if (position < 0) {
        std::memset(static_cast<void*>(q_out), 0, width * sizeof(T));
        continue;
      }
      const float* cos_sin = params.cos_sin + position * kLatentRopeDim;
      if (q != q_out) std::memcpy(static_cast<void*>(q_out), q, width * sizeof(T));
      for (int64_t end_of_latent = kLatentDim; end_of_latent < width;
           end_of_latent += kLatentKeyDim) {
        turn(q_out + end_of_latent, q_out + end_of_latent, cos_sin, params.interleaved);
      }
      if (params.cache_slots[row] >= 0) append_row<T>(params, row, cos_sin);
    }
  });
}

}  // namespace

void rope_append_latent_cpu(const RopeAppendLatentParams& params) {
  switch (params.dtype) {
    case DType::kBFloat16:
      return run<bfloat16>(params);
    case DType::kFloat16:
      return run<float16>(params);
    default:
      return run<float>(params);
  }
}

}  // namespace specops::SPECOPS_ISA
