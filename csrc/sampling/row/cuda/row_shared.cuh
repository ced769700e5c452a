// SPDX-License-Identifier: Apache-2.0
// Shared memory of a block while it works on a row.
#pragma once

#include "common/stamps.cuh"
#include "sampling/row/cuda/leaf.cuh"
#include "sampling/row/cuda/ranking.cuh"
#include "sampling/row/filters.h"
#include "sampling/verify/verify.h"

namespace specops {

using Mass = unsigned long long;  // of tokens; integer sums do not depend on their order

constexpr int kMaxRowThreads = 512;
constexpr int kListCapacity = 3072;  // tokens that can be copied from the row to the list
constexpr int kSharedLeaves = 512;   // most leaves of a row that are kept in shared memory
constexpr int kThresholds = 4;       // masses computed in one pass over a row
constexpr int kBins = 256;           // bins of a histogram over the list

// Leaves of a block that can be in flight into shared memory without extending RowShared, and the
// vectors of each. A row that does not begin at a multiple of 16 bytes spreads a leaf over one more
// vector.
constexpr int kScanSlots = 16;
constexpr int kSlotVectors = kLeafBytes / 16 + 1;
constexpr int kScanBytes = kScanSlots * kSlotVectors * 16;
static_assert(kScanSlots == kMaxRowThreads / kWarpSize, "one for every warp");

// The subset that typical-p keeps of the other filters' tokens: those with a surprise nearest to
// the mean surprise, up to a distance, and among the tokens at that distance up to an id.
struct TypicalCut {
  float mean;  // mean surprise, in nats above the first token's
  float distance;
  int32_t last_id;
};

struct RowShared {
  Mass scratch[kMaxRowThreads / kWarpSize];  // scratch of block reductions and scans
  Mass key_low, key_high, above;             // of the bin that a histogram selected
  Mass key;                                  // key of the token found in that bin
  uint32_t bin_number;
  int32_t list_count;
  LeafStats* row_stats;  // the row's leaves: in `stats` below, or in the workspace
  Mass* row_masses;
  SamplingParams filters;
  float inverse;       // 1 / temperature
  Cut cut;             // the tokens kept by the filters so far; a selection starts from it
  Cut kept;            // the tokens that temperature, top-k, top-p and min-p keep
  TypicalCut typical;  // the subset of `kept` that typical-p keeps
  int32_t weighed;     // 1: masses are the kept tokens'; 0: use the scan's sums
  float raw_max;       // maximum of the logits in memory
  float log_sum;       // log of their sum of weights, later of the kept mass
  float likely;        // the least logit that min-p keeps
  Mass target, total;  // of the current selection
  float thresholds[kThresholds];  // thresholds of one pass over a row
  Mass sums[kThresholds];
  int32_t leaf, rest_id;
  float rest_logit;
  double part;
  int32_t is_last;
  int32_t batch_idx, first_row, num_rows, num_read, num_together;  // of the block's request
  int32_t row_of_request, rule, given_id, again;                   // of the row that it works on
  Stamps<VerifyPhase, kVerifyPhases> stamps;  // of the kernel that records phase times
  float taken;                                // Residual::taken, in weights of the row
  LeafStats stats[kSharedLeaves];
  // The members from here on are idle while the row is scanned; the scan's copies arrive in them.
  __align__(16) Mass masses[kSharedLeaves];
  uint32_t number[kBins], low_mass[kBins], high_mass[kBins];
  float list_x[kListCapacity];
  int32_t list_id[kListCapacity];
  unsigned char rest[kScanBytes - kSharedLeaves * sizeof(Mass) - 3 * kBins * sizeof(uint32_t) -
                     2 * kListCapacity * sizeof(uint32_t)];

  __device__ uint4* scan_slots() { return reinterpret_cast<uint4*>(masses); }
};

}  // namespace specops
