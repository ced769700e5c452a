// SPDX-License-Identifier: Apache-2.0
// build_tree: computes the arrays that attention and verification need of a draft tree from its
// parents.
#pragma once

#include <cstdint>

#include "common/error_flag.h"
#include "common/host_device.h"
#include "common/index_rule.h"
#include "common/isa.h"

namespace specops {

constexpr int64_t kMaxTreeNodes = 8192;  // per request

struct BuildTreeParams {
  const int32_t* parents;           // [batch, nodes], node j's in [-1, j); -1 = the root
  const int32_t* num_draft_tokens;  // [batch], valid nodes of each request
  const int32_t* positions;         // [batch], position of the root
  int32_t* depths;                  // [batch, nodes + 1], per row: the root, then the nodes
  int32_t* row_positions;           // [batch, nodes + 1], position of the root + depth
  int32_t* ancestor_mask;           // [batch, nodes + 1, words], bit c of row r: r sees row c
  int32_t* first_child;             // [batch, nodes + 1], the first child of a row
  int32_t* next_sibling;            // [batch, nodes], the next node with the same parent
  int32_t* sibling_index;           // [batch, nodes], number of siblings before a node
  int64_t batch;
  int64_t nodes;  // at most kMaxTreeNodes
  int64_t words;  // ceil((nodes + 1) / 32)
  ErrorFlag error;
};

SPECOPS_FAULT(3017, kBuildTreeNumDraftTokens) =
    "build_tree: num_draft_tokens must be at least 0 and at most the width of parents{, #}";
SPECOPS_FAULT(3018, kBuildTreePositions) =
    "build_tree: positions must be at least 0, and an int32 with the depth of every node";
SPECOPS_FAULT(3019, kBuildTreeParents) =
    "build_tree: parents must be -1 or a node before the node itself";

// Checks a request's values; its nodes are checked with is_parent.
SPECOPS_HOST_DEVICE Fault find_fault(const BuildTreeParams& params, int64_t batch_idx) {
  int32_t count = params.num_draft_tokens[batch_idx], position = params.positions[batch_idx];
  if (count < 0 || count > params.nodes) {
    return fault_at(kBuildTreeNumDraftTokens, count, batch_idx).with(params.nodes);
  }
  if (position < 0 || position > INT32_MAX - params.nodes) {
    return fault_at(kBuildTreePositions, position, batch_idx);
  }
  return {};
}

SPECOPS_HOST_DEVICE Fault find_parent_fault(const BuildTreeParams& params,
                                            int64_t batch_idx,
                                            int32_t node) {
  int32_t parent = params.parents[batch_idx * params.nodes + node];
  if (is_parent(parent, node)) return {};
  return fault_at(kBuildTreeParents, parent, batch_idx, node);
}

SPECOPS_DECLARE_CPU(build_tree_cpu, BuildTreeParams);
SPECOPS_DECLARE_CUDA(build_tree_cuda, BuildTreeParams);

}  // namespace specops
