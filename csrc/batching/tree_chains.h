// SPDX-License-Identifier: Apache-2.0
// tree_chains: converts trees of drafts to chains, which attention handles like ordinary requests.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace specops {

struct TreeChainsParams {
  const int32_t* parents;           // [batch, nodes], in preorder, -1: the root
  const int32_t* num_draft_tokens;  // [batch], valid nodes of each request
  const int32_t* qo_lens;      // [batch], rows of this step, ending with the root and its nodes
  const int32_t* kv_lens;      // [batch], tokens of each request, including these rows
  const int32_t* kv_indptr;    // [batch + 1], in pages
  const int32_t* kv_indices;   // [num_indices], page ids
  const int32_t* spare_pages;  // [num_spare_pages], unused pages
  int64_t batch;
  int64_t nodes;
  int64_t num_indices;
  int64_t num_spare_pages;
  int64_t page_size;
};

// The chains of all trees, in the order of requests and of their rows.
struct TreeChains {
  std::vector<int32_t> chain_indptr;  // [batch + 1], chain offsets of each request
  std::vector<int32_t> qo_lens;       // [chains]
  std::vector<int32_t> kv_lens;       // [chains]
  std::vector<int32_t> kv_indptr;     // [chains + 1]
  std::vector<int32_t> kv_indices;    // [pages]
  std::vector<int64_t> from_slots;    // [copies]
  std::vector<int64_t> to_slots;      // [copies]
};

// A value that is not a valid tree: "argument[element] must be expected, got it". Valid if argument
// is empty.
struct TreeFault {
  std::string argument, expected;
  int64_t got = 0;
};

TreeFault find_tree_chains(const TreeChainsParams& params, TreeChains& chains);

}  // namespace specops
