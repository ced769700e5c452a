// SPDX-License-Identifier: Apache-2.0
// SuffixCache: for each running request, a suffix tree of its own text; and shared trees of the
// responses of many requests.
//
// Each scope has a shared tree, and there may be a common one. The drafts of a request come from
// its own tree, the tree of its scope or the common tree, whichever has the best score; on equal
// scores, the earlier one in this order. A request never sees the responses of another scope. One
// set of budgets limits all shared trees together: the request that started first is evicted first,
// whatever its scope and whether or not it is running. Evicted memory is reclaimed a little at a
// time, so that no call takes long. The tree of a named scope is deleted with its last request.
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
  // Prompts of at least this many tokens are added to their tree by a separate thread; -1: none.
  int64_t background_tokens = 1024;
};

// One step of a batch: appends every row's new tokens, then drafts for every row.
struct SuffixStepParams {
  const int64_t* requests;          // [batch]; -1 = an idle row
  const int32_t* new_token_ids;     // [batch, new_capacity], rows new_stride apart
  const int32_t* num_new_tokens;    // [batch]
  const int32_t* max_draft_tokens;  // [batch]; 0: no drafts
  // [batch]: number of drafts already in the row, which must form a path. Matches end with these
  // drafts, and new drafts are written after them. nullptr: none.
  const int32_t* num_given_drafts;
  int32_t* draft_token_ids;   // [batch, capacity], -1 padded
  int32_t* num_draft_tokens;  // [batch], without the drafts already in the row
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

  // Starts a request in a scope and returns its number, which is never reused. The lower half of
  // the number is a slot, and slots are reused. The methods below throw std::invalid_argument if
  // the number is unknown, or if the request is stopped but must be running. In that case, nothing
  // has changed.
  int64_t start(const int32_t* prompt, int64_t size, const std::string& scope = "");
  static int64_t slot(int64_t request) { return request & 0xffffffff; }
  void extend(int64_t request, const int32_t* token_ids, int64_t size);
  void speculate(int64_t request, const DraftOptions& options, SuffixDraft& draft);
  // Drafts after a context that the caller passes, which may differ from the request's text.
  void speculate_after(int64_t request,
                       const int32_t* context,
                       int64_t size,
                       const DraftOptions& options,
                       SuffixDraft& draft);
  void step(const SuffixStepParams& params);
  // Ends a request; its response stays in the shared tree until it is evicted.
  void stop(int64_t request);
  // Removes a response from its shared tree, whether its request is running or not.
  void evict(int64_t request);
  // Adds a finished response that no request generated, such as a file of a corpus, and returns its
  // number. A response that is larger than a budget is evicted at once. `scope`: whose requests
  // draft from it; nullptr: all requests.
  int64_t add(const int32_t* token_ids, int64_t size, const std::string* scope);
  // Reclaims the memory of everything that was removed. Returns the number of reclaimed tokens.
  int64_t reclaim();
  // Waits until the prompts passed to `start` have been added to their trees.
  void wait();

  bool is_running(int64_t request) const;
  bool is_cached(int64_t request) const;
  std::vector<int64_t> running() const;  // in starting order
  std::vector<int64_t> cached() const;
  // Returns whether a call would now have to wait for another call.
  bool is_busy() const;
  bool is_building(int64_t request) const;

  // Counts the occurrences of a string in all shared trees or, unless `request` is -1, in the own
  // tree of that request.
  int64_t count(const int32_t* token_ids, int64_t size, int64_t request) const;
  int64_t num_cached_requests() const;
  int64_t num_cached_tokens() const;
  int64_t num_common_requests() const;  // responses that all requests draft from
  int64_t num_scopes() const;           // scopes with a tree; "" always has one
  int64_t num_bytes() const;            // bytes of the shared trees
  std::string check_integrity() const;

  // Save and load the shared trees. Running requests are stopped after loading. Errors are those of
  // suffix_file.h. `label` is a text of the caller that is stored in the file.
  void save(const std::string& path, const std::string& label = "") const;
  void load(const std::string& path);  // requires a cache with empty shared trees
  static std::string read_label(const std::string& path);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace specops
