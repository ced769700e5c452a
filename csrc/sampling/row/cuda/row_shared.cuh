// SPDX-License-Identifier: Apache-2.0
// A block's shared memory while it works on a row.
#pragma once

#include "common/stamps.cuh"
#include "sampling/row/cuda/leaf.cuh"
#include "sampling/row/cuda/ranking.cuh"
#include "sampling/row/filters.h"
#include "sampling/verify/verify.h"

namespace specops {

using Mass = unsigned long long;  // of tokens: an integer, so that sums do not depend on an order

constexpr int kMaxRowThreads = 512;
constexpr int kListCapacity = 3072;  // tokens that leave the row for a list
constexpr int kSharedLeaves = 512;   // of a row whose leaves are kept in shared memory
constexpr int kThresholds = 4;       // masses taken in one pass over a row
constexpr int kBins = 256;           // of a histogram over a list

// Leaves of a block that may be on their way into shared memory without any beyond RowShared, and the
// size of each: a row that does not begin at 16 bytes has a leaf in one vector more.
constexpr int kScanSlots = 16;
constexpr int kSlotVectors = kLeafBytes / 16 + 1;
constexpr int kScanBytes = kScanSlots * kSlotVectors * 16;
static_assert(kScanSlots == kMaxRowThreads / kWarpSize, "one for every warp");

// What typical-p keeps of the other filters' tokens: those whose surprise is nearest to the mean
// surprise, up to a distance and among the most distant ones up to a token.
struct TypicalCut {
  float mean;  // surprise, in nats above the first token's
  float distance;
  int32_t last_id;
};

struct RowShared {
  Mass scratch[kMaxRowThreads / kWarpSize];  // of the block's reductions and scans
  Mass key_low, key_high, above;             // of the bin a histogram led to
  Mass key;                                  // of the token found in it
  uint32_t bin_number;
  int32_t list_count;
  LeafStats* row_stats;  // the row's leaves: below, or in the workspace
  Mass* row_masses;
  SamplingParams filters;
  float inverse;                  // of the temperature
  Cut cut;                        // what the filters so far keep: a selection starts from it
  Cut kept;                       // what temperature, top-k, top-p and min-p keep
  TypicalCut typical;             // and what typical-p keeps of it
  int32_t weighed;                // whether masses are the kept tokens', or the scan's sums are
  float raw_max;                  // of the logits in memory
  float log_sum;                  // of their weights, then of what is kept
  float likely;                   // the least logit that min-p keeps
  Mass target, total;             // a selection's
  float thresholds[kThresholds];  // masses wanted in one pass over a row
  Mass sums[kThresholds];
  int32_t leaf, rest_id;
  float rest_logit;
  double part;
  int32_t is_last;
  int32_t batch_idx, first_row, num_rows, num_read, num_together;  // of the block's request
  int32_t row_of_request, rule, given_id, again;                   // of what it looks at
  Stamps<VerifyPhase, kVerifyPhases> stamps;                       // of the kernel that keeps time
  float taken;  // by rejected drafts, in weights of the row
  LeafStats stats[kSharedLeaves];
  // From here on idle while the row is scanned, whose copies arrive there.
  __align__(16) Mass masses[kSharedLeaves];
  uint32_t number[kBins], low_mass[kBins], high_mass[kBins];
  float list_x[kListCapacity];
  int32_t list_id[kListCapacity];
  unsigned char rest[kScanBytes - kSharedLeaves * sizeof(Mass) - 3 * kBins * sizeof(uint32_t) -
                     2 * kListCapacity * sizeof(uint32_t)];

  __device__ uint4* scan_slots() { return reinterpret_cast<uint4*>(masses); }
};

}  // namespace specops
