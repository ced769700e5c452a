// SPDX-License-Identifier: Apache-2.0
// Shared memory of a block that processes a row.
#pragma once

#include "common/stamps.cuh"
#include "sampling/row/cuda/leaf.cuh"
#include "sampling/row/cuda/ranking.cuh"
#include "sampling/row/filters.h"
#include "sampling/verify/verify.h"

namespace specops {

using Mass = unsigned long long;  // of tokens: an integer sum of weights, in any order

constexpr int kMaxRowThreads = 512;
constexpr int kListCapacity = 3072;  // tokens that can be copied from the row to the list
constexpr int kSharedLeaves = 512;   // most leaves of a row whose data fit shared memory
constexpr int kThresholds = 4;       // number of masses computed in one pass over a row
constexpr int kBins = 256;           // bins of a histogram over the list

// Number of leaves of a block that can be in flight into shared memory without extending RowShared,
// and number of vectors per leaf. A leaf spans one more vector if the row does not begin at a
// multiple of 16 bytes.
constexpr int kScanSlots = 16;
constexpr int kSlotVectors = kLeafBytes / 16 + 1;
constexpr int kScanBytes = kScanSlots * kSlotVectors * 16;
static_assert(kScanSlots == kMaxRowThreads / kWarpSize, "one for every warp");

// The subset that typical-p keeps of the tokens that the other filters keep: those whose surprise
// is at most `distance` from the mean surprise, and of the tokens at exactly this distance those
// with an id up to last_id.
struct TypicalCut {
  float mean;  // mean surprise minus that of the first token, in nats
  float distance;
  int32_t last_id;
};

struct RowShared {
  Mass scratch[kMaxRowThreads / kWarpSize];  // scratch of block reductions and scans
  Mass key_low, key_high, above;             // selected bin of a histogram; mass above it
  Mass key;                                  // key of the token found in that bin
  uint32_t bin_number;
  int32_t list_count;
  LeafStats* row_stats;  // data of the row's leaves: in `stats` below, or in the workspace
  Mass* row_masses;
  SamplingParams filters;
  float inverse;                  // 1 / temperature
  Cut cut;                        // what the filters keep so far; a selection starts from it
  Cut kept;                       // what temperature, top-k, top-p and min-p keep
  TypicalCut typical;             // the subset of `kept` that typical-p keeps
  int32_t weighed;                // 1: masses are of the kept tokens; 0: use the scan's sums
  float raw_max;                  // maximum of the logits in memory
  float log_sum;                  // log of the raw sum of weights, later of the kept mass
  float likely;                   // the smallest logit that min-p keeps
  Mass target, total;             // mass (or count) to reach, and of all candidates
  float thresholds[kThresholds];  // thresholds of one pass over a row
  Mass sums[kThresholds];
  int32_t leaf, rest_id;
  float rest_logit;
  double part;
  int32_t is_last;
  int32_t batch_idx, first_row, num_rows, num_read, num_together;  // of the block's request
  int32_t row_of_request, rule, given_id, again;                   // of the block's current row
  Stamps<VerifyPhase, kVerifyPhases> stamps;  // recorded only by the kernel that measures phases
  float taken;                                // Residual::taken, in units of the row's weights
  LeafStats stats[kSharedLeaves];
  // The members from here on are idle while the row is scanned. The copies of the scan use their
  // memory.
  __align__(16) Mass masses[kSharedLeaves];
  uint32_t number[kBins], low_mass[kBins], high_mass[kBins];
  float list_x[kListCapacity];
  int32_t list_id[kListCapacity];
  unsigned char rest[kScanBytes - kSharedLeaves * sizeof(Mass) - 3 * kBins * sizeof(uint32_t) -
                     2 * kListCapacity * sizeof(uint32_t)];

  __device__ uint4* scan_slots() { return reinterpret_cast<uint4*>(masses); }
};

}  // namespace specops
