// SPDX-License-Identifier: Apache-2.0
// The queries of a suffix tree: counting strings, and drafting.
//
// The match to draft from is selected by scores alone. Computing a score visits every node of a
// path but reads no text; only the best draft is written out.
#include <algorithm>
#include <cmath>
#include <vector>

#include "suffix_tree/suffix_state.h"

namespace specops {
namespace {

// A string in the tree: `depth` tokens from the root, which end at `child` or on the edge to it.
struct Point {
  int32_t child;
  int32_t depth;
};

// A token that may be added to a tree of drafts, and the point after it.
struct Candidate {
  float prob;
  int32_t order;  // on equal probabilities, the lower one (found first) wins
  Point point;    // the string that ends with the token
  int32_t token;
  int32_t parent;
};

struct TreeScratch {
  std::vector<Candidate> heap;
  std::vector<std::pair<int32_t, int32_t>> children;  // (child, token)
  std::vector<int32_t> tokens, parents;
  std::vector<float> probs;
};

bool is_less(const Candidate& a, const Candidate& b) {
  return a.prob != b.prob ? a.prob < b.prob : a.order > b.order;
}

class Drafter {
 public:
  Drafter(const SuffixTree::State& state, const DraftOptions& options)
      : state_(state),
        options_(options),
        tree_slack_(1.0f + 2e-7f * (static_cast<float>(options.max_draft_tokens) + 16.0f)) {}

  bool locate(const int32_t* tokens, int32_t size, Point& point) const;
  // Finds the longest match that ends at `end` and has more than `known` and at most `longest`
  // tokens. Search works because if a match occurs, so does every shorter one.
  void locate_longest(
      const int32_t* end, int32_t known, int32_t longest, const Sequence* live, Point& point) const;
  int32_t budget(int32_t match_len) const;
  // Returns an upper bound on the score of the draft of a match. No probability is above 1, and
  // neither is the sum of the probabilities at one depth, apart from the rounding of a tree's sum.
  float bound(int32_t match_len) const {
    const float most = static_cast<float>(budget(match_len));
    if (options_.read_on) {
      return most;
    }
    const float num_depths = static_cast<float>(state_.max_depth - match_len);
    return std::min(most, options_.use_tree ? num_depths * tree_slack_ : num_depths);
  }
  // Each of the following functions computes the number of tokens of a draft after the point, and
  // their score. It gives up as soon as the score cannot exceed `above`.
  bool enter_likeliest(Point& point, float& prob) const;
  int32_t score_path(Point point, int32_t budget, float above, float& score) const;
  void write_path(Point point, int32_t budget, SuffixDraft& draft) const;
  int32_t score_tree(
      Point point, int32_t budget, float above, TreeScratch& scratch, float& score) const;

 private:
  const Node& node(int32_t index) const { return state_.nodes[index]; }
  bool is_at_node(Point point) const {
    return point.child >= 0 && node(point.child).depth == point.depth;
  }
  // Returns the depth at which the edge to a child ends, including text past max_depth if that may
  // be read.
  int32_t edge_end(int32_t child) const {
    if (child >= 0) {
      return node(child).depth;
    }
    return options_.read_on ? state_.num_following(~child) : state_.window_length(~child);
  }
  // Returns whether `score` stays at or below `above` after num_tokens more tokens of probability
  // at most `prob`.
  static bool is_hopeless(float score, float prob, int32_t num_tokens, float above) {
    const double most = static_cast<double>(score) + static_cast<double>(prob) * num_tokens;
    return most * (1.0 + 2e-7 * (num_tokens + 16)) <= above;  // the factor covers rounding
  }
  static void add(float& score, float prob, int32_t num_tokens) {
    if (prob == 1.0f) {
      score += static_cast<float>(num_tokens);  // stays an integer
      return;
    }
    for (int32_t i = 0; i < num_tokens; ++i) {
      score += prob;
    }
  }
  void push_continuations(
      Point point, float prob, int32_t parent, int32_t wanted, int32_t& order, TreeScratch&) const;

  const SuffixTree::State& state_;
  const DraftOptions& options_;
  const float tree_slack_;
};

bool Drafter::locate(const int32_t* tokens, int32_t size, Point& point) const {
  int32_t parent = kRoot;
  int32_t depth = 0;
  while (true) {
    const int32_t child = tokens[depth] < 0 ? kNone : state_.find_child(parent, tokens[depth]);
    if (child == kNone) {
      return false;
    }
    const int32_t end = child >= 0 ? std::min<int32_t>(size, node(child).depth) : size;
    const int32_t start = state_.ref(child);
    if (!state_.text.equals(start, depth + 1, tokens + depth + 1, end - depth - 1)) {
      return false;
    }
    depth = end;
    if (depth == size) {
      point = {child, depth};
      return true;
    }
    parent = child;
  }
}

void Drafter::locate_longest(
    const int32_t* end, int32_t known, int32_t longest, const Sequence* live, Point& point) const {
  for (int32_t i = known + 1; i <= longest; ++i) {
    if (end[-i] < 0) {
      longest = i - 1;
    }
  }
  const int32_t reach = live == nullptr ? 0 : __atomic_load_n(&live->reach, __ATOMIC_RELAXED);
  int32_t found = known;
  int32_t missing = longest + 1;
  int32_t match_len = std::min(known + std::max(reach, 1), longest);
  // Search from the last reach in doubling steps, then bisect between a length that occurs and one
  // that does not.
  for (int32_t step = 1; found + 1 < missing; step *= 2) {
    if (locate(end - match_len, match_len, point)) {
      found = match_len;
    } else {
      missing = match_len;
    }
    if (found > known && missing <= longest) {
      match_len = found + (missing - found) / 2;
    } else {
      match_len =
          found > known ? std::min(found + step, longest) : std::max(missing - step, known + 1);
    }
  }
  if (live != nullptr) {
    __atomic_store_n(&live->reach, found - known, __ATOMIC_RELAXED);
  }
}

int32_t Drafter::budget(int32_t match_len) const {
  const float wanted =
      static_cast<float>(match_len) * options_.max_spec_factor + options_.max_spec_offset;
  const double rounded = static_cast<double>(wanted) + 1e-6;
  if (!(rounded >= 1.0)) {
    return 0;
  }
  return rounded >= options_.max_draft_tokens ? options_.max_draft_tokens
                                              : static_cast<int32_t>(rounded);
}

// Continues a path from a point: within its edge, to the edge of the best child, or past max_depth.
// Returns false if the path ends or its probability is too low.
inline bool Drafter::enter_likeliest(Point& point, float& prob) const {
  if (!is_at_node(point)) {
    return true;
  }
  if (point.depth == state_.max_depth) {
    point.child = ~node(point.child).ref;
    return options_.read_on;
  }
  const Node& at = node(point.child);
  if (at.kind == ChildTable::kNoChild) {
    return false;
  }
  prob = prob * (static_cast<float>(at.best_count) / static_cast<float>(at.count));
  point.child = at.best;
  return prob >= options_.min_token_prob;
}

int32_t Drafter::score_path(Point point, int32_t budget, float above, float& score) const {
  float prob = 1.0f;
  int32_t size = 0;
  const int32_t most = options_.read_on ? budget : std::min(budget, state_.max_depth - point.depth);
  score = 0.0f;
  while (size < budget && prob >= options_.min_token_prob) {
    if (!enter_likeliest(point, prob)) {
      break;
    }
    const int32_t end = edge_end(point.child);
    if (is_hopeless(score, prob, most - size, above)) {
      score = 0.0f;
      return 0;
    }
    const int32_t num_tokens = std::min(budget - size, end - point.depth);
    add(score, prob, num_tokens);
    size += num_tokens;
    point.depth = end;
    if (point.child < 0) {
      break;
    }
  }
  return size;
}

void Drafter::write_path(Point point, int32_t budget, SuffixDraft& draft) const {
  float prob = 1.0f;
  int32_t size = 0;
  while (size < budget) {
    if (!enter_likeliest(point, prob)) {
      break;
    }
    const int32_t end = edge_end(point.child);
    const int32_t num_tokens = std::min(budget - size, end - point.depth);
    const int32_t start = state_.ref(point.child);
    state_.text.copy(start, point.depth, draft.token_ids + size, num_tokens);
    for (int32_t i = 0; i < num_tokens; ++i) {
      if (draft.parents != nullptr) {
        draft.parents[size + i] = size + i - 1;
      }
      if (draft.probs != nullptr) {
        draft.probs[size + i] = prob;
      }
    }
    size += num_tokens;
    point.depth = end;
    if (point.child < 0) {
      break;
    }
  }
  draft.size = size;
}

// Pushes the continuations of a point that can still be among the next `wanted` tokens.
void Drafter::push_continuations(Point point,
                                 float prob,
                                 int32_t parent,
                                 int32_t wanted,
                                 int32_t& order,
                                 TreeScratch& scratch) const {
  if (wanted <= 0) {
    return;
  }
  const auto push = [&](float child_prob, int32_t child, int32_t token) {
    scratch.heap.push_back({child_prob, order++, {child, point.depth + 1}, token, parent});
    std::push_heap(scratch.heap.begin(), scratch.heap.end(), is_less);
  };
  if (is_at_node(point) && point.depth == state_.max_depth) {
    if (!options_.read_on) {
      return;
    }
    point.child = ~node(point.child).ref;
  }
  if (!is_at_node(point)) {
    if (point.depth < edge_end(point.child) && prob >= options_.min_token_prob) {
      push(prob, point.child, state_.text.token(state_.ref(point.child), point.depth));
    }
    return;
  }
  const Node& at = node(point.child);
  const float whole = static_cast<float>(at.count);
  const auto is_likely = [&](int32_t count) {
    return prob * (static_cast<float>(count) / whole) >= options_.min_token_prob;
  };
  if (at.kind == ChildTable::kNoChild || !is_likely(at.best_count)) {
    return;
  }
  scratch.children.clear();
  if (at.kind == ChildTable::kOneChild || wanted <= 1 || !is_likely(at.second)) {
    // Push only the best child; its token is read from the text.
    push(prob * (static_cast<float>(at.best_count) / whole),
         at.best,
         state_.text.token(state_.ref(at.best), point.depth));
    return;
  }
  const bool are_leaves_likely = is_likely(1);
  int32_t left = at.count;  // occurrences of the remaining children
  state_.table.any_of(at, [&](int32_t token, int32_t child) {
    const int32_t count = state_.count(child);
    if (child >= 0 ? is_likely(count) : are_leaves_likely) {
      scratch.children.emplace_back(child, token);
    }
    left -= count;
    return !is_likely(left);
  });
  const auto is_before = [this](const auto& a, const auto& b) {
    const int32_t a_count = state_.count(a.first);
    const int32_t b_count = state_.count(b.first);
    return a_count != b_count ? a_count > b_count
                              : state_.is_younger(state_.ref(a.first), state_.ref(b.first));
  };
  const auto first = scratch.children.begin();
  const auto num_wanted = std::min<int64_t>(wanted, std::ssize(scratch.children));
  std::partial_sort(first, first + num_wanted, scratch.children.end(), is_before);
  for (int64_t i = 0; i < num_wanted; ++i) {
    const auto [child, token] = scratch.children[static_cast<size_t>(i)];
    push(prob * (static_cast<float>(state_.count(child)) / whole), child, token);
  }
}

int32_t Drafter::score_tree(
    Point point, int32_t budget, float above, TreeScratch& scratch, float& score) const {
  scratch.heap.clear();
  scratch.tokens.clear();
  scratch.parents.clear();
  scratch.probs.clear();
  score = 0.0f;
  int32_t order = 0;
  int32_t size = 0;
  push_continuations(point, 1.0f, -1, budget, order, scratch);
  while (size < budget && !scratch.heap.empty()) {
    std::pop_heap(scratch.heap.begin(), scratch.heap.end(), is_less);
    const Candidate candidate = scratch.heap.back();
    scratch.heap.pop_back();
    if (is_hopeless(score, candidate.prob, budget - size, above)) {
      score = 0.0f;
      return 0;
    }
    scratch.tokens.push_back(candidate.token);
    scratch.parents.push_back(candidate.parent);
    scratch.probs.push_back(candidate.prob);
    score += candidate.prob;
    push_continuations(candidate.point, candidate.prob, size, budget - size - 1, order, scratch);
    ++size;
  }
  return size;
}

}  // namespace

int64_t SuffixTree::count(const int32_t* token_ids, int64_t size) const {
  const State& state = *state_;
  if (size < 1 || size > state.max_depth) {
    return 0;
  }
  Point point;
  const DraftOptions options;
  if (!Drafter(state, options).locate(token_ids, static_cast<int32_t>(size), point)) {
    return 0;
  }
  return state.count(point.child);
}

void SuffixTree::speculate(int32_t sequence,
                           const int32_t* context,
                           int64_t size,
                           const DraftOptions& options,
                           SuffixDraft& draft) const {
  thread_local TreeScratch trial;
  thread_local TreeScratch best_tree;
  const State& state = *state_;
  const Drafter drafter(state, options);
  draft.size = 0;
  draft.score = 0.0f;
  draft.match_len = 0;

  const int32_t longest = static_cast<int32_t>(std::min<int64_t>(size, state.max_depth));
  const int32_t* const end = context + size;
  const Sequence* const live =
      sequence >= 0 && state.sequences[static_cast<size_t>(sequence)].is_live
          ? &state.sequences[static_cast<size_t>(sequence)]
          : nullptr;
  const int32_t num_active = live == nullptr ? 0 : live->num_active;
  Point located{kRoot, 0};
  // A match that begins before the sequence has to be searched for.
  if (num_active < longest && (live == nullptr || num_active == live->length)) {
    drafter.locate_longest(end, num_active, longest, live, located);
  }
  const int32_t num_matches = std::max(located.depth, std::min(num_active, longest));
  const auto find_match = [&](int32_t match_len) {
    Point point = located;
    if (match_len <= num_active) {
      const int32_t position = state.text.advance(live->first_active, num_active - match_len);
      point = {state.text.home_[position], match_len};
    } else if (match_len != located.depth) {
      drafter.locate(end - match_len, match_len, point);
    }
    return point;
  };

  Point best_point{};
  int32_t best_len = 0;
  float best_score = options.above_score;
  // On equal scores, the longer match wins. At first, a score equal to above_score does not
  // suffice.
  int32_t shortest_equal = INT32_MAX;
  const auto matters = [&](int32_t match_len) {
    if (match_len < 1 || match_len > num_matches) {
      return false;
    }
    const float bound = drafter.bound(match_len);
    return bound > best_score || (bound == best_score && match_len >= shortest_equal);
  };
  const auto consider = [&](int32_t match_len) {
    const Point point = find_match(match_len);
    const int32_t budget = drafter.budget(match_len);
    const float above =
        match_len >= shortest_equal ? std::nextafter(best_score, -1.0f) : best_score;
    float score;
    if (options.use_tree) {
      drafter.score_tree(point, budget, above, trial, score);
    } else {
      drafter.score_path(point, budget, above, score);
    }
    if (score > above) {
      best_score = score;
      best_point = point;
      best_len = match_len;
      shortest_equal = match_len + 1;
      if (options.use_tree) {
        std::swap(trial, best_tree);
      }
    }
  };
  // No token scores more than 1, so the score of a match is bounded by its budget, which falls with
  // the length of the match, and, unless text past max_depth is read, by the number of tokens left
  // to max_depth, which rises as the match gets shorter. Start at the length where the lower of the
  // two bounds is highest, and go both ways until neither direction can be better.
  int32_t down = num_matches;
  while (down > 1 && drafter.bound(down - 1) > drafter.bound(down)) {
    --down;
  }
  int32_t up = down + 1;
  if (options.max_spec_factor >= 0.0f) {
    while (true) {
      const bool can_go_up = matters(up);
      const bool can_go_down = matters(down);
      if (can_go_up && (!can_go_down || drafter.bound(up) >= drafter.bound(down))) {
        consider(up++);
      } else if (can_go_down) {
        consider(down--);
      } else {
        break;
      }
    }
  } else {
    for (int32_t match_len = num_matches; match_len > 0; --match_len) {
      consider(match_len);
    }
  }

  if (best_len == 0) {
    return;
  }
  draft.score = best_score;
  draft.match_len = best_len;
  if (!options.use_tree) {
    drafter.write_path(best_point, drafter.budget(best_len), draft);
    return;
  }
  draft.size = static_cast<int32_t>(best_tree.tokens.size());
  std::copy(best_tree.tokens.begin(), best_tree.tokens.end(), draft.token_ids);
  if (draft.parents != nullptr) {
    std::copy(best_tree.parents.begin(), best_tree.parents.end(), draft.parents);
  }
  if (draft.probs != nullptr) {
    std::copy(best_tree.probs.begin(), best_tree.probs.end(), draft.probs);
  }
}

}  // namespace specops
