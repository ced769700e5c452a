// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "attention/kv_element.h"
#include "attention/rope_append_kv/rope_append_kv.h"
#include "common/device.cuh"

namespace specops {

constexpr int kRopeThreads = 128;
// Consecutive elements of a head per lane: as many as put heads of 256 and of 512 on 32 lanes.
constexpr int kRopeChunk = 8, kLargeRopeChunk = 16;

// Division of a launch among lanes and groups of lanes. The results do not depend on it.
struct RopeAppendKvGrid {
  int lanes;           // lanes per head: a power of two, lanes * kChunk >= head_dim
  int groups_per_row;  // groups of lanes per row, among which the row's heads are divided
};

// One lane's chunk of a head, in the layout that it has in memory.
template <typename T, int kChunk>
struct RopeWords {
  static constexpr int kCount = kChunk * sizeof(T) / 4;
  uint32_t w[kCount];
};

template <typename T, int kChunk>
__device__ inline void to_floats(const RopeWords<T, kChunk>& words, float (&x)[kChunk]) {
#pragma unroll
  for (int i = 0; i < words.kCount; ++i) {
    if constexpr (sizeof(T) == 4) {
      x[i] = __uint_as_float(words.w[i]);
    } else {
      float2 pair = ptx::unpack2<T>(words.w[i]);
      x[2 * i] = pair.x;
      x[2 * i + 1] = pair.y;
    }
  }
}

template <typename T, int kChunk>
__device__ inline RopeWords<T, kChunk> to_words(const float (&x)[kChunk]) {
  RopeWords<T, kChunk> words;
#pragma unroll
  for (int i = 0; i < words.kCount; ++i) {
    if constexpr (sizeof(T) == 4) {
      words.w[i] = __float_as_uint(x[i]);
    } else {
      words.w[i] = ptx::pack2<T>(x[2 * i], x[2 * i + 1]);
    }
  }
  return words;
}

// Loads the first `count` elements of a chunk and sets the others to zero. If kVector, the chunk is
// full or empty, and 16-byte aligned.
template <typename T, bool kVector, int kChunk>
__device__ inline RopeWords<T, kChunk> load_chunk(const T* src, int count) {
  RopeWords<T, kChunk> words{};
  if constexpr (kVector) {
    if (count == 0) return words;
#pragma unroll
    for (int i = 0; i < words.kCount; i += 4) {
      uint4 x = *reinterpret_cast<const uint4*>(src + i * 4 / sizeof(T));
      words.w[i] = x.x;
      words.w[i + 1] = x.y;
      words.w[i + 2] = x.z;
      words.w[i + 3] = x.w;
    }
    return words;
  } else {
    float x[kChunk];
#pragma unroll
    for (int j = 0; j < kChunk; ++j) x[j] = j < count ? to_float(src[j]) : 0.0f;
    return to_words<T>(x);
  }
}

template <typename T, bool kVector, int kChunk>
__device__ inline void store_chunk(T* dst, const RopeWords<T, kChunk>& words, int count) {
  if constexpr (kVector) {
    if (count == 0) return;
#pragma unroll
    for (int i = 0; i < words.kCount; i += 4) {
      uint4 x{words.w[i], words.w[i + 1], words.w[i + 2], words.w[i + 3]};
      *reinterpret_cast<uint4*>(dst + i * 4 / sizeof(T)) = x;
    }
  } else {
    float x[kChunk];
    to_floats(words, x);
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      if (j < count) dst[j] = from_float<T>(x[j]);
    }
  }
}

// Source and destination of one head of q, k or v.
template <typename T>
struct RopeHead {
  const T* src;
  T* dst;
  const T* weight;  // nullptr: no norm
  bool turns;       // whether the head is rotated: true for q and k
};

template <typename T>
__device__ inline RopeHead<T> rope_head(const RopeAppendKvParams& params,
                                        int64_t row,
                                        int64_t slot,
                                        int head) {
  int num_qo_heads = static_cast<int>(params.num_qo_heads);
  int num_kv_heads = static_cast<int>(params.num_kv_heads);
  int head_dim = static_cast<int>(params.head_dim);
  if (head < num_qo_heads) {
    return {static_cast<const T*>(params.q) + row * params.q_stride + head * head_dim,
            static_cast<T*>(params.q_out) + (row * num_qo_heads + head) * head_dim,
            static_cast<const T*>(params.q_norm_weight),
            true};
  }
  head -= num_qo_heads;
  if (head < num_kv_heads) {
    return {static_cast<const T*>(params.k) + row * params.k_stride + head * head_dim,
            static_cast<T*>(params.k_cache) + (slot * num_kv_heads + head) * head_dim,
            static_cast<const T*>(params.k_norm_weight),
            true};
  }
  head -= num_kv_heads;
  return {static_cast<const T*>(params.v) + row * params.v_stride + head * head_dim,
          static_cast<T*>(params.v_cache) + (slot * num_kv_heads + head) * head_dim,
          nullptr,
          false};
}

// Stores one lane's part of a head in an 8-bit cache. `place` is the index of the head in the
// cache; `mask` selects the lanes of the head.
template <typename Cache, bool kVector, typename T, int kChunk>
__device__ inline void store_quantized(const RopeWords<T, kChunk>& words,
                                       void* cache,
                                       float* scales,
                                       int64_t place,
                                       int head_dim,
                                       int count,
                                       unsigned mask,
                                       int chunk_idx,
                                       int lanes) {
  float x[kChunk];
  to_floats(words, x);
  uint32_t largest = 0;
#pragma unroll
  for (int j = 0; j < kChunk; ++j) largest = max(largest, magnitude_bits(x[j]));
  for (int offset = 1; offset < lanes; offset *= 2) {
    largest = max(largest, __shfl_xor_sync(mask, largest, offset));
  }
  float scale = scale_of<Cache>(largest);
  if (chunk_idx == 0) scales[place] = scale;
  auto* dst = static_cast<uint8_t*>(cache) + place * head_dim + chunk_idx * kChunk;
  uint32_t bytes[kChunk / 4] = {};
#pragma unroll
  for (int j = 0; j < kChunk; ++j) {
    auto element = static_cast<uint8_t>(quantized<Cache>(x[j], scale).bits);
    bytes[j / 4] |= static_cast<uint32_t>(element) << j % 4 * 8;
  }
  if constexpr (kVector) {
    if (count == 0) return;
#pragma unroll
    for (int i = 0; i < kChunk / 4; i += 2) {
      *reinterpret_cast<uint2*>(dst + 4 * i) = uint2{bytes[i], bytes[i + 1]};
    }
  } else {
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      if (j < count) dst[j] = static_cast<uint8_t>(bytes[j / 4] >> j % 4 * 8);
    }
  }
}

// Computes q_out = rope(norm(q)) and writes rope(norm(k)) and v to the slot of the row in the
// caches.
// Grid:    x = groups of lanes, groups_per_row per row; unbounded.
// Block:   128 threads; 8, 16 or 32 lanes own one head at a time and step over heads of a row; a
//          lane owns kChunk consecutive elements: 8, or 16 of heads above 256. With few rows a
//          group has one head. With many rows it has several, reads cosines and sines once for all,
//          and prefetches the next head.
// Smem:    none; halves are exchanged by shuffles.
// Cost:    each element read and written once, in 16-byte accesses if alignment allows;
//          memory-bound.
// Assumes: each row contiguous; q_out may be q itself. kVector: chunks are full, 16-byte aligned
//          and pair with full chunks.
// Order:   elementwise except the norm's sum of squares: a chain over the elements of a lane from
//          zero, then a tree over neighboring lanes; absent lanes add zeros. Same roundings as the
//          CPU kernel.
//          A row whose slot or position is out of range is reported: its q_out is zero, and its k
//          and v are not written. An 8-bit cache gets the values of an unquantized one, quantized.
// Source:  Su et al. 2021 (RoPE); per-head norm as in Qwen3.
template <typename T, bool kVector, int kChunk, typename Cache = T>
__global__ void __launch_bounds__(kRopeThreads,
                                  kChunk > kRopeChunk ? (kVector ? 4 : 3)
                                  : !kVector          ? 4
                                  : sizeof(T) == 4    ? 6
                                                      : 8)
    rope_append_kv_kernel(RopeAppendKvParams params, RopeAppendKvGrid grid) {
  wait_for_previous_kernel();
  int chunk_idx = static_cast<int>(threadIdx.x) % grid.lanes;
  int first_lane = static_cast<int>(threadIdx.x) % kWarpSize - chunk_idx;
  unsigned mask = grid.lanes == kWarpSize ? kFullMask : ((1u << grid.lanes) - 1) << first_lane;
  int64_t group_idx = int64_t{blockIdx.x} * (kRopeThreads / grid.lanes) +
                      static_cast<int>(threadIdx.x) / grid.lanes;
  int64_t row = group_idx / grid.groups_per_row;
  if (row >= params.rows) return;
  int head = static_cast<int>(group_idx - row * grid.groups_per_row);

  int64_t slot = params.cache_slots[row];
  int32_t position = params.positions[row];
  Fault fault = find_fault(params, row);
  if (fault.found() && head == 0 && chunk_idx == 0) report_error(params.error, fault.code);
  int head_dim = static_cast<int>(params.head_dim);
  int begin = chunk_idx * kChunk;
  int count = min(max(head_dim - begin, 0), kChunk);
  int num_qo_heads = static_cast<int>(params.num_qo_heads);
  if (fault.found() || position < 0) {
    for (; head < num_qo_heads; head += grid.groups_per_row) {
      T* zeros = static_cast<T*>(params.q_out) + (row * num_qo_heads + head) * head_dim;
      store_chunk<T, kVector>(zeros + begin, RopeWords<T, kChunk>{}, count);
    }
    return;
  }
  int last_head = num_qo_heads + (slot < 0 ? 0 : 2 * static_cast<int>(params.num_kv_heads));
  if (head >= last_head) return;
  RopeWords<T, kChunk> next =
      load_chunk<T, kVector, kChunk>(rope_head<T>(params, row, slot, head).src + begin, count);

  // Cosines and sines of the lane's elements; if interleaved, of the lane's pairs.
  int half = static_cast<int>(params.rotary_dim) / 2;
  bool interleaved = params.interleaved;
  bool first_half = begin < half;
  float cos[kChunk] = {}, sin[kChunk] = {};
  const float* table = params.cos_sin + position * params.rotary_dim;
  if constexpr (kVector) {
    if (begin < 2 * half) {
      const float* place = table + (interleaved ? begin / 2 : first_half ? begin : begin - half);
#pragma unroll
      for (int j = 0; j < kChunk; j += 4) {
        if (interleaved && j >= kChunk / 2) break;
        float4 x = *reinterpret_cast<const float4*>(place + j);
        float4 y = *reinterpret_cast<const float4*>(place + half + j);
        cos[j] = x.x, cos[j + 1] = x.y, cos[j + 2] = x.z, cos[j + 3] = x.w;
        sin[j] = y.x, sin[j + 1] = y.y, sin[j + 2] = y.z, sin[j + 3] = y.w;
      }
    }
  } else {
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      int pair_idx = interleaved ? begin / 2 + j : begin + j < half ? begin + j : begin + j - half;
      if (pair_idx >= half) continue;
      cos[j] = table[pair_idx];
      sin[j] = table[half + pair_idx];
    }
  }

  while (true) {
    RopeHead<T> now = rope_head<T>(params, row, slot, head);
    RopeWords<T, kChunk> words = next;
    [[maybe_unused]] int cache_head = head - num_qo_heads;
    head += grid.groups_per_row;
    if (head < last_head) {
      next =
          load_chunk<T, kVector, kChunk>(rope_head<T>(params, row, slot, head).src + begin, count);
    }
    float x[kChunk], scale = 1.0f;
    if (now.weight != nullptr) {
      to_floats(words, x);
      float squares = 0.0f;
#pragma unroll
      for (int j = 0; j < kChunk; ++j) squares = __fmaf_rn(x[j], x[j], squares);
      for (int offset = 1; offset < grid.lanes; offset *= 2) {
        squares = __fadd_rn(squares, __shfl_xor_sync(mask, squares, offset));
      }
      float mean = __fdiv_rn(squares, static_cast<float>(head_dim));
      scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, params.norm_eps)));
      float w[kChunk];
      to_floats(load_chunk<T, kVector, kChunk>(now.weight + begin, count), w);
#pragma unroll
      for (int j = 0; j < kChunk; ++j) x[j] = __fmul_rn(x[j], scale);
      to_floats(to_words<T>(x), x);
#pragma unroll
      for (int j = 0; j < kChunk; ++j) x[j] = __fmul_rn(w[j], x[j]);
      words = to_words<T>(x);
    }
    if (now.turns) {
      float other[kChunk] = {};
      if (!interleaved) {
        if constexpr (kVector) {
          int step = begin >= 2 * half ? 0 : first_half ? half / kChunk : -half / kChunk;
          RopeWords<T, kChunk> others;
#pragma unroll
          for (int i = 0; i < words.kCount; ++i) {
            others.w[i] = __shfl_sync(mask, words.w[i], first_lane + chunk_idx + step);
          }
          to_floats(others, other);
        } else {
#pragma unroll
          for (int j = 0; j < kChunk; ++j) {
            int element = begin + j;
            if (element >= 2 * half) continue;
            element += element < half ? half : -half;
            other[j] = to_float(now.src[element]);
            if (now.weight != nullptr) {
              other[j] = to_float(from_float<T>(__fmul_rn(other[j], scale)));
              other[j] = __fmul_rn(to_float(now.weight[element]), other[j]);
              other[j] = to_float(from_float<T>(other[j]));
            }
          }
          __syncwarp(mask);  // q_out may alias q: all lanes must read before any writes
        }
      }
      to_floats(words, x);
#pragma unroll
      for (int j = 0; j < kChunk; ++j) {
        // If interleaved, the odd element was rotated together with the even one.
        if (begin + j >= 2 * half || (interleaved && j % 2 == 1)) continue;
        if (interleaved) {
          float a = x[j], b = x[j + 1], c = cos[j / 2], s = sin[j / 2];
          x[j] = __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s));
          x[j + 1] = __fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s));
        } else {
          float a = __fmul_rn(x[j], cos[j]), b = __fmul_rn(other[j], sin[j]);
          x[j] = begin + j < half ? __fsub_rn(a, b) : __fadd_rn(a, b);
        }
      }
      words = to_words<T>(x);
    }
    if constexpr (kIsScaled<Cache>) {
      if (cache_head >= 0) {
        int num_kv_heads = static_cast<int>(params.num_kv_heads);
        bool is_key = cache_head < num_kv_heads;
        store_quantized<Cache, kVector>(
            words,
            is_key ? params.k_cache : params.v_cache,
            is_key ? params.k_scales : params.v_scales,
            slot * num_kv_heads + (is_key ? cache_head : cache_head - num_kv_heads),
            head_dim,
            count,
            mask,
            chunk_idx,
            grid.lanes);
      } else {
        store_chunk<T, kVector>(now.dst + begin, words, count);
      }
    } else {
      store_chunk<T, kVector>(now.dst + begin, words, count);
    }
    if (head >= last_head) return;
  }
}

}  // namespace specops
