// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "batching/build_tree.h"
#include "common/device.cuh"

namespace specops {

constexpr int kBuildTreeThreads = 128;

// Computes depths, positions, ancestor masks and links of each request's tree from its parents.
// Grid:    x = requests (unbounded).
// Block:   128 threads; each thread owns rows: the root, then the nodes.
// Smem:    the request's parents, 4 * nodes bytes; 256 at 64 nodes, 32 KB at most.
// Cost:    4 bytes read and 20 + 4 * words written per row; depth + nodes steps in shared memory
//          per row; latency-bound.
// Assumes: nodes <= kMaxTreeNodes.
// Order:   integers only. A request with invalid parents is reported and reduced to its root.
// Source:  the tree attention of Miao et al. 2023 (SpecInfer) and Cai et al. 2024 (Medusa).
__global__ void __launch_bounds__(kBuildTreeThreads) build_tree_kernel(BuildTreeParams params) {
  wait_for_previous_kernel();
  auto* parents = reinterpret_cast<int32_t*>(shared_memory());
  int64_t batch_idx = blockIdx.x;
  int thread = static_cast<int>(threadIdx.x);
  int nodes = static_cast<int>(params.nodes), words = static_cast<int>(params.words);
  int count = params.num_draft_tokens[batch_idx];
  int32_t position = params.positions[batch_idx];
  ErrorCode code = find_fault(params, batch_idx).code;
  if (code != ErrorCode::kNone) count = 0;
  int wrong = 0;
  for (int node = thread; node < count; node += kBuildTreeThreads) {
    int32_t parent = params.parents[batch_idx * nodes + node];
    parents[node] = parent;
    wrong |= !is_parent(parent, node);
  }
  if (__syncthreads_or(wrong)) {
    code = kBuildTreeParents;
    count = 0;
  }
  if (thread == 0 && code != ErrorCode::kNone) report_error(params.error, code);

  int64_t first_row = batch_idx * (nodes + 1);
  for (int row = thread; row <= nodes; row += kBuildTreeThreads) {
    int node = row - 1;
    bool valid = row <= count;
    int32_t* mask = params.ancestor_mask + (first_row + row) * words;
    int word = words - 1, depth = -1;
    if (valid) {
      // The rows of a path descend, so a mask word is complete once the path moves to a lower word.
      uint32_t bits = 0;
      for (int above = row;; above = parents[above - 1] + 1) {
        for (; word > above / 32; --word) {
          mask[word] = static_cast<int32_t>(bits);
          bits = 0;
        }
        bits |= 1u << above % 32;
        ++depth;
        if (above == 0) break;
      }
      mask[0] = static_cast<int32_t>(bits);
    } else {
      for (; word >= 0; --word) mask[word] = 0;
    }
    int32_t first = -1, next = -1, index = 0;
    int32_t own_parent = valid && node >= 0 ? parents[node] : -2;
    for (int other = 0; other < count && valid; ++other) {
      int32_t parent = parents[other];
      if (parent == node && first < 0) first = other;
      if (parent != own_parent) continue;
      index += other < node;
      if (other > node && next < 0) next = other;
    }
    params.depths[first_row + row] = depth;
    params.row_positions[first_row + row] = valid ? position + depth : -1;
    params.first_child[first_row + row] = first;
    if (node < 0) continue;
    params.next_sibling[batch_idx * nodes + node] = next;
    params.sibling_index[batch_idx * nodes + node] = valid ? index : -1;
  }
}

}  // namespace specops
