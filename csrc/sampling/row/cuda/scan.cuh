// SPDX-License-Identifier: Apache-2.0
// The one read of a row from memory: leaves arrive in shared memory while those before are summed
// up.
#pragma once

#include "sampling/row/cuda/leaf.cuh"
#include "sampling/row/cuda/row_shared.cuh"

namespace specops {

// Leaves that are on their way to a warp: as many as this, or half.
template <bool kProcessed>
constexpr int kScanDepth = kProcessed ? 2 : 4;

// A warp's slots: as many leaves as the plan says are always on their way to it. Leaf 0 never comes
// this way.
template <typename T, bool kProcessed>
class LeafRing {
 public:
  static constexpr int kMostDepth = kScanDepth<kProcessed>;

  __device__ LeafRing(RowShared& shared, const RowLogits<T, kProcessed>& row, int depth)
      : row_(row),
        end_inside_((row.skew == 0 ? row.size : row.size - Leaf<T>::kWidth) / Leaf<T>::kSize),
        depth_(depth),
        window_(reinterpret_cast<const unsigned char*>(row.data) - row.skew + lane_id() * 16),
        slots_(shared.scan_slots() + warp_id() * depth_ * kSlotVectors + lane_id()) {}

  // A slot is named by its first vector: 0 comes first, and this after another one.
  __device__ int slot_after(int slot) const {
    slot += kSlotVectors;
    return slot == depth_ * kSlotVectors ? 0 : slot;
  }

  // Lets a leaf come into a slot.
  __device__ void send(int slot, int32_t leaf) const {
    if (leaf < end_inside_) {
      const unsigned char* from = window_ + int64_t{leaf} * kLeafBytes;
#pragma unroll
      for (int j = 0; j < kLeafVectors; ++j) {
        ptx::cp_async_16(slots_ + slot + j * kWarpSize, from + j * kWarpSize * 16);
      }
      if (row_.skew != 0 && lane_id() == 0) {
        ptx::cp_async_16(slots_ + slot + kSlotVectors - 1, from + kLeafBytes);
      }
    } else {
#pragma unroll 1
      for (int j = 0; j < kLeafVectors; ++j) {
        int32_t first = leaf * Leaf<T>::kSize + (j * kWarpSize + lane_id()) * Leaf<T>::kWidth;
        uint4* to = slots_ + slot + j * kWarpSize;
        if (row_.skew == 0 && row_.size - first >= Leaf<T>::kWidth) {
          ptx::cp_async_16(to, row_.data + first);
        } else {
          *to = Vector<T>::load_raw(row_, first);
        }
      }
    }
  }

  // Ends what the warp has sent, or has not, since the last time.
  __device__ void commit() const { ptx::cp_async_commit(); }

  // Waits for the leaf in a slot, the oldest one on its way.
  __device__ void receive(int slot, int32_t leaf, Leaf<T>& x) const {
    if (depth_ == kMostDepth) {
      ptx::cp_async_wait<kMostDepth - 1>();
    } else {
      ptx::cp_async_wait<kMostDepth / 2 - 1>();
    }
    if (row_.skew == 0 || leaf >= end_inside_) {
      x.load_shared(slots_ + slot);  // what the lane itself has sent
      return;
    }
    __syncwarp(kFullMask);
    x.load_shared(slots_ + slot, row_.skew);
    __syncwarp(kFullMask);
  }

 private:
  const RowLogits<T, kProcessed>& row_;
  int32_t end_inside_;  // of the leaves whose vectors in memory are the row's alone
  int depth_;
  const unsigned char* window_;  // the lane's first vector in memory, and in its slots
  uint4* slots_;
};

// Sums up leaves [begin, end), with `depth` of them on their way to each warp. Before it, and before
// what lies in shared.scan_slots() is used after it, the block meets at a barrier.
template <typename T, bool kProcessed>
__device__ inline void scan_leaves(RowShared& shared,
                                   const RowLogits<T, kProcessed>& row,
                                   int depth,
                                   int32_t begin,
                                   int32_t end,
                                   bool want_raw,
                                   bool want_warm,
                                   float scale,
                                   LeafStats* stats) {
  int32_t leaf = begin + warp_id(), step = num_warps();
  if (leaf >= end) return;
  LeafRing<T, kProcessed> ring(shared, row, depth);
  // The first leaf comes straight to registers, beside those in the slots.
  Leaf<T> x;
  x.load_raw(row, leaf);
  int slot = 0;
#pragma unroll 1
  for (int i = 1; i <= depth; ++i) {
    if (leaf + i * step < end) ring.send(slot, leaf + i * step);
    ring.commit();
    slot = ring.slot_after(slot);
  }
  int32_t ahead = depth * step;
#pragma unroll 1
  while (true) {
    LeafStats found = leaf_stats<kProcessed>(x, leaf, want_raw, want_warm, scale);
    if (lane_id() == 0) stats[leaf] = found;
    leaf += step;
    if (leaf >= end) break;
    ring.receive(slot, leaf, x);
    if (leaf + ahead < end) ring.send(slot, leaf + ahead);
    ring.commit();
    slot = ring.slot_after(slot);
  }
}

}  // namespace specops
