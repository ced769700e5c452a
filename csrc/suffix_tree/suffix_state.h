// SPDX-License-Identifier: Apache-2.0
// State of a SuffixTree and its invariants. check_integrity (suffix_check.cpp) checks each
// invariant under its number.
//
// The tree contains the window of every position: the tokens from the position on, at most
// max_depth of them, up to the end of the sequence.
//  1. The nodes are exactly the strings that occur at least twice and have no continuation by one
//  token that occurs as often (because windows end there, or because they branch). Hence a set of
//  windows has exactly one tree.
//  2. A string that occurs once has no node. It is a leaf, identified by its start; its end follows
//  from the text.
//  3. home[position] is the node at which the position's window ends, or the parent of its leaf.
//  4. A node's count is the number of windows that pass through it or end at it; its ref is the
//  start of the youngest of them. Text is read there: the edge to a node is the tokens [parent's
//  depth, depth) from ref on.
//  5. best, best_count and second are as child_table.h says. The root does not maintain them.
//  6. The active windows of a live sequence are those that end both at its end and at a node. They
//  are the windows of its last num_active positions, because if a suffix occurs elsewhere, so does
//  every shorter one.
//  7. Removed sequences are older than all others. The first position of the oldest sequence is
//  therefore the oldest of all, and if it is the ref of a node, the node has no other window; so
//  removing it never changes a ref.
//  8. Each block, node and slot is either in use or on its free list, never both.
#pragma once

#include <cstdint>
#include <vector>

#include "suffix_tree/child_table.h"
#include "suffix_tree/grow_array.h"
#include "suffix_tree/root_table.h"
#include "suffix_tree/suffix_tree.h"
#include "suffix_tree/token_blocks.h"

namespace specops {

constexpr int32_t kRoot = 0;

struct Sequence {
  int64_t order;  // in starting order
  int32_t first_block;
  int32_t last_block;
  int32_t begin;   // index of the first token that is not reclaimed
  int32_t length;  // index past the last token
  int32_t first_active;
  int32_t num_active;
  int32_t older;  // neighbor by start, -1: none; if free: the next free handle
  int32_t younger;
  int16_t in_use;
  int16_t is_live;  // whether tokens may be appended
  int16_t is_removed;
  int16_t unused;
  // Number of tokens by which the longest match of the last draft began before the sequence. It is
  // only a hint where to begin the next search. Readers write it.
  mutable int32_t reach;
  int32_t unused2;
};

struct SuffixTree::State {
  explicit State(int32_t depth) : max_depth(depth) { clear(); }

  void clear();

  int32_t ref(int32_t child) const { return child >= 0 ? nodes[child].ref : ~child; }
  int32_t count(int32_t child) const { return child >= 0 ? nodes[child].count : 1; }
  int32_t find_child(int32_t node, int32_t token) const {
    return node == kRoot ? root.find(token) : table.find(nodes[node], token);
  }
  template <typename Function>
  void for_each_child(int32_t node, Function&& function) const {
    if (node == kRoot) {
      root.for_each(function);
    } else {
      table.for_each(nodes[node], function);
    }
  }
  bool is_younger(int32_t position, int32_t than) const {
    return text.age(position) > text.age(than);
  }
  // Returns the number of tokens from a position to the end of its sequence.
  int32_t num_following(int32_t position) const {
    return sequences[static_cast<size_t>(text.owner(position))].length - text.index(position);
  }
  int32_t window_length(int32_t position) const {
    const int32_t size = num_following(position);
    return size < max_depth ? size : max_depth;
  }

  // Prefetches what extend_suffix reads of a child.
  void prefetch_child(int32_t child) const {
    if (child >= 0) {
      __builtin_prefetch(&nodes[child]);
    } else if (child != kNone) {
      __builtin_prefetch(&text.home_[~child]);
    }
  }

  void push_token(int32_t handle, int32_t token);
  bool slide(int32_t node, int32_t child);
  int32_t extend_suffix(int32_t node, int32_t child, int32_t start, int32_t token);
  bool adopt_leaf(int32_t node, int32_t start);
  int32_t new_node();
  void free_node(int32_t node);
  void add_leaf(int32_t node, int32_t token, int32_t start);
  void raise_child(int32_t node, int32_t old_child, int32_t child);
  void find_best(int32_t node);
  void replace_child(int32_t node, int32_t child);

  void remove_window(int32_t position);
  void remove_first(Sequence& sequence);
  void remove_now(int32_t handle);
  void repoint(int32_t handle);
  void release(int32_t handle);
  int64_t reclaim(int64_t max_positions);

  std::string check_integrity() const;
  void check_indices() const;

  int32_t max_depth;
  TokenBlocks text;
  GrowArray<Node> nodes;
  ChildTable table;  // children of all nodes except the root
  RootTable root;
  std::vector<Sequence> sequences;
  int64_t next_order;
  int32_t oldest;
  int32_t youngest;
  int32_t free_handle;
  int32_t free_node_head;
  int64_t num_free_nodes;
  int64_t num_sequences;
  int64_t num_tokens;
  int64_t num_pending;

  struct Suffix {
    int32_t start;
    int32_t node;
    int32_t child;
  };
  std::vector<Suffix> scratch;
};

}  // namespace specops
