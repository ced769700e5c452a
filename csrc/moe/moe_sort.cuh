// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/device.cuh"
#include "moe/moe_sort.h"

namespace specops {

constexpr int kSortThreads = 256;
constexpr int kSortWarps = kSortThreads / kWarpSize;

// Returns, in all threads, the sum of `value` over the block. `sums` has kSortWarps entries.
__device__ inline int block_sum(int value, int* sums) {
#pragma unroll
  for (int apart = kWarpSize / 2; apart > 0; apart /= 2) {
    value += __shfl_xor_sync(kFullMask, value, apart);
  }
  __syncthreads();
  if (threadIdx.x % kWarpSize == 0) sums[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  int sum = 0;
  for (int warp = 0; warp < kSortWarps; ++warp) sum += sums[warp];
  return sum;
}

// Groups (row, expert) pairs by expert, in ascending order of expert, then row.
// Grid:    x = num_experts.
// Block:   256 threads; a block owns the pairs of one expert.
// Smem:    64 bytes.
// Cost:    8 * pairs bytes read per block, nearly always from L2.
// Assumes: -
// Order:   integers only. A pair with an invalid id gets no place, and reports a fault.
// Source:  -
__global__ void __launch_bounds__(kSortThreads) moe_sort_kernel(MoeSortParams params) {
  wait_for_previous_kernel();
  auto* sums = reinterpret_cast<int*>(shared_memory());
  int expert = static_cast<int>(blockIdx.x);
  int pairs = static_cast<int>(params.pairs), top_k = static_cast<int>(params.top_k);
  int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  int below = 0, equal = 0;
  for (int pair = static_cast<int>(threadIdx.x); pair < pairs; pair += kSortThreads) {
    int id = params.expert_ids[pair];
    below += id >= 0 && id < expert;
    equal += id == expert;
    if (expert != 0 || (id >= 0 && id < params.num_experts)) continue;
    Fault fault = find_fault(params, pair);
    if (fault.found()) report_error(params.error, fault.code);
    params.places[pair] = -1;
  }
  int begin = block_sum(below, sums);
  int end = begin + block_sum(equal, sums);
  if (threadIdx.x == 0) {
    if (expert == 0) params.expert_indptr[0] = 0;
    params.expert_indptr[expert + 1] = end;
  }
  for (int first = 0; first < pairs && begin < end; first += kSortThreads) {
    int pair = first + static_cast<int>(threadIdx.x);
    bool mine = pair < pairs && params.expert_ids[pair] == expert;
    unsigned lanes = __ballot_sync(kFullMask, mine);
    __syncthreads();
    if (lane == 0) sums[warp] = __popc(lanes);
    __syncthreads();
    int place = begin + __popc(lanes & ((1u << lane) - 1u));
    for (int other = 0; other < kSortWarps; ++other) {
      if (other < warp) place += sums[other];
      begin += sums[other];
    }
    if (mine) {
      params.places[pair] = place;
      params.row_indices[place] = pair / top_k;
    }
  }
}

}  // namespace specops
