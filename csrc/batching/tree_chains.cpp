// SPDX-License-Identifier: Apache-2.0
#include "batching/tree_chains.h"

#include <algorithm>

namespace specops {
namespace {

std::string element(const char* name, int64_t i) {
  return std::string(name) + "[" + std::to_string(i) + "]";
}

// Walks one request's tree. A chain ends where the next node is no child of the node before it.
class TreeWalk {
 public:
  TreeWalk(const TreeChainsParams& params, int64_t batch_idx, int64_t& used_pages)
      : params_(params),
        parents_(params.parents + batch_idx * params.nodes),
        num_nodes_(params.num_draft_tokens[batch_idx]),
        qo_len_(params.qo_lens[batch_idx]),
        root_(params.kv_lens[batch_idx] - 1 - num_nodes_),
        pages_(params.kv_indices + params.kv_indptr[batch_idx]),
        used_pages_(used_pages) {}

  // Returns the first node whose parent is not on the path to the node before it, or -1.
  int64_t write(TreeChains& out) {
    int32_t node = 0;
    for (bool is_first = true; is_first || node < num_nodes_; is_first = false) {
      if (node < num_nodes_ && !climb_to(parents_[node])) return node;
      size_t begin = path_.size();
      while (node < num_nodes_ && (path_.size() == begin || parents_[node] == node - 1)) {
        path_.push_back(node++);
      }
      write_chain(out, is_first, static_cast<int64_t>(begin));
    }
    return -1;
  }

 private:
  // Shortens the path to end at the node, or at the root for -1. Returns false if the node is not
  // on it.
  bool climb_to(int32_t node) {
    while (!path_.empty() && path_.back() != node) path_.pop_back();
    return !path_.empty() || node == -1;
  }

  int64_t slot_of(int64_t token) const {
    return pages_[token / params_.page_size] * params_.page_size + token % params_.page_size;
  }

  // Writes the chain of the path; its nodes from depth `begin` on are the chain's own rows.
  void write_chain(TreeChains& out, bool is_first, int64_t begin) {
    auto depth = static_cast<int64_t>(path_.size());
    int64_t kv_len = root_ + 1 + depth, own = depth - begin;
    out.qo_lens.push_back(static_cast<int32_t>(is_first ? qo_len_ - num_nodes_ + own : own));
    out.kv_lens.push_back(static_cast<int32_t>(kv_len));
    int64_t end_page = (kv_len + params_.page_size - 1) / params_.page_size;
    int64_t first_page = is_first ? end_page : first_own_page();
    out.kv_indices.insert(out.kv_indices.end(), pages_, pages_ + first_page);
    for (int64_t page = first_page; page < end_page; ++page) {
      bool is_there = used_pages_ < params_.num_spare_pages;
      int32_t spare = is_there ? params_.spare_pages[used_pages_] : 0;
      ++used_pages_;
      out.kv_indices.push_back(spare);
      int64_t end = std::min(kv_len, (page + 1) * params_.page_size);
      for (int64_t token = page * params_.page_size; token < end; ++token) {
        int64_t lies_at = token <= root_ ? token : root_ + 1 + path_[token - root_ - 1];
        out.from_slots.push_back(slot_of(lies_at));
        out.to_slots.push_back(spare * params_.page_size + token % params_.page_size);
      }
    }
    out.kv_indptr.push_back(static_cast<int32_t>(out.kv_indices.size()));
  }

  // Returns the first page in which the request's own pages do not hold the path.
  int64_t first_own_page() const {
    size_t in_place = 0;
    while (in_place < path_.size() && path_[in_place] == static_cast<int32_t>(in_place)) {
      ++in_place;
    }
    return (root_ + 1 + static_cast<int64_t>(in_place)) / params_.page_size;
  }

  const TreeChainsParams& params_;
  const int32_t* parents_;
  int32_t num_nodes_, qo_len_;
  int64_t root_;  // position of the root
  const int32_t* pages_;
  int64_t& used_pages_;
  std::vector<int32_t> path_;  // nodes from below the root to the last one
};

TreeFault find_fault(const TreeChainsParams& params, int64_t b) {
  int64_t nodes = params.num_draft_tokens[b], rows = params.qo_lens[b], kv_len = params.kv_lens[b];
  if (nodes < 0 || nodes > params.nodes) {
    return {element("num_draft_tokens", b),
            "at least 0 and at most the width of parents=" + std::to_string(params.nodes),
            nodes};
  }
  if (rows < 0 || (nodes > 0 && rows <= nodes)) {
    return {element("qo_lens", b),
            "0, or more than the request's nodes=" + std::to_string(nodes),
            rows};
  }
  if (rows == 0) return {};
  int64_t begin = params.kv_indptr[b], end = params.kv_indptr[b + 1];
  if (begin < 0 || end < begin || end > params.num_indices) {
    return {element("kv_indptr", b + 1),
            "at least the entry before it=" + std::to_string(begin) +
                " and at most the size of kv_indices=" + std::to_string(params.num_indices),
            end};
  }
  if (kv_len < rows || kv_len > (end - begin) * params.page_size) {
    return {element("kv_lens", b),
            "at least the request's rows=" + std::to_string(rows) +
                " and at most the slots of its pages=" +
                std::to_string((end - begin) * params.page_size),
            kv_len};
  }
  return {};
}

}  // namespace

// Starts a new chain at every node that is no child of the node before it. A chain uses the
// request's pages up to the first page in which its tokens are not consecutive there, then spare
// pages.
// Cost:    a few integers per node, page list entry and token copied.
// Assumes: arrays have the sizes above.
TreeFault find_tree_chains(const TreeChainsParams& params, TreeChains& chains) {
  chains.chain_indptr.assign(1, 0);
  chains.kv_indptr.assign(1, 0);
  int64_t used_pages = 0;
  for (int64_t b = 0; b < params.batch; ++b) {
    TreeFault fault = find_fault(params, b);
    if (!fault.argument.empty()) return fault;
    if (params.qo_lens[b] > 0) {
      int64_t node = TreeWalk(params, b, used_pages).write(chains);
      if (node >= 0) {
        std::string name = "parents[" + std::to_string(b) + ", " + std::to_string(node) + "]";
        return {name,
                "-1, or the node before it, or one on the path to that one (preorder)",
                params.parents[b * params.nodes + node]};
      }
    }
    chains.chain_indptr.push_back(static_cast<int32_t>(chains.qo_lens.size()));
  }
  if (used_pages <= params.num_spare_pages) return {};
  return {"spare_pages", "at least " + std::to_string(used_pages), params.num_spare_pages};
}

}  // namespace specops
