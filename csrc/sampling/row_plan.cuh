// SPDX-License-Identifier: Apache-2.0
// How rows are dealt to blocks, and where their leaves are kept. A schedule: it changes no bit.
#pragma once

#include <algorithm>

#include "sampling/leaf.cuh"
#include "sampling/overlay.cuh"
#include "sampling/row_shared.cuh"
#include "sampling/scan.cuh"

namespace specops {

struct RowPlan {
  int32_t num_leaves;  // of a row
  int32_t splits;      // blocks that share a row
  int32_t run;         // leaves of one block
  int32_t threads;     // of a block
  bool shared_leaves;  // statistics and masses fit a block's shared memory

  static constexpr int64_t kAlignment = 16;

  // Counters stand at the workspace's start and leaves at its end, so that a workspace that is large
  // enough serves calls of any shape: its start stays zero.
  static int64_t counter_bytes(int64_t counters) {
    return (counters * int64_t{sizeof(int32_t)} + kAlignment - 1) / kAlignment * kAlignment;
  }
  // Of one row's leaves: statistics, then masses.
  __host__ __device__ int64_t row_bytes() const {
    int64_t bytes = num_leaves * static_cast<int64_t>(sizeof(LeafStats) + sizeof(Mass));
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
};

constexpr int64_t kRowWarps = 8;      // of a block
constexpr int64_t kFewRowWarps = 16;  // where rows are very few

// Many rows: a block each, two to an SM. Fewer: several blocks share a row, and the last of them
// ends it. Very few: blocks of twice the warps, since what filters read again is one block's work.
inline RowPlan plan_rows(int64_t rows, int64_t vocab_size, int64_t element_bytes, int num_sms) {
  int64_t leaf_size = kLeafBytes / element_bytes;
  int64_t num_leaves = (vocab_size - 1) / leaf_size + 1;
  rows = std::max(rows, int64_t{1});
  bool few = 4 * rows <= num_sms;
  int64_t warps = std::min(num_leaves, few ? kFewRowWarps : kRowWarps);
  int64_t blocks = few ? num_sms : 2 * int64_t{num_sms};  // that run at once
  int64_t splits = std::min((num_leaves - 1) / warps + 1, std::max(blocks / rows, int64_t{1}));
  int64_t run = (num_leaves - 1) / splits + 1;
  splits = (num_leaves - 1) / run + 1;
  return {.num_leaves = static_cast<int32_t>(num_leaves),
          .splits = static_cast<int32_t>(splits),
          .run = static_cast<int32_t>(run),
          .threads = static_cast<int32_t>(warps) * kWarpSize,
          .shared_leaves = splits == 1 && num_leaves <= kSharedLeaves};
}

// Shared memory of a block.
inline size_t row_smem_bytes(const RowPlan& plan, bool processed, int64_t element_bytes) {
  if (!processed) return sizeof(RowShared);
  return static_cast<size_t>(kRowSharedBytes +
                             overlay_bytes(plan.num_leaves * (kLeafBytes / element_bytes)));
}

// What a call needs, and every call of no more rows and requests: fewer rows may be shared by blocks
// where more are not, and counters must never come to stand where another call has left leaves.
inline int64_t workspace_bytes(
    int64_t rows, int64_t vocab_size, int64_t element_bytes, int64_t batch, int num_sms) {
  RowPlan plan = plan_rows(rows, vocab_size, element_bytes, num_sms);
  int64_t split_rows = plan.num_leaves > kRowWarps ? std::min(rows, int64_t{num_sms}) : 0;
  int64_t kept_rows = plan.num_leaves > kSharedLeaves ? rows : split_rows;
  return RowPlan::counter_bytes(batch + split_rows) + kept_rows * plan.row_bytes();
}

static_assert(sizeof(RowShared) <= kRowSharedBytes, "the overlay begins there");

// One block's view of the workspace.
struct RowSlots {
  LeafStats* stats;  // [num_leaves] of its row
  Mass* masses;

  // `item`: the row's number among all that the workspace has room for.
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

// Whether this block is the last of `expected` that count themselves here. What they wrote before is
// then visible to it, and the counter is zero again.
__device__ inline bool last_to_arrive(RowShared& shared, int32_t* counter, int expected) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    // Back to zero in one piece: requests at fault may claim the same rows, whose counters then see
    // more arrivals, some between a look and a store.
    unsigned limit = static_cast<unsigned>(expected) - 1;
    bool last = atomicInc(reinterpret_cast<unsigned*>(counter), limit) == limit;
    __threadfence();
    shared.is_last = last;
  }
  __syncthreads();
  return shared.is_last != 0;
}

// The block's share of a row, or all of it. Returns whether it is the block that ends the row: all
// leaves are then there. counter() is the row's, asked for after the scan: registers less during it.
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
  int32_t begin = all ? 0 : static_cast<int32_t>(blockIdx.x) % plan.splits * plan.run;
  int32_t end = all ? plan.num_leaves : min(begin + plan.run, plan.num_leaves);
  scan_leaves(shared, row, begin, end, want_raw, want_warm, scale, slots.stats);
  if (plan.splits > 1 && !all) return last_to_arrive(shared, counter(), plan.splits);
  __syncthreads();
  return true;
}

}  // namespace specops
