// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "batching/gather_input_ids.h"
#include "common/device.cuh"

namespace specops {

constexpr int kGatherInputIdsThreads = 128;

// Sets out[row] to the token at the row's position: a known token, or else a draft; 0 for padding.
// Grid:    x = rows / 128 (unbounded).
// Block:   128 threads, one per row.
// Smem:    none.
// Cost:    12 bytes read and 4 written per row, and three dependent table reads; latency-bound.
// Assumes: shapes checked by ops.cpp.
// Order:   integers only.
// Source:  FastDeploy's speculate_pre_process.
__global__ void __launch_bounds__(kGatherInputIdsThreads)
    gather_input_ids_kernel(GatherInputIdsParams params) {
  wait_for_previous_kernel();
  int64_t row = int64_t{blockIdx.x} * kGatherInputIdsThreads + threadIdx.x;
  if (row >= params.rows) return;
  InputId id = input_id(params, row);
  if (id.fault.found()) report_error(params.error, id.fault.code);
  params.out[row] = id.token_id;
}

}  // namespace specops
