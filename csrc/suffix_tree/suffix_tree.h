// SPDX-License-Identifier: Apache-2.0
// SuffixTree: exact occurrence counts over many token sequences, and drafts based on them.
//
// For a string q of 1 .. max_depth tokens, count(q) is the number of occurrences of q in all
// sequences together; no occurrence crosses the end of a sequence. An appended token is visible at
// once.
//
// Order. Sequences are ordered by their start, and positions within a sequence by index. The
// younger of two occurrences is the one in the sequence started later, or at the higher index of
// the same sequence. Of equally frequent continuations, the one with the youngest occurrence wins.
// So every answer is a function of the sequences and their order alone, not of the order in which
// their tokens arrived.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace specops {

class FileReader;
class FileWriter;

// Options of drafting; the names are FastDeploy's and the paper's.
struct DraftOptions {
  int32_t max_draft_tokens = 0;
  // A match of m tokens drafts at most trunc(m * max_spec_factor + max_spec_offset + 1e-6).
  float max_spec_factor = 1.0f;
  float max_spec_offset = 0.0f;
  float min_token_prob = 0.1f;  // least probability of a path, from its first token on
  bool use_tree = false;     // draft a tree of the likeliest continuations, not the likeliest path
  bool read_on = true;       // continue past max_depth with the text of the youngest occurrence
  float above_score = 0.0f;  // a draft is returned only if its score is above this
};

// A draft: caller-allocated arrays for max_draft_tokens tokens, and the result.
struct SuffixDraft {
  int32_t* token_ids = nullptr;
  int32_t* parents = nullptr;  // -1: follows the last token; nullptr: not requested
  float* probs = nullptr;      // of the path up to the token; nullptr: not requested
  int32_t size = 0;
  float score = 0.0f;     // sum of probs: the expected number of accepted tokens
  int32_t match_len = 0;  // tokens of the context that the draft follows
};

class SuffixTree {
 public:
  // max_depth: 1 .. 32,767.
  explicit SuffixTree(int32_t max_depth);
  ~SuffixTree();
  SuffixTree(const SuffixTree&) = delete;
  SuffixTree& operator=(const SuffixTree&) = delete;

  // Writers: one at a time, without concurrent readers.

  // Starts a sequence younger than all others. Handles of removed sequences are reused.
  int32_t start();
  void append(int32_t sequence, const int32_t* token_ids, int64_t size);
  // Declares that nothing more will be appended. A sequence may stay forever, finished or not.
  void finish(int32_t sequence);
  // Removes a sequence, finished or not; its handle becomes invalid. If no older sequence is left,
  // `reclaim` frees its positions later, from the first token on; until then the tree is exactly
  // that of its remaining tokens. Otherwise they are freed at once, in a pass over all older
  // positions.
  void remove(int32_t sequence);
  // Frees at most max_positions positions of removed sequences; returns how many.
  int64_t reclaim(int64_t max_positions);
  // Removes everything but keeps the memory.
  void clear();

  // Readers: any number at a time.

  int64_t count(const int32_t* token_ids, int64_t size) const;
  // Finds the best draft after `context`, over its suffixes of every length that occur:
  //
  //   for m = min(size, max_depth) down to 1, if count(last m tokens) > 0:
  //     draft from them within the budget of m; keep it if its score is above the best so far
  //
  // `sequence` is the live sequence that context ends with, so that its suffixes need no search; -1
  // for none. A draft without tokens has score 0 and match_len 0.
  void speculate(int32_t sequence,
                 const int32_t* context,
                 int64_t size,
                 const DraftOptions& options,
                 SuffixDraft& draft) const;

  // Prefetches what appending the token to the sequence reads. To overlap the waits of many
  // sequences, run pass 0 for all, then passes 1 and 2; each reads what the previous one
  // prefetched.
  void prefetch(int32_t sequence, int32_t token, int32_t pass) const;

  int32_t max_depth() const;
  int64_t num_sequences() const;
  int64_t num_tokens() const;          // in sequences that were not removed
  int64_t num_pending_tokens() const;  // of removed sequences, until `reclaim` frees them
  int64_t num_nodes() const;
  int64_t num_bytes() const;               // allocated from the system
  int64_t num_used_bytes() const;          // without memory that is free for reuse
  int64_t length(int32_t sequence) const;  // -1: no such sequence

  // Checks every invariant that suffix_state.h lists; returns the first violation, or "". Changes
  // nothing.
  std::string check_integrity() const;

  // Saves or loads all sequences; they come back finished, with the same handles. `load` requires
  // an empty tree, and throws std::runtime_error if the data are inconsistent.
  void save(FileWriter& file) const;
  void load(FileReader& file);

  struct State;  // suffix_state.h

 private:
  std::unique_ptr<State> state_;
};

}  // namespace specops
