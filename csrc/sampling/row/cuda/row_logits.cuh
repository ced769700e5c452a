// SPDX-License-Identifier: Apache-2.0
// A row of logits in memory, with the block's overlay if the row has processors, and its 16-byte
// loads.
#pragma once

#include "common/device.cuh"
#include "sampling/row/cuda/overlay.cuh"

namespace specops {

constexpr int kLeafBytes = 2048;  // the part of a row that a warp holds in registers (leaf.cuh)

// A row of logits in memory. If kProcessed, reads apply the block's overlay.
template <typename T, bool kProcessed = false>
struct RowLogits {
  static constexpr int kLeafSize = kLeafBytes / static_cast<int>(sizeof(T));

  const T* data;
  int32_t size;
  int skew;  // bytes from the last 16-byte boundary to the row's first logit

  __device__ RowLogits(const void* logits, int64_t row, int64_t stride, int64_t vocab_size)
      : RowLogits(static_cast<const T*>(logits) + row * stride, static_cast<int32_t>(vocab_size)) {}

  __device__ int32_t num_leaves() const { return (size - 1) / kLeafSize + 1; }

  // Returns the row without the overlay.
  __device__ RowLogits<T> raw() const { return {data, size}; }

  __device__ float logit(int32_t id) const {
    if constexpr (kProcessed) {
      OverlayBits bits = overlay_of(id, 1);
      if (bits.forbidden != 0) return -INFINITY;
      if (bits.changed != 0) return to_float(changed_logit(id, data[id]));
    }
    return to_float(data[id]);
  }

 private:
  friend struct RowLogits<T, true>;

  __device__ RowLogits(const T* begin, int32_t vocab_size)
      : data(begin),
        size(vocab_size),
        skew(static_cast<int>(reinterpret_cast<uintptr_t>(begin) % 16)) {}
};

// Operations on a vector of 16 bytes of logits.
template <typename T>
struct Vector {
  static constexpr int kWidth = 16 / static_cast<int>(sizeof(T));
  static constexpr uint32_t kNothing = sizeof(T) == 4 ? 0xff800000u : 0xff80ff80u;  // -inf

  // Returns element i. i must be a compile-time constant after unrolling.
  __device__ static float element(const uint32_t* words, int i) {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(words[i]);
    } else {
      uint32_t word = words[i / 2];
      return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
    }
  }

  // Returns element i of kWords words, where i is known only at run time.
  template <int kWords>
  __device__ static T pick(const uint32_t* words, int i) {
    constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
    uint32_t word = 0;
#pragma unroll
    for (int k = 0; k < kWords; ++k) word |= words[k] & (k == i / kPerWord ? 0xffffffffu : 0u);
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(word);
    } else {
      return T{static_cast<uint16_t>(word >> i % 2 * 16)};
    }
  }

  template <int kWords>
  __device__ static void put(uint32_t* words, int i, T x) {
    constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
    uint32_t value, others;
    if constexpr (sizeof(T) == 4) {
      value = __float_as_uint(x);
      others = 0;
    } else {
      value = static_cast<uint32_t>(x.bits) << i % 2 * 16;
      others = 0xffff0000u >> i % 2 * 16;
    }
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      uint32_t mask = k == i / kPerWord ? ~others : 0u;
      words[k] = (words[k] & ~mask) | (value & mask);
    }
  }

  // Sets the elements whose bit is set to -inf.
  __device__ static void forbid(uint32_t* words, uint32_t bits) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      uint32_t mask;
      if constexpr (sizeof(T) == 4) {
        mask = 0u - (bits >> k & 1u);
      } else {
        mask = (bits >> 2 * k & 1u) * 0xffffu | (bits >> (2 * k + 1) & 1u) * 0xffff0000u;
      }
      words[k] = (words[k] & ~mask) | (kNothing & mask);
    }
  }

  // Loads the elements from id `first` on; -inf past the end of the row.
  template <bool kProcessed>
  __device__ static uint4 load(const RowLogits<T, kProcessed>& row, int32_t first) {
    return under_overlay<kProcessed>(first, load_raw(row, first));
  }

  // Applies the block's overlay, if kProcessed, to the raw elements from id `first` on.
  template <bool kProcessed>
  __device__ static uint4 under_overlay(int32_t first, uint4 vector) {
    if constexpr (kProcessed) {
      uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
      OverlayBits bits = overlay_of(first, kWidth);
      forbid(words, bits.forbidden);
      bits.changed &= ~bits.forbidden;
#pragma unroll 1
      while (bits.changed != 0) {
        int i = __ffs(static_cast<int>(bits.changed)) - 1;
        bits.changed &= bits.changed - 1;
        put<4>(words, i, changed_logit(first + i, pick<4>(words, i)));
      }
      vector = {words[0], words[1], words[2], words[3]};
    }
    return vector;
  }

  template <bool kProcessed>
  __device__ static uint4 load_raw(const RowLogits<T, kProcessed>& row, int32_t first) {
    const T* data = row.data + first;
    int rest = row.size - first;
    if (row.skew == 0 && rest >= kWidth) return *reinterpret_cast<const uint4*>(data);
    if (row.skew != 0 && first > 0 && rest >= 2 * kWidth) return load_skewed(data, row.skew);
    return load_elements(data, rest);
  }

  // Returns the 16 bytes that begin `skew` bytes after the start of a, in the concatenation of a
  // and b.
  __device__ static uint4 between(const uint4& a, const uint4& b, int skew) {
    uint32_t words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int k = 0; k < 6; ++k) words[k] = skew & 8 ? words[k + 2] : words[k];
#pragma unroll
    for (int k = 0; k < 5; ++k) words[k] = skew & 4 ? words[k + 1] : words[k];
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        words[k] = skew & 2 ? words[k] >> 16 | words[k + 1] << 16 : words[k];
      }
    }
    return {words[0], words[1], words[2], words[3]};
  }

 private:
  // Loads a vector that begins `skew` bytes past a 16-byte boundary, from the two aligned vectors
  // that it spans.
  __device__ static uint4 load_skewed(const T* data, int skew) {
    auto* low = reinterpret_cast<const uint4*>(reinterpret_cast<const unsigned char*>(data) - skew);
    return between(low[0], low[1], skew);
  }

  // Loads the first or last elements of a row one by one, and shifts them in from the right.
  __device__ static uint4 load_elements(const T* data, int count) {
    uint4 out{kNothing, kNothing, kNothing, kNothing};
#pragma unroll 1
    for (int i = 0; i < kWidth && count > 0; ++i) {
      if constexpr (sizeof(T) == 4) {
        out = {out.y, out.z, out.w, i < count ? __float_as_uint(data[i]) : kNothing};
      } else {
        uint32_t bits = i < count ? data[i].bits : kNothing & 0xffffu;
        out = {out.x >> 16 | out.y << 16,
               out.y >> 16 | out.z << 16,
               out.z >> 16 | out.w << 16,
               out.w >> 16 | bits << 16};
      }
    }
    return out;
  }
};

}  // namespace specops
