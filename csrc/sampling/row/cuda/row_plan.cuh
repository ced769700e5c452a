// SPDX-License-Identifier: Apache-2.0
// Assignment of rows to blocks, and where their leaves and overlays are stored. It is only a
// schedule: the bits of a result do not depend on it.
#pragma once

#include <algorithm>
#include <cstddef>

#include "common/launch.cuh"
#include "sampling/row/cuda/leaf.cuh"
#include "sampling/row/cuda/overlay.cuh"
#include "sampling/row/cuda/row_shared.cuh"
#include "sampling/row/cuda/scan.cuh"

namespace specops {

// The properties of a device on which a plan depends.
struct DeviceLimits {
  int num_sms;
  int64_t shared_bytes;     // largest shared memory of a block
  int64_t sm_shared_bytes;  // shared memory of an SM
};

inline DeviceLimits device_limits(CudaStream stream) {
  return {num_sms(stream), max_shared_bytes(stream), sm_shared_bytes(stream)};
}

struct RowPlan {
  int32_t num_leaves;  // leaves of a row
  int32_t splits;      // blocks that share a row
  int32_t run;         // leaves per block
  int32_t threads;     // threads per block
  int32_t depth;       // leaves in flight per warp during the scan
  bool shared_leaves;  // statistics and masses are in shared memory, not in the workspace
  OverlayPlan overlay;

  static constexpr int64_t kAlignment = 16;

  // Counters are at the start of the workspace and leaves at its end. A workspace that is large
  // enough therefore serves calls of any shape: its start stays zero.
  static int64_t counter_bytes(int64_t counters) {
    return (counters * int64_t{sizeof(int32_t)} + kAlignment - 1) / kAlignment * kAlignment;
  }
  // Returns the size in bytes of one row's leaf data: statistics, then masses.
  __host__ __device__ int64_t leaves_bytes() const {
    int64_t bytes = num_leaves * static_cast<int64_t>(sizeof(LeafStats) + sizeof(Mass));
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  // Returns the size in bytes of one row in the workspace: its leaf data and, unless it is in
  // shared memory, the bits of its overlay.
  __host__ __device__ int64_t row_bytes() const {
    return leaves_bytes() +
           (overlay.is_shared ? 0 : overlay.num_words * static_cast<int64_t>(sizeof(OverlayBits)));
  }

  // Return the range of leaves that a block scans: [begin, end).
  __device__ int32_t begin_leaf(bool all) const {
    return all ? 0 : static_cast<int32_t>(blockIdx.x) % splits * run;
  }
  __device__ int32_t end_leaf(bool all) const {
    return all ? num_leaves : min(begin_leaf(false) + run, num_leaves);
  }
};

constexpr int64_t kRowWarps = 8;          // warps of a block
constexpr int64_t kFewRowWarps = 16;      // warps of a block if there are very few rows
constexpr int64_t kBlockBytes = 1 << 10;  // shared memory reserved per block beside its own

// Returns the size, in bytes, of the shared memory of a scan with `depth` leaves in flight per warp
// of a block.
constexpr int64_t scan_bytes(int64_t warps, int64_t depth) {
  return int64_t{offsetof(RowShared, masses)} + warps * depth * kSlotVectors * 16;
}

// Returns the number of leaves in flight per warp. More leaves hide more of the memory latency. A
// row with processors can use only the part of RowShared that is idle during the scan.
inline int32_t scan_depth(int64_t warps,
                          int64_t blocks_per_sm,
                          bool processed,
                          const DeviceLimits& device) {
  int64_t room =
      std::min(device.shared_bytes, device.sm_shared_bytes / blocks_per_sm - kBlockBytes);
  int32_t most = kScanDepth<false>;
  if (processed) {
    room = sizeof(RowShared);
    most = kScanDepth<true>;
  }
  return scan_bytes(warps, most) <= room ? most : most / 2;
}

// Plans the rows of a call. Many rows: one block per row, two blocks per SM. Fewer rows: several
// blocks share a row, and the last of them finishes it. Very few rows: blocks with twice as many
// warps, because a single block makes the repeated passes of the filters.
inline RowPlan plan_rows(int64_t rows,
                         int64_t vocab_size,
                         int64_t element_bytes,
                         bool processed,
                         const DeviceLimits& device) {
  int64_t leaf_size = kLeafBytes / element_bytes;
  int64_t num_leaves = (vocab_size - 1) / leaf_size + 1;
  rows = std::max(rows, int64_t{1});
  int num_sms = device.num_sms;
  bool few =
      4 * rows <= num_sms && scan_bytes(kFewRowWarps, kScanDepth<false> / 2) <= device.shared_bytes;
  int64_t warps = std::min(num_leaves, few ? kFewRowWarps : kRowWarps);
  int64_t blocks = few ? num_sms : 2 * int64_t{num_sms};  // blocks that run concurrently
  int64_t splits = std::min((num_leaves - 1) / warps + 1, std::max(blocks / rows, int64_t{1}));
  int64_t run = (num_leaves - 1) / splits + 1;
  splits = (num_leaves - 1) / run + 1;
  return {.num_leaves = static_cast<int32_t>(num_leaves),
          .splits = static_cast<int32_t>(splits),
          .run = static_cast<int32_t>(run),
          .threads = static_cast<int32_t>(warps) * kWarpSize,
          .depth = scan_depth(warps, few || processed ? 1 : 2, processed, device),
          .shared_leaves = splits == 1 && num_leaves <= kSharedLeaves,
          .overlay = plan_overlay(num_leaves * leaf_size, device.shared_bytes)};
}

// Returns the size in bytes of a block's shared memory.
inline size_t row_smem_bytes(const RowPlan& plan, bool processed) {
  if (!processed) {
    int64_t scan = scan_bytes(plan.threads / kWarpSize, plan.depth);
    return static_cast<size_t>(std::max(scan, int64_t{sizeof(RowShared)}));
  }
  return static_cast<size_t>(kRowSharedBytes + plan.overlay.smem_bytes());
}

// Returns a workspace size in bytes that suffices for this call and for every call with at most as
// many rows and requests. A call with fewer rows may split rows that this call does not split, so
// the size includes the counters of such calls: no counter may lie where another call has left leaf
// data.
inline int64_t workspace_bytes(int64_t rows,
                               int64_t vocab_size,
                               int64_t element_bytes,
                               int64_t batch,
                               const DeviceLimits& device) {
  RowPlan plan = plan_rows(rows, vocab_size, element_bytes, false, device);
  int64_t split_rows = plan.num_leaves > kRowWarps ? std::min(rows, int64_t{device.num_sms}) : 0;
  bool all_kept = plan.num_leaves > kSharedLeaves || !plan.overlay.is_shared;
  int64_t kept_rows = all_kept ? rows : split_rows;
  return RowPlan::counter_bytes(batch + split_rows) + kept_rows * plan.row_bytes();
}

static_assert(sizeof(RowShared) <= kRowSharedBytes, "the overlay begins there");

// The part of the workspace that one block uses.
struct RowSlots {
  LeafStats* stats;  // [num_leaves] of the block's row
  Mass* masses;

  // Locates the block's part of the workspace. `item`: index of the row among the rows in the
  // workspace.
  __device__ RowSlots(const RowPlan& plan,
                      RowShared& shared,
                      unsigned char* workspace_end,
                      int64_t item)
      : stats(shared.stats), masses(shared.masses) {
    if (plan.shared_leaves) return;
    stats = reinterpret_cast<LeafStats*>(workspace_end - plan.row_bytes() * (item + 1));
    masses = reinterpret_cast<Mass*>(stats + plan.num_leaves);
  }
};

// Returns the overlay bits of row `item` in the workspace, and the range of them that this block
// writes. `all`: all bits instead.
__device__ inline OverlayPart overlay_part(const RowPlan& plan,
                                           unsigned char* workspace_end,
                                           int64_t item,
                                           bool all = false) {
  if (plan.overlay.is_shared) {
    return {shared_overlay_bits(plan.overlay), 0, plan.overlay.num_words};
  }
  unsigned char* row = workspace_end - plan.row_bytes() * (item + 1);
  int32_t leaf_words = plan.overlay.num_words / plan.num_leaves;
  return {reinterpret_cast<OverlayBits*>(row + plan.leaves_bytes()),
          plan.begin_leaf(all) * leaf_words,
          plan.end_leaf(all) * leaf_words};
}

// Returns whether this block is the last of `expected` blocks to increment the counter. The last
// block sees what the others wrote before, and the counter is then zero again.
__device__ inline bool last_to_arrive(RowShared& shared, int32_t* counter, int expected) {
  __syncthreads();
  if (threadIdx.x == 0) {
    // Wrap to zero in one atomic operation. Invalid requests may claim the same rows; their
    // counters then see too many arrivals, some of them between a separate load and store.
    unsigned limit = static_cast<unsigned>(expected) - 1;
    shared.is_last = ptx::increment_acq_rel(reinterpret_cast<unsigned*>(counter), limit) == limit;
  }
  __syncthreads();
  return shared.is_last != 0;
}

// Scans the block's part of a row, or all of it. Returns whether this block has to finish the row;
// all of its leaves are then available. counter() returns the counter of the row. It is called
// after the scan, which saves registers during the scan.
template <typename T, bool kProcessed, typename Counter>
__device__ inline bool scan_row(const RowPlan& plan,
                                RowShared& shared,
                                const RowLogits<T, kProcessed>& row,
                                const RowSlots& slots,
                                bool all,
                                bool want_raw,
                                bool want_warm,
                                float scale,
                                Counter counter) {
  scan_leaves(shared,
              row,
              plan.depth,
              plan.begin_leaf(all),
              plan.end_leaf(all),
              want_raw,
              want_warm,
              scale,
              slots.stats);
  if (plan.splits > 1 && !all) return last_to_arrive(shared, counter(), plan.splits);
  __syncthreads();
  return true;
}

}  // namespace specops
