// SPDX-License-Identifier: Apache-2.0
// SuffixTree and SuffixCache by brute force over lists of tokens. Programs without Python use it as
// the Python tests use reference.SuffixCache.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "suffix_tree/suffix_cache.h"
#include "suffix_tree/suffix_tree.h"

namespace specops {

struct ModelDraft {
  std::vector<int32_t> token_ids;
  std::vector<int32_t> parents;
  std::vector<float> probs;
  float score = 0.0f;
  int32_t match_len = 0;
  bool operator==(const ModelDraft&) const = default;
};

class ModelTree {
 public:
  struct Sequence {
    int32_t handle;
    std::vector<int32_t> tokens;
    size_t first = 0;  // positions before it were freed
    bool is_removed = false;
  };
  struct Occurrence {
    const Sequence* sequence;
    size_t end;  // end of the string in its sequence
  };

  explicit ModelTree(int32_t max_depth) : max_depth_(max_depth) {}

  void start(int32_t handle) { sequences_.push_back({handle, {}}); }
  void append(int32_t handle, const std::vector<int32_t>& ids) {
    auto& tokens = at(handle).tokens;
    tokens.insert(tokens.end(), ids.begin(), ids.end());
  }
  // Frees the sequence at once if an older sequence remains, otherwise gradually.
  void remove(int32_t handle) {
    Sequence& sequence = at(handle);
    bool is_oldest = std::all_of(
        sequences_.data(), &sequence, [](const Sequence& older) { return older.is_removed; });
    if (!is_oldest) {
      sequences_.erase(sequences_.begin() + (&sequence - sequences_.data()));
      return;
    }
    sequence.is_removed = true;
    sequence.handle = -1;  // may be freed at once
    forget_empty();
  }
  int64_t reclaim(int64_t max_positions) {
    int64_t given = 0;
    for (; given < max_positions && num_tokens(true) > 0; ++given) {
      ++sequences_.front().first;
      forget_empty();
    }
    return given;
  }
  void clear() { sequences_.clear(); }

  const std::vector<Sequence>& sequences() const { return sequences_; }
  const std::vector<int32_t>& tokens(int32_t handle) const {
    return const_cast<ModelTree*>(this)->at(handle).tokens;
  }
  int64_t num_tokens(bool is_removed = false) const {
    int64_t sum = 0;
    for (const Sequence& sequence : sequences_) {
      if (sequence.is_removed == is_removed) sum += sequence.tokens.size() - sequence.first;
    }
    return sum;
  }

  // Returns the occurrences of a string, those in the oldest sequence first.
  std::vector<Occurrence> occurrences(const int32_t* ids, size_t size) const {
    std::vector<Occurrence> found;
    for (const Sequence& sequence : sequences_) {
      for (size_t i = sequence.first; i + size <= sequence.tokens.size(); ++i) {
        if (std::equal(ids, ids + size, sequence.tokens.begin() + i)) {
          found.push_back({&sequence, i + size});
        }
      }
    }
    return found;
  }
  int64_t count(const int32_t* ids, size_t size) const {
    return static_cast<int32_t>(size) > max_depth_ ? 0 : occurrences(ids, size).size();
  }

  ModelDraft speculate(const std::vector<int32_t>& context, const DraftOptions& options) const {
    ModelDraft best;
    for (int32_t m = std::min<int64_t>(context.size(), max_depth_); m > 0; --m) {
      std::vector<Occurrence> matches = occurrences(&*(context.end() - m), m);
      if (matches.empty()) continue;
      float product = static_cast<float>(m) * options.max_spec_factor + options.max_spec_offset;
      double budget = std::min<double>(product + 1e-6, options.max_draft_tokens);
      ModelDraft draft =
          draft_from(matches, m, budget < 0 ? 0 : static_cast<int32_t>(budget), options);
      if (draft.score > best.score) best = draft;
    }
    return best;
  }

 private:
  struct Candidate {
    int32_t token_id;
    int32_t parent;
    int32_t depth;
    float prob;
    std::vector<Occurrence> occurrences;
  };

  Sequence& at(int32_t handle) {
    return *std::find_if(sequences_.begin(), sequences_.end(), [&](const Sequence& sequence) {
      return sequence.handle == handle;
    });
  }

  void forget_empty() {
    while (!sequences_.empty() && sequences_.front().is_removed &&
           sequences_.front().first == sequences_.front().tokens.size()) {
      sequences_.erase(sequences_.begin());
    }
  }

  // Returns the possible next tokens, the likeliest first; on ties, the youngest first.
  std::vector<Candidate> continuations(const std::vector<Occurrence>& from,
                                       int32_t depth,
                                       int32_t parent,
                                       float prob,
                                       const DraftOptions& options) const {
    std::vector<Candidate> next;
    size_t first = depth >= max_depth_ ? from.size() - 1 : 0;  // past the depth: only the youngest
    if (depth >= max_depth_ && !options.read_on) return next;
    for (size_t i = from.size(); i-- > first;) {
      const auto& [sequence, end] = from[i];
      if (end == sequence->tokens.size()) continue;
      int32_t token_id = sequence->tokens[end];
      auto same = std::find_if(next.begin(), next.end(), [&](const Candidate& candidate) {
        return candidate.token_id == token_id;
      });
      if (same == next.end()) same = next.insert(next.end(), {token_id, parent, depth + 1, 0, {}});
      same->occurrences.insert(same->occurrences.begin(), {sequence, end + 1});
    }
    std::stable_sort(next.begin(), next.end(), [](const Candidate& a, const Candidate& b) {
      return a.occurrences.size() > b.occurrences.size();
    });
    float all = static_cast<float>(from.size() - first);
    for (Candidate& candidate : next) {
      candidate.prob = prob * (static_cast<float>(candidate.occurrences.size()) / all);
    }
    std::erase_if(next, [&](const Candidate& candidate) {
      return !(candidate.prob >= options.min_token_prob);
    });
    return next;
  }

  ModelDraft draft_from(const std::vector<Occurrence>& matches,
                        int32_t match_len,
                        int32_t budget,
                        const DraftOptions& options) const {
    ModelDraft draft;
    draft.match_len = match_len;
    std::vector<Candidate> open = continuations(matches, match_len, -1, 1.0f, options);
    while (static_cast<int32_t>(draft.token_ids.size()) < budget && !open.empty()) {
      if (!options.use_tree) open.resize(1);
      // Takes the likeliest candidate; on ties, the one that was found first.
      auto best = std::max_element(
          open.begin(), open.end(), [](const auto& a, const auto& b) { return a.prob < b.prob; });
      Candidate taken = *best;
      open.erase(best);
      draft.token_ids.push_back(taken.token_id);
      draft.parents.push_back(taken.parent);
      draft.probs.push_back(taken.prob);
      draft.score += taken.prob;
      std::vector<Candidate> next = continuations(taken.occurrences,
                                                  taken.depth,
                                                  static_cast<int32_t>(draft.token_ids.size()) - 1,
                                                  taken.prob,
                                                  options);
      open.insert(open.end(), next.begin(), next.end());
    }
    return draft;
  }

  int32_t max_depth_;
  std::vector<Sequence> sequences_;  // in the order of their start
};

// Requests are identified by the numbers of the cache.
class ModelCache {
 public:
  struct Request {
    std::vector<int32_t> tokens;  // prompt and response
    ModelTree own;
  };

  explicit ModelCache(const SuffixCacheOptions& options)
      : options_(options), shared_(options.max_tree_depth) {}

  void start(int64_t request, const std::vector<int32_t>& prompt) {
    Request& started = running_.emplace(request, Request{prompt, own_tree()}).first->second;
    started.own.append(0, prompt);
    if (options_.max_cached_requests != 0 && options_.max_cached_tokens != 0) {
      cached_.push_back(request);
      shared_.start(handle(request));
    }
    keep_budgets();
  }
  // Returns how many tokens went into the shared tree.
  int64_t append(int64_t request, const std::vector<int32_t>& ids) {
    Request& running = running_.at(request);
    running.tokens.insert(running.tokens.end(), ids.begin(), ids.end());
    running.own.append(0, ids);
    if (!is_cached(request)) return 0;
    shared_.append(handle(request), ids);
    return static_cast<int64_t>(ids.size());
  }
  void after_appends(int64_t num_shared_tokens) {
    keep_budgets();
    shared_.reclaim(2 * num_shared_tokens);
  }
  void extend(int64_t request, const std::vector<int32_t>& ids) {
    after_appends(append(request, ids));
  }
  void add(int64_t request, const std::vector<int32_t>& ids) {
    start(request, {});
    extend(request, ids);
    stop(request);
  }
  void stop(int64_t request) { running_.erase(request); }
  void evict(int64_t request) {
    shared_.remove(handle(request));
    std::erase(cached_, request);
  }
  int64_t reclaim() { return shared_.reclaim(shared_.num_tokens(true)); }

  ModelDraft speculate(int64_t request,
                       const std::vector<int32_t>& context,
                       const DraftOptions& options) const {
    ModelDraft own = running_.at(request).own.speculate(context, options);
    ModelDraft shared = shared_.speculate(context, options);
    return own.score >= shared.score ? own : shared;
  }

  bool is_cached(int64_t request) const {
    return std::find(cached_.begin(), cached_.end(), request) != cached_.end();
  }
  const std::map<int64_t, Request>& running() const { return running_; }
  const std::vector<int64_t>& cached() const { return cached_; }  // oldest first
  const ModelTree& shared() const { return shared_; }
  const std::vector<int32_t>& response(int64_t request) const {
    return shared_.tokens(const_cast<ModelCache*>(this)->handle(request));
  }

 private:
  ModelTree own_tree() const {
    ModelTree tree(options_.max_tree_depth);
    tree.start(0);
    return tree;
  }
  int32_t handle(int64_t request) {
    return handles_.emplace(request, static_cast<int32_t>(handles_.size())).first->second;
  }
  void keep_budgets() {
    auto above = [](int64_t value, int64_t budget) { return budget >= 0 && value > budget; };
    while (!cached_.empty() &&
           (above(static_cast<int64_t>(cached_.size()), options_.max_cached_requests) ||
            above(shared_.num_tokens(), options_.max_cached_tokens))) {
      evict(cached_.front());
    }
  }

  SuffixCacheOptions options_;
  std::map<int64_t, Request> running_;
  std::vector<int64_t> cached_;
  std::map<int64_t, int32_t> handles_;
  ModelTree shared_;
};

}  // namespace specops
