// SPDX-License-Identifier: Apache-2.0
// 16-byte chunks of a row, the unit in which element-wise kernels read and write.
#pragma once

#include <type_traits>

#include "common/device.cuh"

namespace specops {

template <typename T>
constexpr int kChunk = 16 / static_cast<int>(sizeof(T));  // elements per chunk

// Returns whether rows that start at `pointer` and are `stride` elements apart can be read in
// whole, aligned chunks.
template <typename T>
inline bool chunk_aligned(const void* pointer, int64_t stride) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride % kChunk<T> == 0;
}

// Loads the first n elements at p, at most a chunk, and fills the rest of the chunk with zeros. If
// `aligned`, a whole chunk is loaded in one access.
template <typename T>
__device__ inline uint4 load_chunk(const T* p, int n, bool aligned) {
  uint4 out = make_uint4(0, 0, 0, 0);
  if (aligned && n >= kChunk<T>) return *reinterpret_cast<const uint4*>(p);
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i) {
    if (i >= n) continue;
    if constexpr (sizeof(T) == 4) {
      words[i] = __float_as_uint(p[i]);
    } else if constexpr (sizeof(T) == 1) {
      words[i / 4] |= static_cast<uint32_t>(static_cast<uint8_t>(p[i])) << (8 * (i % 4));
    } else {
      words[i / 2] |= static_cast<uint32_t>(p[i].bits) << (16 * (i % 2));
    }
  }
  out = make_uint4(words[0], words[1], words[2], words[3]);
  return out;
}

template <typename T>
__device__ inline void store_chunk(T* p, uint4 chunk, int n, bool aligned) {
  if (aligned && n >= kChunk<T>) {
    *reinterpret_cast<uint4*>(p) = chunk;
    return;
  }
  const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i) {
    if (i >= n) continue;
    if constexpr (sizeof(T) == 4) {
      p[i] = __uint_as_float(words[i]);
    } else {
      p[i] = T{static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)))};
    }
  }
}

template <typename T>
__device__ inline void unpack_chunk(float (&values)[kChunk<T>], uint4 chunk) {
  const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      values[i] = __uint_as_float(words[i]);
    } else {
      float2 pair = ptx::unpack2<T>(words[i]);
      values[2 * i] = pair.x;
      values[2 * i + 1] = pair.y;
    }
  }
}

// Rounds to nearest, ties to even.
template <typename T>
__device__ inline uint4 pack_chunk(const float (&values)[kChunk<T>]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      words[i] = __float_as_uint(values[i]);
    } else {
      words[i] = ptx::pack2<T>(values[2 * i], values[2 * i + 1]);
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

}  // namespace specops
