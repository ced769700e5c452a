// SPDX-License-Identifier: Apache-2.0
// The scan: the only full read of a row from memory. Leaves arrive in shared memory while earlier
// leaves are summed.
#pragma once

#include "sampling/row/cuda/leaf.cuh"
#include "sampling/row/cuda/row_shared.cuh"

namespace specops {

// Number of leaves in flight per warp: this many, or half of it.
template <bool kProcessed>
constexpr int kScanDepth = kProcessed ? 2 : 4;

// A warp's ring of slots for leaves. As many leaves as the plan says are always in flight. Leaf 0
// of the warp does not use the ring.
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

  // Returns the slot after `slot`. A slot is identified by its first vector; the first slot is 0.
  __device__ int slot_after(int slot) const {
    slot += kSlotVectors;
    return slot == depth_ * kSlotVectors ? 0 : slot;
  }

  // Starts copying a leaf into a slot.
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

  // Ends a group of copies: all that were sent since the last call, possibly none.
  __device__ void commit() const { ptx::cp_async_commit(); }

  // Waits for the leaf in a slot, which must be the oldest one in flight, and loads it to
  // registers.
  __device__ void receive(int slot, int32_t leaf, Leaf<T>& x) const {
    if (depth_ == kMostDepth) {
      ptx::cp_async_wait<kMostDepth - 1>();
    } else {
      ptx::cp_async_wait<kMostDepth / 2 - 1>();
    }
    if (row_.skew == 0 || leaf >= end_inside_) {
      x.load_shared(slots_ + slot);  // each lane reads only what it has copied
      return;
    }
    __syncwarp(kFullMask);
    x.load_shared(slots_ + slot, row_.skew);
    __syncwarp(kFullMask);
  }

 private:
  const RowLogits<T, kProcessed>& row_;
  int32_t end_inside_;  // end of the leaves whose vectors are all inside the row
  int depth_;
  const unsigned char* window_;  // first vector of this lane: in memory, and in its slots
  uint4* slots_;
};

// Scans the leaves [begin, end) with `depth` of them in flight per warp. The block must pass a
// barrier before the call, and another one before it uses the memory of shared.scan_slots().
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
  // The first leaf is loaded directly to registers, while the slots are being filled.
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
