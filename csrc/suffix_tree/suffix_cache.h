// SPDX-License-Identifier: Apache-2.0
// SuffixCache: a tree of each running request's own text, and shared trees of many requests' responses.
//
// Each scope has a shared tree, and there may be a common one. A request is drafted for from its own
// tree, that of its scope and the common one; the former wins where scores are equal. No request is
// drafted for from another scope's responses. All shared trees together are kept within one set of
// budgets by taking out the request that was started first, of whatever scope, running or not; what is
// taken out is given back a little at a time, so that no call takes long. A named scope's tree goes
// with its last request.
//
// Any thread may call anything: one lock a cache.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "suffix_tree/suffix_tree.h"

namespace specops {

struct SuffixCacheOptions {
  int32_t max_tree_depth = 64;
  // Budgets of all shared trees together: -1: any number; 0: no shared tree.
  int64_t max_cached_requests = -1;
  int64_t max_cached_tokens = -1;
  int64_t max_cached_bytes = -1;
  // Prompts of at least so many tokens are built by a thread of their own; -1: none.
  int64_t background_tokens = 1024;
};

// One step of a batch: every row's new tokens are appended, then every row is drafted for.
struct SuffixStepParams {
  const int64_t* requests;          // [batch], or -1: an idle row
  const int32_t* new_token_ids;     // [batch, new_capacity], rows new_stride apart
  const int32_t* num_new_tokens;    // [batch]
  const int32_t* max_draft_tokens;  // [batch], 0: none
  // [batch]: so many drafts stand in the row already, a path; the match ends with them, and what is
  // found is written behind them. nullptr: none.
  const int32_t* num_given_drafts;
  int32_t* draft_token_ids;   // [batch, capacity], -1 padded
  int32_t* num_draft_tokens;  // [batch], those given not among them
  int32_t* parents;           // [batch, capacity], indices in the row, -2 padded; or nullptr
  float* probs;               // [batch, capacity], 0 padded; or nullptr
  float* scores;              // [batch], or nullptr
  int32_t* match_lens;        // [batch], or nullptr
  int64_t batch;
  int64_t new_stride;
  int64_t draft_stride, parents_stride, probs_stride;
  int64_t capacity;
  DraftOptions options;  // its max_draft_tokens is not looked at
};

class SuffixCache {
 public:
  explicit SuffixCache(const SuffixCacheOptions& options);
  ~SuffixCache();
  SuffixCache(const SuffixCache&) = delete;
  SuffixCache& operator=(const SuffixCache&) = delete;

  // Begins a request of a scope and returns its number, which is never used again. Its lower half is that of a
  // slot, and slots are used again. Below, unknown numbers, and those of requests that have stopped
  // where a running one is wanted: std::invalid_argument, and nothing has changed.
  int64_t start(const int32_t* prompt, int64_t size, const std::string& scope = "");
  static int64_t slot(int64_t request) { return request & 0xffffffff; }
  void extend(int64_t request, const int32_t* token_ids, int64_t size);
  void speculate(int64_t request, const DraftOptions& options, SuffixDraft& draft);
  // The same after a context of the caller's, whose text need not be the request's.
  void speculate_after(int64_t request,
                       const int32_t* context,
                       int64_t size,
                       const DraftOptions& options,
                       SuffixDraft& draft);
  void step(const SuffixStepParams& params);
  // Ends a request; its response stays in the shared tree until it is evicted.
  void stop(int64_t request);
  // Takes a response out of the shared tree, its request running or not.
  void evict(int64_t request);
  // Adds a finished response that no request wrote, such as a file of a corpus; returns its number,
  // which is out of use already where a budget is smaller than the response. scope: whose requests
  // draft from it; nullptr: all requests do.
  int64_t add(const int32_t* token_ids, int64_t size, const std::string* scope);
  // Gives back all that was taken out; returns how many tokens.
  int64_t reclaim();
  // Waits until prompts given to `start` are built.
  void wait();

  bool is_running(int64_t request) const;
  bool is_cached(int64_t request) const;
  std::vector<int64_t> running() const;  // in the order they were started
  std::vector<int64_t> cached() const;
  // Whether a call would have to wait for another at this moment.
  bool is_busy() const;
  bool is_building(int64_t request) const;

  // Of all shared trees; of the request's own where one is named (-1: the shared ones).
  int64_t count(const int32_t* token_ids, int64_t size, int64_t request) const;
  int64_t num_cached_requests() const;
  int64_t num_cached_tokens() const;
  int64_t num_common_requests() const;  // responses that all requests draft from
  int64_t num_scopes() const;           // with a tree; "" always has one
  int64_t num_bytes() const;            // of the shared trees
  std::string check_integrity() const;

  // The shared trees; what runs comes back stopped. Errors are those of suffix_file.h.
  // label: the caller's own, kept in the file.
  void save(const std::string& path, const std::string& label = "") const;
  void load(const std::string& path);  // into a cache that has nothing in its shared tree
  static std::string read_label(const std::string& path);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace specops
