// SPDX-License-Identifier: Apache-2.0
#include "batching/build_tree.h"
#include "common/parallel.h"

namespace specops::SPECOPS_ISA {
namespace {

void build(const BuildTreeParams& params, int64_t batch_idx) {
  int64_t nodes = params.nodes, rows = nodes + 1, words = params.words;
  const int32_t* parents = params.parents + batch_idx * nodes;
  int32_t count = params.num_draft_tokens[batch_idx];
  int32_t position = params.positions[batch_idx];
  int32_t* depths = params.depths + batch_idx * rows;
  int32_t* row_positions = params.row_positions + batch_idx * rows;
  auto* mask = reinterpret_cast<uint32_t*>(params.ancestor_mask) + batch_idx * rows * words;
  int32_t* first_child = params.first_child + batch_idx * rows;
  int32_t* next_sibling = params.next_sibling + batch_idx * nodes;
  int32_t* sibling_index = params.sibling_index + batch_idx * nodes;

  for (int64_t row = 0; row < rows; ++row) {
    uint32_t* own = mask + row * words;
    first_child[row] = -1;
    if (row > count) {
      depths[row] = row_positions[row] = -1;
      for (int64_t w = 0; w < words; ++w) own[w] = 0;
      continue;
    }
    int64_t parent_row = row == 0 ? 0 : parents[row - 1] + 1;
    const uint32_t* above = mask + parent_row * words;
    depths[row] = row == 0 ? 0 : depths[parent_row] + 1;
    row_positions[row] = position + depths[row];
    for (int64_t w = 0; w < words; ++w) own[w] = row == 0 ? 0 : above[w];
    own[row / 32] |= 1u << row % 32;
  }
  for (int64_t node = nodes - 1; node >= 0; --node) {
    next_sibling[node] = sibling_index[node] = -1;
    if (node >= count) continue;
    int32_t& first = first_child[parents[node] + 1];
    next_sibling[node] = first;
    first = static_cast<int32_t>(node);
  }
  for (int64_t node = 0; node < count; ++node) {
    if (first_child[parents[node] + 1] == node) sibling_index[node] = 0;
    if (next_sibling[node] >= 0) sibling_index[next_sibling[node]] = sibling_index[node] + 1;
  }
}

}  // namespace

// Computes, for each node, depth = the parent's depth + 1, mask = the parent's mask plus the node
// itself, and the child and sibling links in ascending order.
// Cost:    the outputs are written once or twice, the mask read once; bound by the mask's words.
// Assumes: counts, parents and positions checked by ops.cpp.
// Order:   integers only.
// Source:  the tree attention of Miao et al. 2023 (SpecInfer) and Cai et al. 2024 (Medusa).
// Threads: one item per group of requests of about 8,192 words.
void build_tree_cpu(const BuildTreeParams& params) {
  constexpr int64_t kGrainWords = 8192;
  int64_t grain = kGrainWords / ((params.nodes + 1) * (params.words + 5)) + 1;
  parallel_for(params.batch, grain, [&](int64_t begin, int64_t end) {
    for (int64_t batch_idx = begin; batch_idx < end; ++batch_idx) build(params, batch_idx);
  });
}

}  // namespace specops::SPECOPS_ISA
