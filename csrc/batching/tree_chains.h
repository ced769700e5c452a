// SPDX-License-Identifier: Apache-2.0
// tree_chains: trees of drafts as chains, which attention computes as it computes any request.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace specops {

struct TreeChainsParams {
  const int32_t* parents;           // [batch, nodes], in preorder, -1: the root
  const int32_t* num_draft_tokens;  // [batch], valid nodes of each request
  const int32_t* qo_lens;           // [batch], rows of this step: the root and its nodes last
  const int32_t* kv_lens;           // [batch], including these rows
  const int32_t* kv_indptr;         // [batch + 1], in pages
  const int32_t* kv_indices;        // [num_indices], page ids
  const int32_t* spare_pages;       // [num_spare_pages], that hold nothing
  int64_t batch;
  int64_t nodes;
  int64_t num_indices;
  int64_t num_spare_pages;
  int64_t page_size;
};

// Arrays of what the trees turned out to have, in order of requests and of their rows.
struct TreeChains {
  std::vector<int32_t> chain_indptr;  // [batch + 1], chains of each request
  std::vector<int32_t> qo_lens;       // [chains]
  std::vector<int32_t> kv_lens;       // [chains]
  std::vector<int32_t> kv_indptr;     // [chains + 1]
  std::vector<int32_t> kv_indices;    // [pages]
  std::vector<int64_t> from_slots;    // [copies]
  std::vector<int64_t> to_slots;      // [copies]
};

// A value that makes no tree: "argument[element] must be expected, got it". Empty argument: none.
struct TreeFault {
  std::string argument, expected;
  int64_t got = 0;
};

TreeFault find_tree_chains(const TreeChainsParams& params, TreeChains& chains);

}  // namespace specops
