// SPDX-License-Identifier: Apache-2.0
// A leaf: the part of a row of logits that one warp holds in registers. Leaves start at fixed ids,
// and the sum over a leaf is one fixed fp32 tree, so every warp would compute the same bits.
#pragma once

#include <cfloat>

#include "common/device.cuh"
#include "sampling/row/cuda/ranking.cuh"
#include "sampling/row/cuda/row_logits.cuh"
#include "sampling/row/cuda/warp.cuh"

namespace specops {

constexpr int kLeafVectors = kLeafBytes / 16 / kWarpSize;  // 16-byte vectors per lane
constexpr float kLog2e = 1.44269504088896341f;

// The leaf of a warp. Vector j of lane l is vector 32 j + l of the leaf, so that each load of a
// warp reads whole cache lines.
template <typename T>
class Leaf {
 public:
  static constexpr int kSize = RowLogits<T>::kLeafSize;
  static constexpr int kWidth = Vector<T>::kWidth;
  static constexpr int kOwn = kLeafVectors * kWidth;  // elements per lane

  // Returns the position in the leaf of element i of this lane.
  __device__ static int offset(int i) { return vector_offset(i / kWidth) + i % kWidth; }

  // Returns element i of this lane. i must be a compile-time constant after unrolling.
  __device__ float operator[](int i) const { return Vector<T>::element(words_, i); }

  // Makes the compiler discard values derived from the elements, because recomputing them is
  // cheaper than keeping them in registers.
  __device__ void forget_derived() {
#pragma unroll
    for (int k = 0; k < kLeafVectors * 4; ++k) ptx::forget(words_[k]);
  }

  template <bool kProcessed>
  __device__ void load(const RowLogits<T, kProcessed>& row, int32_t leaf) {
    load_raw(row, leaf);
    if constexpr (kProcessed) process(leaf);
  }

  template <bool kProcessed>
  __device__ void load_raw(const RowLogits<T, kProcessed>& row, int32_t leaf) {
    int32_t begin = leaf * kSize;
    if (row.skew == 0 && row.size - begin >= kSize) {
      const T* data = row.data + begin;
#pragma unroll
      for (int j = 0; j < kLeafVectors; ++j) {
        put(j, ptx::load_streaming(reinterpret_cast<const uint4*>(data + vector_offset(j))));
      }
    } else {
#pragma unroll
      for (int j = 0; j < kLeafVectors; ++j) {
        put(j, Vector<T>::load_raw(row, begin + vector_offset(j)));
      }
    }
  }

  // Loads the leaf from shared memory. own[0] is the first vector of this lane.
  __device__ void load_shared(const uint4* own) {
#pragma unroll
    for (int j = 0; j < kLeafVectors; ++j) put(j, own[j * kWarpSize]);
  }

  // Loads the leaf from shared memory where every vector begins `skew` bytes later.
  __device__ void load_shared(const uint4* own, int skew) {
#pragma unroll
    for (int j = 0; j < kLeafVectors; ++j) {
      const uint4* low = own + j * kWarpSize;
      put(j, Vector<T>::between(low[0], low[1], skew));
    }
  }

  // Applies the block's overlay (logits processors) to the raw leaf.
  __device__ void process(int32_t leaf) {
    int32_t begin = leaf * kSize;
    uint32_t changed = 0;
#pragma unroll
    for (int j = 0; j < kLeafVectors; ++j) {
      OverlayBits bits = overlay_of(begin + vector_offset(j), kWidth);
      if (bits.forbidden != 0) Vector<T>::forbid(words_ + j * 4, bits.forbidden);
      changed |= (bits.changed & ~bits.forbidden) << (j * kWidth);
    }
#pragma unroll 1
    while (changed != 0) {
      int i = __ffs(static_cast<int>(changed)) - 1;
      changed &= changed - 1;
      T x = Vector<T>::template pick<kLeafVectors * 4>(words_, i);
      x = changed_logit(begin + offset(i), x);
      Vector<T>::template put<kLeafVectors * 4>(words_, i, x);
    }
  }

  // Returns the largest element of this lane. NaN is ignored; -inf if the lane has no elements.
  __device__ float lane_max() const {
    if constexpr (sizeof(T) == 4) {
      float tops[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
      for (int i = 0; i < kOwn; ++i) tops[i % 4] = fmaxf(tops[i % 4], (*this)[i]);
      return fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
    } else {
      uint32_t tops[2] = {Vector<T>::kNothing, Vector<T>::kNothing};
#pragma unroll
      for (int k = 0; k < kLeafVectors * 4; ++k) {
        tops[k % 2] = ptx::max_bf16x2(tops[k % 2], words_[k]);
      }
      uint32_t top = ptx::max_bf16x2(tops[0], tops[1]);
      return fmaxf(Vector<T>::element(&top, 0), Vector<T>::element(&top, 1));
    }
  }

  // Calls visit(i, clean element, position in the leaf) for the elements of this lane in order; i
  // is the index within a vector. The loop is unrolled one vector at a time, because unrolling all
  // of it takes more registers.
  template <typename Visit>
  __device__ void for_each(Visit visit) {
#pragma unroll 1
    for (int j = 0; j < kLeafVectors; ++j) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        visit(i, clean((*this)[i]), vector_offset(j) + i);
      }
      uint32_t front[4] = {words_[0], words_[1], words_[2], words_[3]};
#pragma unroll
      for (int k = 4; k < kLeafVectors * 4; ++k) words_[k - 4] = words_[k];
#pragma unroll
      for (int k = 0; k < 4; ++k) words_[kLeafVectors * 4 - 4 + k] = front[k];
    }
  }

  // Sets the elements that equal `value` and lie past position `last` of the leaf to -inf.
  __device__ void drop_ties(float value, int last) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (clean((*this)[i]) != value || offset(i) <= last) continue;
      if constexpr (sizeof(T) == 4) {
        words_[i] = Vector<T>::kNothing;
      } else {
        uint32_t half = i % 2 == 0 ? 0xffffu : 0xffff0000u;
        words_[i / 2] = (words_[i / 2] & ~half) | (Vector<T>::kNothing & half);
      }
    }
  }

 private:
  __device__ static int vector_offset(int j) { return (j * kWarpSize + lane_id()) * kWidth; }

  __device__ void put(int j, const uint4& vector) {
    words_[j * 4] = vector.x;
    words_[j * 4 + 1] = vector.y;
    words_[j * 4 + 2] = vector.z;
    words_[j * 4 + 3] = vector.w;
  }

  uint32_t words_[kLeafVectors * 4];
};

// Calls visit(logit, id) for the elements of a lane in ascending order of ids. Here each lane has a
// contiguous run of the leaf. kAtOnce: the lane loads its whole run before the first visit, which
// takes more registers.
template <bool kAtOnce = true, typename T, bool kProcessed, typename Visit>
__device__ inline void for_each_in_order(const RowLogits<T, kProcessed>& row,
                                         int32_t leaf,
                                         Visit visit) {
  constexpr int kWidth = Vector<T>::kWidth;
  constexpr int kAhead = kAtOnce ? kLeafVectors : 1;
  int32_t first = leaf * RowLogits<T>::kLeafSize + lane_id() * kLeafVectors * kWidth;
  uint4 ahead[kAhead];
  if constexpr (kAtOnce) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) ahead[j] = Vector<T>::load_raw(row, first + j * kWidth);
  }
#pragma unroll 1
  for (int j = 0; j < kLeafVectors; ++j, first += kWidth) {
    if constexpr (!kAtOnce) ahead[0] = Vector<T>::load_raw(row, first);
    uint4 vector = Vector<T>::template under_overlay<kProcessed>(first, ahead[0]);
#pragma unroll
    for (int k = 1; k < kAhead; ++k) ahead[k - 1] = ahead[k];
    uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < kWidth; ++i) visit(clean(Vector<T>::element(words, i)), first + i);
  }
}

struct __align__(16) LeafStats {
  float max;      // maximum of the leaf's logits
  float raw;      // sum of e^(raw logit - raw_max)
  float warm;     // sum of e^((logit - max) / temperature)
  float raw_max;  // maximum of the logits in memory; set only if there is an overlay
};

// Returns the sum of 2^((x - origin) * scale) over the leaf; every element x must be <= origin.
// Each lane sums four chains in id order, then one butterfly adds the lanes.
template <typename T>
__device__ inline float leaf_sum(Leaf<T>& x, float origin, float scale) {
  x.forget_derived();
  float sums[4] = {};
#pragma unroll
  for (int i = 0; i < Leaf<T>::kOwn; ++i) {
    sums[i % 4] += ptx::exp2_approx((x[i] - origin) * scale);
  }
  float sum = warp_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  if (sum <= static_cast<float>(Leaf<T>::kSize)) return sum;
  // Reached if the leaf has a NaN or +inf.
  x.forget_derived();
#pragma unroll
  for (int k = 0; k < 4; ++k) sums[k] = 0.0f;
#pragma unroll
  for (int i = 0; i < Leaf<T>::kOwn; ++i) {
    sums[i % 4] += ptx::exp2_approx((clean(x[i]) - origin) * scale);
  }
  return warp_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <typename T>
__device__ inline float leaf_max(const Leaf<T>& x) {
  return fminf(warp_max(x.lane_max()), FLT_MAX);
}

template <bool kProcessed, typename T>
__device__ inline LeafStats leaf_stats(
    Leaf<T>& x, int32_t leaf, bool want_raw, bool want_warm, float scale) {
  LeafStats stats{leaf_max(x), 0.0f, 0.0f, 0.0f};
  if constexpr (kProcessed) {
    stats.raw_max = stats.max;
    if (want_raw && stats.raw_max > -INFINITY) stats.raw = leaf_sum(x, stats.raw_max, kLog2e);
    x.forget_derived();
    x.process(leaf);
    stats.max = leaf_max(x);
    if (want_warm && stats.max > -INFINITY) stats.warm = leaf_sum(x, stats.max, scale);
  } else if (stats.max > -INFINITY) {
    if (want_raw) stats.raw = leaf_sum(x, stats.max, kLog2e);
    if (want_warm) {
      stats.warm = want_raw && scale == kLog2e ? stats.raw : leaf_sum(x, stats.max, scale);
    }
  }
  return stats;
}

}  // namespace specops
