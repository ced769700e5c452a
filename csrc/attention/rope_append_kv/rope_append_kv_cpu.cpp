// SPDX-License-Identifier: Apache-2.0
#include "attention/kv_element.h"
#include "attention/rope_append_kv/rope_append_kv.h"
#include "attention/rope_append_kv/rope_head_cpu.h"
#include "common/parallel.h"

namespace specops::SPECOPS_ISA {
namespace {

constexpr int64_t kMaxHeadDim = 512;

template <typename T>
void turn_heads(const T* src,
                T* dst,
                int64_t num_heads,
                const void* norm_weight,
                const float* cos_sin,
                const RopeAppendKvParams& params) {
  int64_t head_dim = params.head_dim;
  float head[kMaxHeadDim + kLanes];
  for (int64_t head_idx = 0; head_idx < num_heads; ++head_idx) {
    const T* x = src + head_idx * head_dim;
    T* y = dst + head_idx * head_dim;
    for (int64_t i = 0; i < head_dim; i += kLanes) {
      int n = static_cast<int>(head_dim - i);
      store_partial(head + i, load_partial(x + i, n), n);
    }
    if (norm_weight != nullptr) {
      normalize(head, static_cast<const T*>(norm_weight), head_dim, params.norm_eps);
    }
    rotate(head, cos_sin, params.rotary_dim, params.interleaved);
    for (int64_t i = 0; i < head_dim; i += kLanes) {
      int n = static_cast<int>(head_dim - i);
      store_partial(y + i, load_partial(head + i, n), n);
    }
  }
}

// Quantizes one head to elements of an 8-bit cache and writes its scale.
template <typename T, typename Element>
void quantize_head(const T* src, Element* dst, float* scale, int64_t head_dim) {
  float x[kMaxHeadDim];
  uint32_t largest = 0;
  for (int64_t i = 0; i < head_dim; ++i) {
    x[i] = to_float(src[i]);
    uint32_t magnitude = magnitude_bits(x[i]);
    largest = magnitude > largest ? magnitude : largest;
  }
  *scale = scale_of<Element>(largest);
  for (int64_t i = 0; i < head_dim; ++i) dst[i] = quantized<Element>(x[i], *scale);
}

// Writes k and v of one row to 8-bit caches: quantizes the values that an unquantized cache would
// hold.
template <typename T, typename Element>
void append_quantized(const RopeAppendKvParams& params,
                      int64_t row,
                      int64_t slot,
                      const float* cos_sin) {
  int64_t head_dim = params.head_dim;
  const T* k = static_cast<const T*>(params.k) + row * params.k_stride;
  const T* v = static_cast<const T*>(params.v) + row * params.v_stride;
  for (int64_t head = 0; head < params.num_kv_heads; ++head) {
    T turned[kMaxHeadDim];
    turn_heads(k + head * head_dim, turned, 1, params.k_norm_weight, cos_sin, params);
    int64_t place = slot * params.num_kv_heads + head;
    quantize_head(turned,
                  static_cast<Element*>(params.k_cache) + place * head_dim,
                  params.k_scales + place,
                  head_dim);
    quantize_head(v + head * head_dim,
                  static_cast<Element*>(params.v_cache) + place * head_dim,
                  params.v_scales + place,
                  head_dim);
  }
}

// Computes q_out = rope(norm(q)) and writes rope(norm(k)) and v to the caches, in one pass over a
// row of q, k and v.
// Cost:    each element read and written once; memory-bound.
// Assumes: each row contiguous; slots and positions in range; q_out may be q itself.
// Order:   elementwise except the norm's sum of squares: 16 lane sums, then one tree. A scale of an
//          8-bit cache is derived from the largest magnitude of its head, in any order.
// Source:  Su et al. 2021 (RoPE); per-head norm as in Qwen3.
// Threads: groups of rows of about 16,384 elements, so a decode step stays on the calling thread.
template <typename T>
void run(const RopeAppendKvParams& params) {
  int64_t q_width = params.num_qo_heads * params.head_dim;
  int64_t kv_width = params.num_kv_heads * params.head_dim;
  int64_t grain = 16384 / (q_width + 2 * kv_width) + 1;
  parallel_for(params.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      T* q_out = static_cast<T*>(params.q_out) + row * q_width;
      int64_t position = params.positions[row];
      if (position < 0) {
        std::memset(static_cast<void*>(q_out), 0, q_width * sizeof(T));
        continue;
      }
      const float* cos_sin = params.cos_sin + position * params.rotary_dim;
      turn_heads(static_cast<const T*>(params.q) + row * params.q_stride,
                 q_out,
                 params.num_qo_heads,
                 params.q_norm_weight,
                 cos_sin,
                 params);
      int64_t slot = params.cache_slots[row];
      if (slot < 0) continue;
      if (params.cache_dtype == DType::kInt8) {
        append_quantized<T, KvInt8>(params, row, slot, cos_sin);
        continue;
      }
      if (params.cache_dtype == DType::kFloat8E4M3) {
        append_quantized<T, KvE4M3>(params, row, slot, cos_sin);
        continue;
      }
      turn_heads(static_cast<const T*>(params.k) + row * params.k_stride,
                 static_cast<T*>(params.k_cache) + slot * kv_width,
                 params.num_kv_heads,
                 params.k_norm_weight,
                 cos_sin,
                 params);
      std::memcpy(static_cast<T*>(params.v_cache) + slot * kv_width,
                  static_cast<const T*>(params.v) + row * params.v_stride,
                  kv_width * sizeof(T));
    }
  });
}

}  // namespace

void rope_append_kv_cpu(const RopeAppendKvParams& params) {
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
