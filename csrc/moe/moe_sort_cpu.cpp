// SPDX-License-Identifier: Apache-2.0
#include "moe/moe_sort.h"

namespace specops::SPECOPS_ISA {

// Groups (row, expert) pairs by expert, in ascending order of expert, then row.
// Cost:    two passes over the pairs; 4 bytes read and 12 written per pair.
// Assumes: ids checked by ops.cpp.
// Order:   integers only.
// Source:  counting sort (Seward 1954).
// Threads: one, because sixteen thousand pairs take a few tens of microseconds.
void moe_sort_cpu(const MoeSortParams& params) {
  int32_t* ends =
      params.expert_indptr + 1;  // while counting: the count; while placing: the next position
  for (int64_t e = 0; e <= params.num_experts; ++e) params.expert_indptr[e] = 0;
  for (int64_t pair = 0; pair < params.pairs; ++pair) {
    int32_t id = params.expert_ids[pair];
    if (id >= 0) ++ends[id];
  }
  int32_t begin = 0;
  for (int64_t e = 0; e < params.num_experts; ++e) {
    int32_t count = ends[e];
    ends[e] = begin;
    begin += count;
  }
  for (int64_t pair = 0; pair < params.pairs; ++pair) {
    int32_t id = params.expert_ids[pair];
    int32_t place = id < 0 ? -1 : ends[id]++;
    params.places[pair] = place;
    if (place >= 0) params.row_indices[place] = static_cast<int32_t>(pair / params.top_k);
  }
}

}  // namespace specops::SPECOPS_ISA
