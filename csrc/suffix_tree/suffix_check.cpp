// SPDX-License-Identifier: Apache-2.0
// Checks the invariants of suffix_state.h, by number, against the text. Every count is computed
// again.
#include <algorithm>
#include <string>
#include <vector>

#include "suffix_tree/suffix_state.h"

namespace specops {
namespace {

class Check {
 public:
  explicit Check(const SuffixTree::State& state) : state_(state) {}

  std::string run() {
    check_free_lists();
    check_sequences();
    if (error_.empty()) {
      check_structure();
    }
    if (error_.empty()) {
      check_windows();
    }
    if (error_.empty()) {
      check_counts();
    }
    if (error_.empty()) {
      check_active();
    }
    return error_;
  }

 private:
  template <typename... Parts>
  void expect(bool is_right, Parts... parts) {
    if (!is_right && error_.empty()) {
      ((error_ += to_text(parts)), ...);
    }
  }
  static std::string to_text(const char* text) { return text; }
  static std::string to_text(int64_t number) { return std::to_string(number); }

  int32_t num_nodes() const { return static_cast<int32_t>(state_.nodes.size()); }

  // Checks invariant 8 for free lists.
  void check_free_lists() {
    slot_in_use_.assign(static_cast<size_t>(state_.table.slots_.size()), 0);
    int64_t num_free = 0;
    for (int32_t node = state_.free_node_head; node >= 0 && error_.empty();
         node = state_.nodes[node].parent) {
      expect(state_.nodes[node].kind == ChildTable::kFree, "node ", node, " is free and in use");
      expect(++num_free <= state_.nodes.size(), "the list of free nodes does not end");
    }
    expect(num_free == state_.num_free_nodes, "free nodes: ", num_free);
    num_free = 0;
    for (int32_t block = state_.text.free_block_; block >= 0 && error_.empty();
         block = state_.text.blocks_[block].next) {
      expect(state_.text.blocks_[block].owner < 0, "block ", block, " is free and in use");
      expect(++num_free <= state_.text.blocks_.size(), "the list of free blocks does not end");
    }
    expect(num_free == state_.text.num_free_, "free blocks: ", num_free);
    num_free = 0;
    for (int kind = ChildTable::kFirstList; kind < ChildTable::kNumKinds; ++kind) {
      int32_t first = state_.table.free_[kind];
      while (first >= 0) {
        num_free += take_slots(first, static_cast<int16_t>(kind));
        if (!error_.empty()) {
          return;
        }
        first = state_.table.slots_[first].child;
      }
    }
    expect(num_free == state_.table.num_free_slots_, "free slots: ", num_free);
  }

  int64_t take_slots(int32_t first, int16_t kind) {
    const int32_t size = ChildTable::allocated_slots(kind);
    expect(first >= 0 && first + int64_t{size} <= state_.table.slots_.size(), "slots out of range");
    for (int32_t i = first; i < first + size && error_.empty(); ++i) {
      expect(slot_in_use_[static_cast<size_t>(i)]++ == 0, "slot ", i, " is in use twice");
    }
    return size;
  }

  // Checks invariants 7 and 8 for blocks and for the order of sequences.
  void check_sequences() {
    int64_t num_sequences = 0, num_tokens = 0, num_pending = 0, num_blocks = 0;
    int32_t previous = -1;
    for (int32_t handle = state_.oldest; handle >= 0 && error_.empty();) {
      const Sequence& sequence = state_.sequences[static_cast<size_t>(handle)];
      expect(sequence.in_use == 1, "sequence ", handle, " is not in use");
      expect(sequence.older == previous, "sequence ", handle, " has a wrong neighbor");
      if (previous >= 0) {
        const Sequence& older = state_.sequences[static_cast<size_t>(previous)];
        expect(older.order < sequence.order, "sequence ", handle, " is out of order");
        expect(older.is_removed || !sequence.is_removed, "sequence ", handle, " is pending");
      }
      expect(sequence.order < state_.next_order, "sequence ", handle, " comes from the future");
      expect(!sequence.is_live || (sequence.begin == 0 && !sequence.is_removed),
             "sequence ",
             handle,
             " is live and removed");
      const int32_t size = sequence.length - sequence.begin;
      num_sequences += !sequence.is_removed;
      (sequence.is_removed ? num_pending : num_tokens) += size;
      int32_t index = sequence.begin;
      int32_t last = -1;
      for (int32_t block = size > 0 ? sequence.first_block : -1; block >= 0 && error_.empty();
           block = state_.text.blocks_[block].next) {
        const Block& it = state_.text.blocks_[block];
        expect(it.owner == handle, "block ", block, " has another owner");
        expect(it.prev == last, "block ", block, " has a wrong neighbor");
        expect(it.age == (sequence.order << TokenBlocks::kIndexBits) +
                             index / kBlockTokens * kBlockTokens,
               "block ",
               block,
               " has a wrong age");
        expect(index < sequence.length, "sequence ", handle, " has too many blocks");
        for (; index < sequence.length; ++index) {
          const int32_t offset = index & (kBlockTokens - 1);
          const int32_t position = block * kBlockTokens + offset;
          expect(state_.text.text_[position] >= 0, "position ", position, " has no token");
          positions_.push_back(position);
          if (offset + 1 == kBlockTokens) {
            ++index;
            break;
          }
          expect(index + 1 < sequence.length || state_.text.text_[position + 1] == kEnd,
                 "sequence ",
                 handle,
                 " has no end");
        }
        last = block;
        ++num_blocks;
      }
      expect(size == 0 || (index == sequence.length && last == sequence.last_block),
             "sequence ",
             handle,
             " has too few blocks");
      previous = handle;
      handle = sequence.younger;
    }
    expect(previous == state_.youngest, "the youngest sequence is another");
    expect(num_sequences == state_.num_sequences, "sequences: ", num_sequences);
    expect(num_tokens == state_.num_tokens, "tokens: ", num_tokens);
    expect(num_pending == state_.num_pending, "pending tokens: ", num_pending);
    expect(num_blocks + state_.text.num_free_ == state_.text.blocks_.size(), "a block is lost");
  }

  // Checks invariants 1, 4, 5 and 8 as far as a node and its children show them.
  void check_structure() {
    num_windows_.assign(static_cast<size_t>(num_nodes()), 0);
    youngest_.assign(static_cast<size_t>(num_nodes()), -1);
    std::vector<int32_t> open{kRoot};
    int64_t num_slots = 0;
    while (!open.empty() && error_.empty()) {
      const int32_t index = open.back();
      open.pop_back();
      order_.push_back(index);
      const Node& node = state_.nodes[index];
      expect(node.kind != ChildTable::kFree, "node ", index, " is free and in use");
      if (node.kind >= ChildTable::kFirstList) {
        num_slots += take_slots(node.children, node.kind);
      }
      int32_t best = kNone, second = 0, num_children = 0;
      int64_t sum = 0;
      state_.for_each_child(index, [&](int32_t token, int32_t child) {
        ++num_children;
        if (!error_.empty()) {
          return;
        }
        expect(child < num_nodes(), "node ", index, " has a child out of range");
        expect(child >= 0 || state_.text.owner(~child) >= 0, "node ", index, " has a dead leaf");
        const int32_t child_count = state_.count(child);
        const int32_t start = state_.ref(child);
        sum += child_count;
        expect(state_.text.owner(start) >= 0, "node ", child, " refers to text that is gone");
        expect(state_.text.token(start, node.depth) == token, "node ", index, ": a wrong token");
        expect(state_.find_child(index, token) == child, "node ", index, ": a child is not found");
        for (int32_t i = 0; i < node.depth; ++i) {
          expect(state_.text.token(start, i) == state_.text.token(node.ref, i),
                 "node ",
                 index,
                 ": a child of another text");
        }
        if (child >= 0) {
          const Node& it = state_.nodes[child];
          expect(it.parent == index, "node ", child, " has a wrong parent");
          expect(it.depth > node.depth && it.depth <= state_.max_depth, "node ", child, ": depth");
          expect(it.count >= 2, "node ", child, " occurs once");
          open.push_back(child);
        } else {
          expect(state_.text.home_[~child] == index, "position ", ~child, " has a wrong home");
        }
        expect(index == kRoot || child_count < node.count, "node ", index, " is not needed");
        if (best == kNone || child_count > state_.count(best) ||
            (child_count == state_.count(best) && state_.is_younger(start, state_.ref(best)))) {
          second = best == kNone ? 0 : state_.count(best);
          best = child;
        } else {
          second = child_count > second ? child_count : second;
        }
      });
      expect(sum <= node.count, "node ", index, " has more children than occurrences");
      expect(num_children == 0 || node.depth < state_.max_depth, "node ", index, " is too deep");
      expect((num_children != 0 && index != kRoot) || node.kind == ChildTable::kNoChild,
             "node ",
             index,
             ": kind");
      expect(num_children != 1 || node.kind == ChildTable::kOneChild || index == kRoot,
             "node ",
             index,
             ": kind of one child");
      if (index != kRoot && num_children > 0) {
        expect(node.best == best, "node ", index, " has another best child");
        expect(node.best_count == state_.count(best), "node ", index, ": count of its best child");
        expect(node.second >= second, "node ", index, ": bound of its other children");
      }
    }
    expect(static_cast<int64_t>(order_.size()) + state_.num_free_nodes == state_.nodes.size(),
           "a node is lost");
    expect(num_slots + state_.table.num_free_slots_ == state_.table.slots_.size(),
           "a slot is lost");
  }

  // Checks invariants 2 and 3.
  void check_windows() {
    for (const int32_t position : positions_) {
      const int32_t home = state_.text.home_[position];
      expect(home >= 0 && home < num_nodes(), "position ", position, " has no home");
      if (!error_.empty()) {
        return;
      }
      const Node& node = state_.nodes[home];
      expect(node.kind != ChildTable::kFree, "position ", position, " has a free node as its home");
      const int32_t size = state_.window_length(position);
      expect(node.depth <= size, "position ", position, " has too deep a home");
      for (int32_t i = 0; i < node.depth && error_.empty(); ++i) {
        expect(state_.text.token(position, i) == state_.text.token(node.ref, i),
               "position ",
               position,
               " has a home of another text");
      }
      if (node.depth < size) {
        expect(state_.find_child(home, state_.text.token(position, node.depth)) == ~position,
               "position ",
               position,
               " is no leaf of its home");
      }
      ++num_windows_[static_cast<size_t>(home)];
      int32_t& youngest = youngest_[static_cast<size_t>(home)];
      if (youngest < 0 || state_.is_younger(position, youngest)) {
        youngest = position;
      }
    }
  }

  // Checks invariant 4. In order_, every parent comes before its children.
  void check_counts() {
    for (size_t i = order_.size(); i-- > 0 && error_.empty();) {
      const int32_t index = order_[i];
      const Node& node = state_.nodes[index];
      expect(node.count == num_windows_[static_cast<size_t>(index)], "node ", index, ": count");
      if (index == kRoot) {
        continue;
      }
      expect(node.ref == youngest_[static_cast<size_t>(index)], "node ", index, ": youngest");
      num_windows_[static_cast<size_t>(node.parent)] += node.count;
      int32_t& youngest = youngest_[static_cast<size_t>(node.parent)];
      if (youngest < 0 || state_.is_younger(node.ref, youngest)) {
        youngest = node.ref;
      }
    }
  }

  // Checks invariant 6.
  void check_active() {
    for (const int32_t position : positions_) {
      const Sequence& sequence = state_.sequences[static_cast<size_t>(state_.text.owner(position))];
      if (!sequence.is_live) {
        continue;
      }
      const int32_t size = sequence.length - state_.text.index(position);
      const bool is_active =
          size <= state_.max_depth && state_.nodes[state_.text.home_[position]].depth == size;
      expect(is_active == (size <= sequence.num_active),
             "position ",
             position,
             is_active ? " is not active" : " is active");
      expect(size != sequence.num_active || position == sequence.first_active,
             "position ",
             position,
             " is not the first active one");
    }
  }

  const SuffixTree::State& state_;
  std::string error_;
  std::vector<int32_t> positions_;  // of all sequences
  std::vector<int32_t> order_;      // nodes
  std::vector<int32_t> num_windows_;
  std::vector<int32_t> youngest_;
  std::vector<char> slot_in_use_;
};

}  // namespace

std::string SuffixTree::State::check_integrity() const { return Check(*this).run(); }

// Checks for damage to a file that could cause reads out of bounds or endless loops. Does not check
// that the tree is correct.
void SuffixTree::State::check_indices() const {
  const int64_t num_blocks = text.blocks_.size();
  const int64_t num_positions = num_blocks * kBlockTokens;
  const int64_t num_handles = static_cast<int64_t>(sequences.size());
  const auto expect = [](bool is_right, const char* what) {
    if (!is_right) {
      throw std::runtime_error(std::string("the saved suffix tree contradicts itself: ") + what);
    }
  };
  const auto is_handle = [&](int32_t handle) { return handle >= -1 && handle < num_handles; };
  const auto is_block = [&](int32_t block) { return block >= -1 && block < num_blocks; };
  expect(text.text_.size() == num_positions && text.home_.size() == num_positions, "the text");
  expect(nodes.size() >= 1, "the root");
  expect(is_handle(oldest) && is_handle(youngest) && is_handle(free_handle), "the sequences");
  expect(is_block(text.free_block_) && free_node_head >= -1 && free_node_head < nodes.size(),
         "the free lists");
  expect(next_order >= 0 && next_order < int64_t{1} << (62 - TokenBlocks::kIndexBits), "the order");
  int64_t num_tokens_found = 0;
  struct Range {  // positions in a block that have a token
    uint8_t begin = 0;
    uint8_t end = 0;
  };
  static_assert(kBlockTokens <= UINT8_MAX);
  std::vector<Range> ranges(static_cast<size_t>(num_blocks));
  for (const Sequence& sequence : sequences) {
    expect(is_handle(sequence.older) && is_handle(sequence.younger), "the order of sequences");
    if (!sequence.in_use) {
      continue;
    }
    expect(sequence.begin >= 0 && sequence.begin <= sequence.length && !sequence.is_live &&
               sequence.num_active == 0 && is_block(sequence.first_block) &&
               is_block(sequence.last_block) && sequence.order >= 0 && sequence.order < next_order,
           "a sequence");
    num_tokens_found += sequence.length - sequence.begin;
    // The ages of a sequence's blocks increase, so a chain of blocks cannot be a cycle.
    int32_t block = sequence.first_block;
    int64_t age =
        (sequence.order << TokenBlocks::kIndexBits) + sequence.begin / kBlockTokens * kBlockTokens;
    const int64_t end = (sequence.order << TokenBlocks::kIndexBits) + sequence.length;
    for (; sequence.begin < sequence.length && age < end; age += kBlockTokens) {
      expect(block >= 0 && block < num_blocks && text.blocks_[block].age == age, "a block");
      expect(&sequences[0] + text.blocks_[block].owner == &sequence, "a block's owner");
      const int64_t index = age - (sequence.order << TokenBlocks::kIndexBits);
      ranges[static_cast<size_t>(block)] = {
          static_cast<uint8_t>(std::max<int64_t>(sequence.begin - index, 0)),
          static_cast<uint8_t>(std::min<int64_t>(sequence.length - index, kBlockTokens))};
      block = text.blocks_[block].next;
    }
    expect(sequence.begin == sequence.length || block == -1, "the last block of a sequence");
  }
  expect(num_tokens_found == num_tokens + num_pending, "the number of tokens");
  for (int64_t block = 0; block < num_blocks; ++block) {
    const Block& it = text.blocks_[block];
    expect(is_block(it.next) && is_block(it.prev) && is_handle(it.owner), "a block");
  }
  const auto is_position = [&](int32_t position) {
    if (position < 0 || position >= num_positions) {
      return false;
    }
    const Range range = ranges[static_cast<size_t>(position >> kBlockBits)];
    const int32_t offset = position & (kBlockTokens - 1);
    return offset >= range.begin && offset < range.end;
  };
  enum : uint8_t { kUnused, kUnseen, kSeen };
  std::vector<uint8_t> marks(static_cast<size_t>(nodes.size()), kUnused);
  for (int64_t index = 0; index < nodes.size(); ++index) {
    if (nodes[index].kind != ChildTable::kFree) {
      marks[static_cast<size_t>(index)] = kUnseen;
    }
  }
  const auto is_node = [&](int32_t node) {
    return node >= 0 && node < nodes.size() && marks[static_cast<size_t>(node)] != kUnused;
  };
  for (const Sequence& sequence : sequences) {
    int32_t index = sequence.begin;
    for (int32_t block = sequence.in_use && sequence.begin < sequence.length ? sequence.first_block
                                                                             : -1;
         block >= 0;
         block = text.blocks_[block].next) {
      do {
        const int64_t position = int64_t{block} * kBlockTokens + (index & (kBlockTokens - 1));
        expect(text.text_[position] >= 0 && is_node(text.home_[position]), "a position");
        ++index;
      } while (index < sequence.length && (index & (kBlockTokens - 1)) != 0);
      if (index == sequence.length && (index & (kBlockTokens - 1)) != 0) {
        expect(text.text_[int64_t{block} * kBlockTokens + (index & (kBlockTokens - 1))] == kEnd,
               "an end");
      }
    }
  }
  for (int64_t index = 0; index < nodes.size(); ++index) {
    const Node& node = nodes[index];
    if (node.kind == ChildTable::kFree) {
      expect(node.parent >= -1 && node.parent < nodes.size(), "the list of free nodes");
      continue;
    }
    expect(node.kind >= 0 && node.kind < ChildTable::kNumKinds && node.depth >= 0 &&
               node.depth <= max_depth,
           "a node");
    if (index != kRoot) {
      expect(is_position(node.ref), "a node's text");
    } else {
      expect(node.depth == 0 && node.kind == ChildTable::kNoChild, "the root");
    }
    if (node.kind >= ChildTable::kFirstList) {
      expect(
          node.children >= 0 && node.children + int64_t{ChildTable::allocated_slots(node.kind)} <=
                                    table.slots_.size(),
          "a node's children");
    }
    // Prefetch data that is needed soon, because the children of a node may be anywhere in memory.
    if (index + 16 < nodes.size()) {
      const Node& soon = nodes[index + 16];
      __builtin_prefetch(nodes.data() + soon.best);
      if (soon.kind >= ChildTable::kFirstList) {
        __builtin_prefetch(table.slots_.data() + soon.children);
      }
    }
    int64_t num_children = 0;
    bool has_best = node.kind == ChildTable::kNoChild || index == kRoot;
    for_each_child(static_cast<int32_t>(index), [&](int32_t token, int32_t child) {
      ++num_children;
      has_best = has_best || child == node.best;
      expect(token >= 0 && (child < 0 ? is_position(~child) : is_node(child)), "a child");
      if (child >= 0) {
        // Every node must be the child of exactly one other node, up to the root.
        uint8_t& mark = marks[static_cast<size_t>(child)];
        expect(mark == kUnseen && nodes[child].depth > node.depth && nodes[child].parent == index,
               "a child");
        mark = kSeen;
      }
    });
    expect(has_best, "a node's best child");
    if (node.kind > ChildTable::kLastList) {
      expect(num_children == table.slots_[node.children].child &&
                 num_children < ChildTable::num_slots(node.kind),
             "a node's number of children");
    }
  }
  for (size_t index = 1; index < marks.size(); ++index) {
    expect(marks[index] != kUnseen, "a node that is nobody's child");
  }
  for (const int32_t first : table.free_) {
    expect(first >= -1 && first < table.slots_.size(), "the free slots");
  }
}

}  // namespace specops
