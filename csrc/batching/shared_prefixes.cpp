// SPDX-License-Identifier: Apache-2.0
#include "batching/shared_prefixes.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

namespace specops {
namespace {

// Requests with positions [begin, end) in the order that share a prefix of `leaves` leaves.
struct Group {
  int64_t begin, end, leaves;
};

// The sorted page lists: lists with equal beginnings are neighbors, so every group is a run of
// them.
class SortedLists {
 public:
  explicit SortedLists(const SharedPrefixesParams& params) : params_(params) {
    std::iota(params.order, params.order + params.batch, 0);
    std::sort(params.order, params.order + params.batch, [this](int32_t a, int32_t b) {
      int64_t alike = common_pages(a, b), left = size(a), right = size(b);
      if (alike < left && alike < right) return pages(a)[alike] < pages(b)[alike];
      return left != right ? left < right : a < b;
    });
    common_.assign(static_cast<size_t>(params.batch), 0);
    for (int64_t place = 1; place < params.batch; ++place) {
      int64_t alike = common_pages(params.order[place - 1], params.order[place]);
      common_[static_cast<size_t>(place)] = alike / params.leaf_pages;
    }
  }

  // Returns the leaves shared by the requests at `place` and at the position before it.
  int64_t common(int64_t place) const { return common_[static_cast<size_t>(place)]; }

 private:
  const int32_t* pages(int32_t request) const {
    return params_.kv_indices + params_.kv_indptr[request];
  }
  int64_t size(int32_t request) const {
    return params_.kv_indptr[request + 1] - params_.kv_indptr[request];
  }
  // Returns the number of equal pages at the start of two lists.
  int64_t common_pages(int32_t a, int32_t b) const {
    constexpr int64_t kBlock = 8;  // pages per comparison
    const int32_t *left = pages(a), *right = pages(b);
    int64_t count = 0, most = std::min(size(a), size(b));
    while (count + kBlock <= most &&
           std::memcmp(left + count, right + count, kBlock * sizeof(int32_t)) == 0) {
      count += kBlock;
    }
    while (count < most && left[count] == right[count]) ++count;
    return count;
  }

  const SharedPrefixesParams& params_;
  std::vector<int64_t> common_;
};

// Adds the longest runs within a group that share more leaves than the group does.
void add_groups_within(const SortedLists& lists, const Group& group, std::vector<Group>& groups) {
  int64_t first = group.begin, least = 0;
  for (int64_t place = group.begin + 1; place <= group.end; ++place) {
    int64_t common = place < group.end ? lists.common(place) : 0;
    if (common > group.leaves) {
      least = least == 0 ? common : std::min(least, common);
      continue;
    }
    if (least > 0) groups.push_back({first, place, least});
    first = place;
    least = 0;
  }
}

}  // namespace

SharedPrefixesFound find_shared_prefixes(const SharedPrefixesParams& params) {
  SharedPrefixesFound found;
  SortedLists lists(params);
  std::vector<Group> groups{{0, params.batch, 0}}, inner;
  for (; found.num_levels < params.max_levels; ++found.num_levels) {
    inner.clear();
    for (const Group& group : groups) {
      size_t known = inner.size();
      add_groups_within(lists, group, inner);
      for (size_t i = known; i < inner.size(); ++i) {
        int64_t more = inner[i].leaves - group.leaves;
        found.num_saved_tokens += (inner[i].end - inner[i].begin - 1) * more * params.leaf_tokens;
      }
    }
    if (inner.empty()) break;
    groups.swap(inner);
    int32_t* leaders = params.prefix_leaders + found.num_levels * params.batch;
    int32_t* lens = params.prefix_lens + found.num_levels * params.batch;
    std::iota(leaders, leaders + params.batch, 0);
    std::fill(lens, lens + params.batch, 0);
    for (const Group& group : groups) {
      std::fill(leaders + group.begin, leaders + group.end, static_cast<int32_t>(group.begin));
      auto tokens = static_cast<int32_t>(group.leaves * params.leaf_tokens);
      std::fill(lens + group.begin, lens + group.end, tokens);
    }
  }
  return found;
}

}  // namespace specops
