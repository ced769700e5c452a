// SPDX-License-Identifier: Apache-2.0
// SuffixCache: a tree of each running request's own text, and shared trees of many requests'
// responses.
//
// Each scope has a shared tree, and there may be a common one. A request's drafts come from its own
// tree, the tree of its scope and the common tree; on equal scores the earlier of these wins. A
// request never sees another scope's responses. One set of budgets limits all shared trees
// together: the request that started first, in any scope, running or not, is evicted first. Evicted
// memory is reclaimed a little at a time, so that no call takes long. A named scope's tree ends
// with its last request.
//
// Thread-safe: one lock per cache.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "suffix_tree/suffix_tree.h"

namespace specops {

struct SuffixCacheOptions {
  int32_t max_tree_depth = 64;
  // Budgets of all shared trees together; -1: unlimited; 0: no shared tree.
  int64_t max_cached_requests = -1;
  int64_t max_cached_tokens = -1;
  int64_t max_cached_bytes = -1;
  // Prompts of at least this many tokens are built by a separate thread; -1: none.
  int64_t background_tokens = 1024;
};

// One step of a batch: appends every row's new tokens, then drafts for every row.
struct SuffixStepParams {
  const int64_t* requests;          // [batch]; -1 = an idle row
  const int32_t* new_token_ids;     // [batch, new_capacity], rows new_stride apart
  const int32_t* num_new_tokens;    // [batch]
  const int32_t* max_draft_tokens;  // [batch]; 0: no drafts
  // [batch]: number of drafts already in the row, which form a path. The match ends with them, and
  // new drafts are written behind them. nullptr: none.
  const int32_t* num_given_drafts;
  int32_t* draft_token_ids;   // [batch, capacity], -1 padded
  int32_t* num_draft_tokens;  // [batch], without the given drafts
  int32_t* parents;  // [batch, capacity], indices in the row, -2 padded; nullptr if not requested
  float* probs;      // [batch, capacity], 0 padded; nullptr if not requested
  float* scores;     // [batch]; nullptr if not requested
  int32_t* match_lens;  // [batch]; nullptr if not requested
  int64_t batch;
  int64_t new_stride;
  int64_t draft_stride, parents_stride, probs_stride;
  int64_t capacity;
  DraftOptions options;  // its max_draft_tokens is ignored
};

class SuffixCache {
 public:
  explicit SuffixCache(const SuffixCacheOptions& options);
  ~SuffixCache();
  SuffixCache(const SuffixCache&) = delete;
  SuffixCache& operator=(const SuffixCache&) = delete;

  // Starts a request of a scope and returns its number, which is never reused. Its lower half is a
  // slot, and slots are reused. The methods below throw std::invalid_argument for an unknown
  // number, or for a stopped request if a running one is required; then nothing has changed.
  int64_t start(const int32_t* prompt, int64_t size, const std::string& scope = "");
  static int64_t slot(int64_t request) { return request & 0xffffffff; }
  void extend(int64_t request, const int32_t* token_ids, int64_t size);
  void speculate(int64_t request, const DraftOptions& options, SuffixDraft& draft);
  // Speculates after a context of the caller's, which need not be the request's text.
  void speculate_after(int64_t request,
                       const int32_t* context,
                       int64_t size,
                       const DraftOptions& options,
                       SuffixDraft& draft);
  void step(const SuffixStepParams& params);
  // Ends a request; its response stays in the shared tree until it is evicted.
  void stop(int64_t request);
  // Removes a response from its shared tree, whether or not its request is running.
  void evict(int64_t request);
  // Adds a finished response that no request wrote, such as a file of a corpus, and returns its
  // number. A response larger than a budget is evicted at once. `scope` selects the requests that
  // draft from it; nullptr: all.
  int64_t add(const int32_t* token_ids, int64_t size, const std::string* scope);
  // Reclaims everything that was removed; returns the number of tokens.
  int64_t reclaim();
  // Waits until the prompts passed to `start` are built.
  void wait();

  bool is_running(int64_t request) const;
  bool is_cached(int64_t request) const;
  std::vector<int64_t> running() const;  // in starting order
  std::vector<int64_t> cached() const;
  // Returns whether a call would have to wait for another one now.
  bool is_busy() const;
  bool is_building(int64_t request) const;

  // Counts occurrences in all shared trees, or in the own tree of `request` unless that is -1.
  int64_t count(const int32_t* token_ids, int64_t size, int64_t request) const;
  int64_t num_cached_requests() const;
  int64_t num_cached_tokens() const;
  int64_t num_common_requests() const;  // responses that all requests draft from
  int64_t num_scopes() const;           // scopes with a tree; "" always has one
  int64_t num_bytes() const;            // bytes of the shared trees
  std::string check_integrity() const;

  // Saves or loads the shared trees; running requests come back stopped. Errors are those of
  // suffix_file.h. `label` is the caller's own text, stored in the file.
  void save(const std::string& path, const std::string& label = "") const;
  void load(const std::string& path);  // requires a cache with empty shared trees
  static std::string read_label(const std::string& path);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace specops
