// SPDX-License-Identifier: Apache-2.0
// Implementation of SuffixTree: appending tokens and removing sequences. The invariants are in
// suffix_state.h.
#include "suffix_tree/suffix_tree.h"

#include <algorithm>
#include <stdexcept>

#include "suffix_tree/suffix_file.h"
#include "suffix_tree/suffix_state.h"

namespace specops {

void SuffixTree::State::clear() {
  text.clear();
  nodes.clear();
  table.clear();
  root.clear();
  sequences.clear();
  next_order = 0;
  oldest = youngest = free_handle = free_node_head = -1;
  num_free_nodes = num_sequences = num_tokens = num_pending = 0;
  nodes.push_back({0, -1, -1, 0, ChildTable::kNoChild, 0, kNone, 0, 0});
}

int32_t SuffixTree::State::new_node() {
  if (free_node_head >= 0) {
    const int32_t node = free_node_head;
    free_node_head = nodes[node].parent;
    --num_free_nodes;
    return node;
  }
  nodes.resize(nodes.size() + 1);
  return static_cast<int32_t>(nodes.size() - 1);
}

void SuffixTree::State::free_node(int32_t node) {
  table.drop_all(nodes[node]);
  nodes[node] = {0, -1, free_node_head, 0, ChildTable::kFree, 0, kNone, 0, 0};
  free_node_head = node;
  ++num_free_nodes;
}

// --- appending -----------------------------------------------------------------------------------

void SuffixTree::State::add_leaf(int32_t node, int32_t token, int32_t start) {
  text.home_[start] = node;
  if (node == kRoot) {
    root.insert(token, ~start);
    return;
  }
  Node& parent = nodes[node];
  const bool is_first = parent.kind == ChildTable::kNoChild;
  table.insert(parent, token, ~start);
  if (is_first) {
    parent.best_count = 1;
    parent.second = 0;
  } else {
    raise_child(node, kNone, ~start);
  }
}

// Updates `best` and the counts of a node after a child gained an occurrence, was added (old_child
// is kNone), or replaced old_child.
void SuffixTree::State::raise_child(int32_t node, int32_t old_child, int32_t child) {
  if (node == kRoot) {
    return;
  }
  Node& parent = nodes[node];
  const int32_t child_count = count(child);
  if (parent.best == old_child || parent.best == child) {
    parent.best = child;
    parent.best_count = child_count;
  } else if (child_count > parent.best_count ||
             (child_count == parent.best_count && is_younger(ref(child), ref(parent.best)))) {
    parent.second = std::max(parent.second, parent.best_count);
    parent.best = child;
    parent.best_count = child_count;
  } else {
    parent.second = std::max(parent.second, child_count);
  }
}

// Replaces `node` by its child that occurs as often.
void SuffixTree::State::replace_child(int32_t node, int32_t child) {
  const int32_t parent = nodes[node].parent;
  const int32_t token = text.token(ref(child), nodes[parent].depth);
  if (parent == kRoot) {
    root.replace(token, child);
  } else {
    table.replace(nodes[parent], token, child);
    if (nodes[parent].best == node) {
      nodes[parent].best = child;
    }
  }
  if (child >= 0) {
    nodes[child].parent = parent;
  } else {
    text.home_[~child] = parent;
  }
}

// Puts the leaf of `start` below the node or, if the window of `start` ends there, into the node.
// In the latter case the window also occurs elsewhere, so it becomes active if it ends at the end
// of a live sequence; that happens to sequences that are written in lock step. Returns whether the
// leaf is below the node.
bool SuffixTree::State::adopt_leaf(int32_t node, int32_t start) {
  Node& parent = nodes[node];
  text.home_[start] = node;
  const int32_t token = parent.depth < max_depth ? text.token(start, parent.depth) : kEnd;
  if (token != kEnd) {
    parent.kind = ChildTable::kOneChild;
    parent.children = token;
    parent.best = ~start;
    parent.best_count = 1;
    return true;
  }
  parent.kind = ChildTable::kNoChild;
  parent.children = 0;
  parent.best = kNone;
  parent.best_count = 0;
  Sequence& owner = sequences[static_cast<size_t>(text.owner(start))];
  if (owner.is_live && owner.length - text.index(start) == parent.depth) {
    // Suffixes are extended in an order in which all shorter suffixes have already been put back.
    owner.first_active = start;
    ++owner.num_active;
  }
  return false;
}

// Handles the common extension of a repeated text: if only this suffix ended at `node`, and `child`
// is more than one token away, the node moves one token along the edge. Returns whether it did.
inline bool SuffixTree::State::slide(int32_t node, int32_t child) {
  Node& sliding = nodes[node];
  const int32_t depth = sliding.depth + 1;
  int32_t next = kEnd;
  if (child >= 0) {
    const Node& below = nodes[child];
    if (sliding.count == below.count + 1 && below.depth > depth && node != kRoot) {
      next = text.token(below.ref, depth);
    }
  } else if (sliding.count == 2 && depth < max_depth && node != kRoot) {
    next = text.token(~child, depth);
  }
  if (next == kEnd) {
    return false;
  }
  sliding.depth = static_cast<int16_t>(depth);
  sliding.children = next;
  return true;
}

// Extends the suffix that ends at `node` by the token with which `child` begins. Returns the node
// at which it then ends.
int32_t SuffixTree::State::extend_suffix(int32_t node,
                                         int32_t child,
                                         int32_t start,
                                         int32_t token) {
  const int32_t depth = nodes[node].depth + 1;
  if (node != kRoot && nodes[node].count == count(child) + 1) {
    // Only this suffix ended here, so the child replaces the node.
    if (child >= 0 && nodes[child].depth == depth) {
      ++nodes[child].count;
      if (is_younger(start, nodes[child].ref)) {
        nodes[child].ref = start;
      }
      replace_child(node, child);
      free_node(node);
      return child;
    }
    nodes[node].depth = static_cast<int16_t>(depth);
    adopt_leaf(node, ~child);  // its window ends here, or the node would have slid
    return node;
  }
  if (child >= 0 && nodes[child].depth == depth) {
    ++nodes[child].count;
    if (is_younger(start, nodes[child].ref)) {
      nodes[child].ref = start;
    }
    raise_child(node, child, child);
    return child;
  }
  const int32_t middle = new_node();
  const int32_t other = ref(child);
  Node& made = nodes[middle];
  made.count = count(child) + 1;
  made.ref = is_younger(start, other) ? start : other;
  made.parent = node;
  made.depth = static_cast<int16_t>(depth);
  made.second = 0;
  if (child >= 0) {
    made.kind = ChildTable::kOneChild;
    made.children = text.token(other, depth);
    made.best = child;
    made.best_count = nodes[child].count;
    nodes[child].parent = middle;
  } else {
    adopt_leaf(middle, other);
  }
  if (node == kRoot) {
    root.replace(token, middle);
  } else {
    table.replace(nodes[node], token, middle);
    raise_child(node, child, middle);
  }
  return middle;
}

void SuffixTree::State::push_token(int32_t handle, int32_t token) {
  Sequence& sequence = sequences[static_cast<size_t>(handle)];
  const int32_t offset = sequence.length & (kBlockTokens - 1);
  if (sequence.length == INT32_MAX) {
    throw std::length_error("SuffixTree: a sequence of more than 2^31 tokens");
  }
  if (offset == 0) {
    const int64_t age = (sequence.order << TokenBlocks::kIndexBits) + sequence.length;
    sequence.last_block = text.allocate(handle, sequence.last_block, age);
    if (sequence.first_block < 0) {
      sequence.first_block = sequence.last_block;
    }
  }
  // The leaves that end here grow by this store alone.
  const int32_t position = sequence.last_block * kBlockTokens + offset;
  text.text_[position] = token;
  if (offset + 1 < kBlockTokens) {
    text.text_[position + 1] = kEnd;
  }
  if (sequence.num_active == max_depth) {
    sequence.first_active = text.advance(sequence.first_active, 1);
    --sequence.num_active;
  }
  ++sequence.length;
  ++num_tokens;
  ++nodes[kRoot].count;

  // The suffixes to extend: the active ones, from the longest on, and the new one of length one.
  const int32_t num_suffixes = sequence.num_active + 1;
  if (static_cast<size_t>(num_suffixes) > scratch.size()) {
    scratch.resize(static_cast<size_t>(num_suffixes) * 2);
  }
  Suffix* const suffixes = scratch.data();
  // Find and prefetch all children before any suffix is extended, so that the cache misses overlap.
  for (int32_t i = 0, start = sequence.first_active; i < num_suffixes - 1; ++i) {
    const int32_t node = text.home_[start];
    const int32_t child = table.find(nodes[node], token);
    prefetch_child(child);
    suffixes[i] = {start, node, child};
    start = text.next(start);
  }
  suffixes[num_suffixes - 1] = {position, kRoot, root.find(token)};
  // Suffixes without a continuation become leaves. If a suffix has none, neither has a longer one.
  int32_t first = 0;
  while (first < num_suffixes && suffixes[first].child == kNone) {
    add_leaf(suffixes[first].node, token, suffixes[first].start);
    ++first;
  }
  sequence.num_active = num_suffixes - first;
  if (first < num_suffixes) {
    sequence.first_active = suffixes[first].start;
  }
  for (int32_t i = num_suffixes - 1; i >= first; --i) {
    const auto [start, node, child] = suffixes[i];
    if (!slide(node, child)) {
      text.home_[start] = extend_suffix(node, child, start, token);
    }
  }
}

// --- removing ------------------------------------------------------------------------------------

// Recomputes the most frequent child (on a tie the youngest) from all children.
void SuffixTree::State::find_best(int32_t node) {
  if (node == kRoot) {
    return;
  }
  Node& parent = nodes[node];
  parent.best_count = 0;
  parent.second = 0;
  int32_t best = kNone;
  table.for_each(parent, [&](int32_t, int32_t child) {
    const int32_t child_count = count(child);
    if (child_count > parent.best_count ||
        (child_count == parent.best_count && is_younger(ref(child), ref(best)))) {
      parent.second = parent.best_count;
      parent.best_count = child_count;
      best = child;
    } else {
      parent.second = std::max(parent.second, child_count);
    }
  });
  parent.best = best;
}

// Removes the window of a position from the tree.
void SuffixTree::State::remove_window(int32_t position) {
  const int32_t last = text.home_[position];
  if (last == kRoot) {
    root.erase(text.token(position, 0));
    --nodes[kRoot].count;
    return;
  }
  if (nodes[last].depth != window_length(position)) {
    const bool was_best = nodes[last].best == ~position;
    table.erase(nodes[last], text.token(position, nodes[last].depth));
    if (was_best || nodes[last].kind == ChildTable::kOneChild) {
      find_best(last);
    }
  }
  for (int32_t node = last; node != kRoot; node = nodes[node].parent) {
    --nodes[node].count;
    Node& parent = nodes[nodes[node].parent];
    if (parent.best == node && nodes[node].parent != kRoot) {
      --parent.best_count;
      if (parent.best_count <= parent.second) {
        find_best(nodes[node].parent);
      }
    }
  }
  --nodes[kRoot].count;
  // Only the last node on the path of the window can have to be removed.
  Node& node = nodes[last];
  if (node.kind == ChildTable::kNoChild && node.count == 1) {
    const int32_t start = node.ref;
    Sequence& owner = sequences[static_cast<size_t>(text.owner(start))];
    if (owner.is_live && owner.num_active > 0 && owner.first_active == start) {
      if (--owner.num_active > 0) {
        owner.first_active = text.advance(start, 1);
      }
    }
    replace_child(last, ~start);
    free_node(last);
  } else if (node.kind == ChildTable::kOneChild && count(node.best) == node.count) {
    replace_child(last, node.best);
    free_node(last);
  }
}

// Updates refs before a sequence that is not the oldest is removed: each ref into that sequence
// moves to the youngest occurrence in another sequence.
void SuffixTree::State::repoint(int32_t handle) {
  struct Change {
    int32_t node;
    int32_t num_windows;  // number of windows of the sequence that end at the node
  };
  const Sequence& sequence = sequences[static_cast<size_t>(handle)];
  std::vector<Change> changes;
  std::vector<int32_t> change_of(static_cast<size_t>(nodes.size()), -1);
  int32_t position = sequence.first_block * kBlockTokens + (sequence.begin & (kBlockTokens - 1));
  for (int32_t i = sequence.begin; i < sequence.length; ++i) {
    for (int32_t node = text.home_[position]; node != kRoot; node = nodes[node].parent) {
      if (text.owner(nodes[node].ref) != handle) {
        break;  // then the ref of every prefix is not in the sequence either
      }
      int32_t& change = change_of[static_cast<size_t>(node)];
      const bool is_known = change >= 0;
      if (!is_known) {
        change = static_cast<int32_t>(changes.size());
        changes.push_back({node, 0});
      }
      if (node == text.home_[position]) {
        ++changes[static_cast<size_t>(change)].num_windows;
      }
      if (is_known) {
        break;
      }
    }
    if (i + 1 < sequence.length) {
      position = text.advance(position, 1);
    }
  }

  // At max_depth, every window ends at its node: search for these windows, from the younger
  // sequences on.
  int64_t num_wanted = 0;
  for (const Change& change : changes) {
    const Node& node = nodes[change.node];
    num_wanted += node.depth == max_depth && node.count > change.num_windows;
  }
  std::vector<int32_t> found;
  for (int32_t other = sequence.older; other >= 0 && num_wanted > 0;) {
    const Sequence& older = sequences[static_cast<size_t>(other)];
    found.clear();
    int32_t index = older.begin;
    for (int32_t block = older.first_block; block >= 0; block = text.blocks_[block].next) {
      for (int32_t offset = index & (kBlockTokens - 1);
           offset < kBlockTokens && index + max_depth <= older.length;
           ++offset, ++index) {
        const int32_t start = block * kBlockTokens + offset;
        const int32_t node = text.home_[start];
        if (nodes[node].depth == max_depth && change_of[static_cast<size_t>(node)] >= 0) {
          if (text.owner(nodes[node].ref) == handle) {
            found.push_back(node);
          }
          nodes[node].ref = start;
        }
      }
    }
    for (const int32_t node : found) {
      change_of[static_cast<size_t>(node)] = -1;
    }
    num_wanted -= static_cast<int64_t>(found.size());
    other = older.older;
  }

  // The other nodes take the ref of a child, or of a sequence that ends there.
  std::sort(changes.begin(), changes.end(), [this](const Change& a, const Change& b) {
    return nodes[a.node].depth > nodes[b.node].depth;
  });
  for (const Change& change : changes) {
    Node& node = nodes[change.node];
    if (node.depth == max_depth) {
      continue;
    }
    int32_t best = -1;
    int32_t num_ending = node.count;
    table.for_each(node, [&](int32_t, int32_t child) {
      num_ending -= count(child);
      const int32_t start = ref(child);
      if (text.owner(start) != handle && (best < 0 || is_younger(start, best))) {
        best = start;
      }
    });
    if (num_ending > 0) {
      for (int32_t other = youngest; other >= 0;) {
        const Sequence& that = sequences[static_cast<size_t>(other)];
        if (other != handle && that.length - that.begin >= node.depth) {
          int32_t block = that.last_block;
          int32_t offset = ((that.length - 1) & (kBlockTokens - 1)) - (node.depth - 1);
          while (offset < 0) {
            block = text.blocks_[block].prev;
            offset += kBlockTokens;
          }
          const int32_t start = block * kBlockTokens + offset;
          if (text.home_[start] == change.node && (best < 0 || is_younger(start, best))) {
            best = start;
          }
        }
        other = that.older;
      }
    }
    if (best >= 0) {
      node.ref = best;
    }
  }
}

void SuffixTree::State::release(int32_t handle) {
  Sequence& sequence = sequences[static_cast<size_t>(handle)];
  (sequence.older >= 0 ? sequences[static_cast<size_t>(sequence.older)].younger : oldest) =
      sequence.younger;
  (sequence.younger >= 0 ? sequences[static_cast<size_t>(sequence.younger)].older : youngest) =
      sequence.older;
  sequence = Sequence{};
  sequence.older = free_handle;
  free_handle = handle;
}

// Removes the first token of a sequence and its window.
void SuffixTree::State::remove_first(Sequence& sequence) {
  const int32_t block = sequence.first_block;
  const int32_t offset = sequence.begin & (kBlockTokens - 1);
  remove_window(block * kBlockTokens + offset);
  ++sequence.begin;
  if (offset + 1 == kBlockTokens || sequence.begin == sequence.length) {
    sequence.first_block = text.blocks_[block].next;
    text.free(block);
  }
}

int64_t SuffixTree::State::reclaim(int64_t max_positions) {
  int64_t num_reclaimed = 0;
  while (num_reclaimed < max_positions && num_pending > 0) {
    const int32_t handle = oldest;
    Sequence& sequence = sequences[static_cast<size_t>(handle)];
    while (num_reclaimed < max_positions && sequence.begin < sequence.length) {
      remove_first(sequence);
      ++num_reclaimed;
      --num_pending;
    }
    if (sequence.begin == sequence.length) {
      release(handle);
    }
  }
  return num_reclaimed;
}

void SuffixTree::State::remove_now(int32_t handle) {
  repoint(handle);
  Sequence& sequence = sequences[static_cast<size_t>(handle)];
  while (sequence.begin < sequence.length) {
    remove_first(sequence);
  }
  release(handle);
}

// --- the class -----------------------------------------------------------------------------------

SuffixTree::SuffixTree(int32_t max_depth) : state_(new State(max_depth)) {}
SuffixTree::~SuffixTree() = default;

int32_t SuffixTree::start() {
  State& state = *state_;
  int32_t handle = state.free_handle;
  if (handle >= 0) {
    state.free_handle = state.sequences[static_cast<size_t>(handle)].older;
  } else {
    handle = static_cast<int32_t>(state.sequences.size());
    state.sequences.emplace_back();
  }
  Sequence& sequence = state.sequences[static_cast<size_t>(handle)];
  sequence = Sequence{};
  sequence.order = state.next_order++;
  sequence.first_block = sequence.last_block = sequence.younger = -1;
  sequence.first_active = -1;
  sequence.older = state.youngest;
  sequence.in_use = sequence.is_live = 1;
  (state.youngest >= 0 ? state.sequences[static_cast<size_t>(state.youngest)].younger
                       : state.oldest) = handle;
  state.youngest = handle;
  ++state.num_sequences;
  return handle;
}

void SuffixTree::append(int32_t sequence, const int32_t* token_ids, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    if (i + 1 < size) {
      state_->root.prefetch(token_ids[i + 1]);
    }
    state_->push_token(sequence, token_ids[i]);
  }
}

void SuffixTree::finish(int32_t sequence) {
  Sequence& it = state_->sequences[static_cast<size_t>(sequence)];
  it.is_live = 0;
  it.num_active = 0;
}

void SuffixTree::remove(int32_t sequence) {
  State& state = *state_;
  finish(sequence);
  Sequence& it = state.sequences[static_cast<size_t>(sequence)];
  it.is_removed = 1;
  --state.num_sequences;
  state.num_tokens -= it.length;
  if (it.length == 0) {
    state.release(sequence);
  } else if (it.older < 0 || state.sequences[static_cast<size_t>(it.older)].is_removed) {
    state.num_pending += it.length;
  } else {
    state.remove_now(sequence);
  }
}

int64_t SuffixTree::reclaim(int64_t max_positions) { return state_->reclaim(max_positions); }

void SuffixTree::prefetch(int32_t sequence, int32_t token, int32_t pass) const {
  const State& state = *state_;
  const Sequence& it = state.sequences[static_cast<size_t>(sequence)];
  if (pass == 0) {
    state.root.prefetch(token);
  }
  int32_t position = it.first_active;
  for (int32_t i = 0; i < it.num_active; ++i) {
    const int32_t* const home = &state.text.home_[position];
    if (pass == 0) {
      __builtin_prefetch(home);
    } else if (pass == 1) {
      __builtin_prefetch(&state.nodes[*home]);
    } else if (state.nodes[*home].kind == ChildTable::kOneChild) {
      state.prefetch_child(state.nodes[*home].best);
    } else {
      state.table.prefetch(state.nodes[*home], token);
    }
    position = state.text.next(position);
  }
}

void SuffixTree::clear() { state_->clear(); }

int32_t SuffixTree::max_depth() const { return state_->max_depth; }
int64_t SuffixTree::num_sequences() const { return state_->num_sequences; }
int64_t SuffixTree::num_tokens() const { return state_->num_tokens; }
int64_t SuffixTree::num_pending_tokens() const { return state_->num_pending; }
int64_t SuffixTree::num_nodes() const { return state_->nodes.size() - state_->num_free_nodes; }

int64_t SuffixTree::num_bytes() const {
  const State& state = *state_;
  return state.text.num_bytes() + state.nodes.num_bytes() + state.table.num_bytes() +
         state.root.num_bytes() +
         static_cast<int64_t>(state.sequences.capacity() * sizeof(Sequence) +
                              state.scratch.capacity() * sizeof(State::Suffix));
}

int64_t SuffixTree::num_used_bytes() const {
  const State& state = *state_;
  return num_bytes() - state.text.num_unused_bytes() - state.table.num_unused_bytes() -
         state.num_free_nodes * static_cast<int64_t>(sizeof(Node));
}

int64_t SuffixTree::length(int32_t sequence) const {
  const bool is_handle = sequence >= 0 &&
                         sequence < static_cast<int64_t>(state_->sequences.size()) &&
                         state_->sequences[static_cast<size_t>(sequence)].in_use &&
                         !state_->sequences[static_cast<size_t>(sequence)].is_removed;
  return is_handle ? state_->sequences[static_cast<size_t>(sequence)].length : -1;
}

std::string SuffixTree::check_integrity() const { return state_->check_integrity(); }

// --- saving --------------------------------------------------------------------------------------

namespace {

struct SavedHeader {
  int64_t max_depth;
  int64_t next_order;
  int64_t num_sequences;
  int64_t num_tokens;
  int64_t num_pending;
  int64_t num_free_nodes;
  int64_t num_free_blocks;
  int64_t num_free_slots;
  int32_t oldest;
  int32_t youngest;
  int32_t free_handle;
  int32_t free_node_head;
  int32_t free_block;
  int32_t free_slots[ChildTable::kNumKinds];
  int32_t unused;
};

template <typename T>
void save_array(FileWriter& file, const GrowArray<T>& array) {
  file.section(array.data(), static_cast<size_t>(array.size()) * sizeof(T));
}

template <typename T>
void load_array(FileReader& file, GrowArray<T>& array) {
  const size_t num_bytes = file.section_bytes();
  if (num_bytes % sizeof(T) != 0) {
    throw std::runtime_error("the saved suffix tree contradicts itself: size of an array");
  }
  array.resize(static_cast<int64_t>(num_bytes / sizeof(T)));
  file.section(array.data(), num_bytes);
}

}  // namespace

void SuffixTree::save(FileWriter& file) const {
  const State& state = *state_;
  SavedHeader header{};
  header.max_depth = state.max_depth;
  header.next_order = state.next_order;
  header.num_sequences = state.num_sequences;
  header.num_tokens = state.num_tokens;
  header.num_pending = state.num_pending;
  header.num_free_nodes = state.num_free_nodes;
  header.num_free_blocks = state.text.num_free_;
  header.num_free_slots = state.table.num_free_slots_;
  header.oldest = state.oldest;
  header.youngest = state.youngest;
  header.free_handle = state.free_handle;
  header.free_node_head = state.free_node_head;
  header.free_block = state.text.free_block_;
  std::copy(
      state.table.free_, state.table.free_ + ChildTable::kNumKinds, std::begin(header.free_slots));
  file.section(&header, sizeof(header));
  std::vector<Sequence> sequences = state.sequences;
  for (Sequence& sequence : sequences) {
    sequence.is_live = 0;
    sequence.num_active = 0;
  }
  file.section(sequences.data(), sequences.size() * sizeof(Sequence));
  save_array(file, state.text.blocks_);
  save_array(file, state.text.text_);
  save_array(file, state.text.home_);
  save_array(file, state.nodes);
  save_array(file, state.table.slots_);
  std::vector<ChildSlot> children;
  state.root.for_each([&](int32_t token, int32_t child) { children.push_back({token, child}); });
  file.section(children.data(), children.size() * sizeof(ChildSlot));
}

void SuffixTree::load(FileReader& file) {
  State& state = *state_;
  SavedHeader header{};
  file.section(&header, sizeof(header));
  if (header.max_depth != state.max_depth) {
    throw std::runtime_error("the saved suffix tree has max_depth " +
                             std::to_string(header.max_depth) + ", expected " +
                             std::to_string(state.max_depth));
  }
  state.next_order = header.next_order;
  state.num_sequences = header.num_sequences;
  state.num_tokens = header.num_tokens;
  state.num_pending = header.num_pending;
  state.num_free_nodes = header.num_free_nodes;
  state.text.num_free_ = header.num_free_blocks;
  state.table.num_free_slots_ = header.num_free_slots;
  state.oldest = header.oldest;
  state.youngest = header.youngest;
  state.free_handle = header.free_handle;
  state.free_node_head = header.free_node_head;
  state.text.free_block_ = header.free_block;
  std::copy(std::begin(header.free_slots), std::end(header.free_slots), state.table.free_);
  const size_t num_bytes = file.section_bytes();
  if (num_bytes % sizeof(Sequence) != 0) {
    throw std::runtime_error("the saved suffix tree contradicts itself: size of an array");
  }
  state.sequences.resize(num_bytes / sizeof(Sequence));
  file.section(state.sequences.data(), num_bytes);
  load_array(file, state.text.blocks_);
  load_array(file, state.text.text_);
  load_array(file, state.text.home_);
  load_array(file, state.nodes);
  load_array(file, state.table.slots_);
  GrowArray<ChildSlot> children;
  load_array(file, children);
  for (int64_t i = 0; i < children.size(); ++i) {
    if (children[i].token < 0 || state.root.find(children[i].token) != kNone) {
      throw std::runtime_error("the saved suffix tree contradicts itself: a child of the root");
    }
    state.root.insert(children[i].token, children[i].child);
  }
  state.check_indices();
}

}  // namespace specops
