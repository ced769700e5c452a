// SPDX-License-Identifier: Apache-2.0
// The nodes of a suffix tree, and the children of each node: no child; one child, stored in the
// node itself; up to 8 children in a short list; or more in a hash table with linear probing. Lists
// and tables are allocated from one array of slots, with a free list for each size.
#pragma once

#include <climits>
#include <cstdint>

#include "suffix_tree/grow_array.h"

namespace specops {

// A child is the index of a node, or ~start for a leaf that begins at position `start`. kNone is
// never a child.
constexpr int32_t kNone = INT32_MIN;

struct Node {
  int32_t count;       // occurrences of the string
  int32_t ref;         // start of the youngest occurrence of the string
  int32_t parent;      // parent node; of a free node: the next free node
  int16_t depth;       // tokens from the root
  int16_t kind;        // ChildTable::Kind, or log2(number of slots) + 1; -1: free
  int32_t children;    // first slot; if there is one child: its token
  int32_t best;        // the most frequent child, on a tie the youngest; kNone: no child
  int32_t best_count;  // occurrences of `best`
  int32_t second;      // upper bound on the occurrences of any other child
};
static_assert(sizeof(Node) == 32);

struct ChildSlot {
  int32_t token;  // -1: empty
  int32_t child;
};

class ChildTable {
 public:
  enum Kind : int16_t { kFree = -1, kNoChild = 0, kOneChild = 1, kFirstList = 2, kLastList = 4 };
  static constexpr int kNumKinds = 32;

  ChildTable() { clear(); }

  void clear() {
    slots_.clear();
    num_free_slots_ = 0;
    for (int32_t& head : free_) {
      head = -1;
    }
  }

  int32_t find(const Node& node, int32_t token) const {
    if (node.kind <= kOneChild) {
      return node.kind == kOneChild && node.children == token ? node.best : kNone;
    }
    const ChildSlot* slot = find_slot(node, token);
    return slot == nullptr ? kNone : slot->child;
  }

  // Prefetches what `find` reads of a list or a hash table.
  void prefetch(const Node& node, int32_t token) const {
    if (node.kind > kLastList) {
      __builtin_prefetch(&slots_[node.children + 1 + hash(token, hash_shift(node.kind))]);
    } else if (node.kind > kOneChild) {
      __builtin_prefetch(&slots_[node.children]);
    }
  }

  // Replaces the child at a token, which must be present.
  void replace(Node& node, int32_t token, int32_t child) {
    if (node.kind == kOneChild) {
      node.best = child;
    } else {
      const_cast<ChildSlot*>(find_slot(node, token))->child = child;
    }
  }

  // Inserts a child at a token, which must be absent. Sets `best` only if the node had no child.
  void insert(Node& node, int32_t token, int32_t child) {
    if (node.kind == kNoChild) {
      node.kind = kOneChild;
      node.children = token;
      node.best = child;
      return;
    }
    if (node.kind == kOneChild) {
      const ChildSlot only{node.children, node.best};
      node.children = allocate(kFirstList);
      node.kind = kFirstList;
      slots_[node.children] = only;
      slots_[node.children + 1] = {token, child};
      return;
    }
    if (node.kind <= kLastList) {
      const int32_t capacity = num_slots(node.kind);
      for (int32_t i = 0; i < capacity; ++i) {
        ChildSlot& slot = slots_[node.children + i];
        if (slot.token < 0) {
          slot = {token, child};
          return;
        }
      }
      rebuild(node, static_cast<int16_t>(node.kind + 1));
      insert(node, token, child);
      return;
    }
    ChildSlot& header = slots_[node.children];
    if ((header.child + 1) * int64_t{4} > num_slots(node.kind) * int64_t{3}) {
      rebuild(node, static_cast<int16_t>(node.kind + 1));
      insert(node, token, child);
      return;
    }
    ++header.child;
    put(&slots_[node.children + 1], num_slots(node.kind) - 1, hash_shift(node.kind), token, child);
  }

  // Erases the child at a token, which must be present. If one child remains, it becomes `best`;
  // otherwise `best` does not change.
  void erase(Node& node, int32_t token) {
    if (node.kind == kOneChild) {
      node.kind = kNoChild;
      node.children = 0;
      node.best = kNone;
      return;
    }
    ChildSlot* slot = const_cast<ChildSlot*>(find_slot(node, token));
    if (node.kind <= kLastList) {
      ChildSlot* const first = &slots_[node.children];
      int32_t size = 0;
      while (size < num_slots(node.kind) && first[size].token >= 0) {
        ++size;
      }
      *slot = first[size - 1];
      first[size - 1] = {-1, kNone};
      if (size == 2) {
        const ChildSlot only = first[0];
        release(node.children, node.kind);
        node.kind = kOneChild;
        node.children = only.token;
        node.best = only.child;
      } else if (node.kind == kLastList && size == 4) {
        rebuild(node, static_cast<int16_t>(node.kind - 1));
      }
      return;
    }
    // Moves up the entries that collisions had placed after the erased one.
    ChildSlot* const table = &slots_[node.children + 1];
    const int32_t mask = num_slots(node.kind) - 1;
    const int shift = hash_shift(node.kind);
    int32_t hole = static_cast<int32_t>(slot - table);
    for (int32_t i = (hole + 1) & mask; table[i].token >= 0; i = (i + 1) & mask) {
      const int32_t wanted = hash(table[i].token, shift);
      if (((i - wanted) & mask) >= ((i - hole) & mask)) {
        table[hole] = table[i];
        hole = i;
      }
    }
    table[hole] = {-1, kNone};
    const int32_t size = --slots_[node.children].child;
    if (size <= num_slots(node.kind) / 4) {
      rebuild(node, static_cast<int16_t>(node.kind - 1));
    }
  }

  void drop_all(Node& node) {
    if (node.kind > kOneChild) {
      release(node.children, node.kind);
    }
    node.kind = kNoChild;
    node.children = 0;
    node.best = kNone;
  }

  template <typename Function>
  void for_each(const Node& node, Function&& function) const {
    any_of(node, [&](int32_t token, int32_t child) {
      function(token, child);
      return false;
    });
  }

  // Calls the function for each child, up to the first for which it returns true.
  template <typename Function>
  bool any_of(const Node& node, Function&& function) const {
    if (node.kind == kOneChild) {
      return function(node.children, node.best);
    }
    if (node.kind == kNoChild) {
      return false;
    }
    const ChildSlot* const first = &slots_[node.children + (node.kind > kLastList ? 1 : 0)];
    for (int32_t i = 0; i < num_slots(node.kind); ++i) {
      if (first[i].token >= 0) {
        if (function(first[i].token, first[i].child)) {
          return true;
        }
      } else if (node.kind <= kLastList) {
        return false;
      }
    }
    return false;
  }

  static int32_t num_slots(int16_t kind) { return int32_t{1} << (kind - 1); }
  // Returns the number of slots to allocate. A hash table has one more slot, whose `child` is its
  // number of children.
  static int32_t allocated_slots(int16_t kind) {
    return num_slots(kind) + (kind > kLastList ? 1 : 0);
  }

  static int32_t hash(int32_t token, int shift) {
    return static_cast<int32_t>((static_cast<uint32_t>(token) * 0x9E3779B1u) >> shift);
  }
  static int hash_shift(int16_t kind) { return 32 - (kind - 1); }

  int64_t num_bytes() const { return slots_.num_bytes(); }
  int64_t num_unused_bytes() const {
    return num_free_slots_ * static_cast<int64_t>(sizeof(ChildSlot));
  }

  const ChildSlot* find_slot(const Node& node, int32_t token) const {
    const ChildSlot* first = &slots_[node.children];
    if (node.kind <= kLastList) {
      const int32_t capacity = num_slots(node.kind);
      for (int32_t i = 0; i < capacity; ++i) {
        if (first[i].token == token) {
          return first + i;
        }
      }
      return nullptr;
    }
    ++first;
    const int32_t mask = num_slots(node.kind) - 1;
    for (int32_t i = hash(token, hash_shift(node.kind));; i = (i + 1) & mask) {
      if (first[i].token == token) {
        return first + i;
      }
      if (first[i].token < 0) {
        return nullptr;
      }
    }
  }

  GrowArray<ChildSlot> slots_;
  int32_t free_[kNumKinds];  // per kind: first free list or table; the next one is in `child`
  int64_t num_free_slots_ = 0;

 private:
  static void put(ChildSlot* table, int32_t mask, int shift, int32_t token, int32_t child) {
    int32_t i = hash(token, shift);
    while (table[i].token >= 0) {
      i = (i + 1) & mask;
    }
    table[i] = {token, child};
  }

  int32_t allocate(int16_t kind) {
    const int32_t size = allocated_slots(kind);
    int32_t first = free_[kind];
    if (first >= 0) {
      free_[kind] = slots_[first].child;
      num_free_slots_ -= size;
    } else {
      first = static_cast<int32_t>(slots_.size());
      slots_.resize(slots_.size() + size);
    }
    for (int32_t i = 0; i < size; ++i) {
      slots_[first + i] = {-1, kNone};
    }
    return first;
  }

  void release(int32_t first, int16_t kind) {
    slots_[first] = {-1, free_[kind]};
    free_[kind] = first;
    num_free_slots_ += allocated_slots(kind);
  }

  void rebuild(Node& node, int16_t kind) {
    const Node old = node;
    node.children = allocate(kind);
    node.kind = kind;
    int32_t size = 0;
    const bool is_list = kind <= kLastList;
    const int32_t first = node.children + (is_list ? 0 : 1);
    for_each(old, [&](int32_t token, int32_t child) {
      if (is_list) {
        slots_[first + size] = {token, child};
      } else {
        put(&slots_[first], num_slots(kind) - 1, hash_shift(kind), token, child);
      }
      ++size;
    });
    if (!is_list) {
      slots_[node.children] = {-1, size};
    }
    release(old.children, old.kind);
  }
};

}  // namespace specops
