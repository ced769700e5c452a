// SPDX-License-Identifier: Apache-2.0
#include "batching/gather_input_ids.h"
#include "common/parallel.h"

namespace specops::SPECOPS_ISA {

// Sets out[row] to the token at the row's position: a known token, or else a draft; 0 for padding.
// Cost:    12 bytes read and 4 written per row, and three dependent table reads.
// Assumes: rows, slots, lengths and token ids checked by ops.cpp.
// Order:   integers only.
// Source:  FastDeploy's speculate_pre_process.
// Threads: one item per range of rows.
void gather_input_ids_cpu(const GatherInputIdsParams& params) {
  parallel_for(params.rows, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) params.out[row] = input_id(params, row).token_id;
  });
}

}  // namespace specops::SPECOPS_ISA
