// SPDX-License-Identifier: Apache-2.0
// find_shared_prefixes: finds requests that begin with the same pages, as groups within groups.
#pragma once

#include <cstdint>

namespace specops {

struct SharedPrefixesParams {
  const int32_t* kv_indptr;   // [batch + 1], in pages
  const int32_t* kv_indices;  // page ids
  int64_t batch;
  int64_t leaf_pages;   // pages per leaf; groups share whole leaves
  int64_t leaf_tokens;  // tokens per leaf
  int64_t max_levels;
  int32_t* order;           // [batch]
  int32_t* prefix_leaders;  // [max_levels, batch]
  int32_t* prefix_lens;     // [max_levels, batch], tokens
};

struct SharedPrefixesFound {
  int64_t num_levels = 0;
  int64_t num_saved_tokens = 0;
};

SharedPrefixesFound find_shared_prefixes(const SharedPrefixesParams& params);

}  // namespace specops
