// SPDX-License-Identifier: Apache-2.0
// SuffixTree: exact occurrence counts over many token sequences, and drafts read off them.
//
// For a string q of 1 .. max_depth tokens, count(q) is how often q occurs in all sequences together;
// no occurrence crosses the end of a sequence. Appending a token is visible at once.
//
// Order. Sequences have the order in which they were started, positions of one sequence their own:
// of two occurrences the younger is the one in the sequence started later, or further on in the same.
// Of equally frequent continuations the one with the youngest occurrence wins. So every answer is a
// function of the sequences and their order alone, not of how their tokens arrived.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace specops {

class FileReader;
class FileWriter;

// How a draft is chosen; the names are FastDeploy's and the paper's.
struct DraftOptions {
  int32_t max_draft_tokens = 0;
  // A match of m tokens drafts at most trunc(m * max_spec_factor + max_spec_offset + 1e-6).
  float max_spec_factor = 1.0f;
  float max_spec_offset = 0.0f;
  float min_token_prob = 0.1f;  // of a path, from its first token on
  bool use_tree = false;        // the likeliest continuations as a tree, not the likeliest path
  bool read_on = true;          // past max_depth, where the text of the youngest occurrence goes on
  float above_score = 0.0f;     // a draft whose score is not above it is not wanted: found is none
};

// Room for max_draft_tokens tokens, and what was written there.
struct SuffixDraft {
  int32_t* token_ids = nullptr;
  int32_t* parents = nullptr;  // -1: follows the last token; nullptr: not wanted
  float* probs = nullptr;      // of the path down to the token; nullptr: not wanted
  int32_t size = 0;
  float score = 0.0f;     // sum of probs: the tokens expected to be accepted
  int32_t match_len = 0;  // tokens of context that the draft follows
};

class SuffixTree {
 public:
  // max_depth: 1 .. 32,767.
  explicit SuffixTree(int32_t max_depth);
  ~SuffixTree();
  SuffixTree(const SuffixTree&) = delete;
  SuffixTree& operator=(const SuffixTree&) = delete;

  // One writer at a time, and no reader beside it.

  // Starts a sequence younger than all others. Handles of removed sequences are used again.
  int32_t start();
  void append(int32_t sequence, const int32_t* token_ids, int64_t size);
  // Nothing more will be appended. A sequence may stay, finished or not, as long as one likes.
  void finish(int32_t sequence);
  // Takes a sequence out, finished or not; the handle is gone. If no older one is left, its positions
  // are given back by `reclaim`, from its first token on: until then the tree is exactly that of its
  // remaining tokens. Else they are given back at once, which takes a pass over all older positions.
  void remove(int32_t sequence);
  // Gives back at most max_positions positions of removed sequences; returns how many.
  int64_t reclaim(int64_t max_positions);
  // Forgets everything, keeps the memory.
  void clear();

  // Any number of readers.

  int64_t count(const int32_t* token_ids, int64_t size) const;
  // The best draft after `context`, over its suffixes of every length that occur:
  //
  //   for m = min(size, max_depth) down to 1, if count(last m tokens) > 0:
  //     draft from them within the budget of m; keep it if its score is above the best so far
  //
  // sequence: the live sequence that context ends with, so that its suffixes need not be looked for;
  // -1 for none. A draft of no tokens has score 0 and match_len 0.
  void speculate(int32_t sequence,
                 const int32_t* context,
                 int64_t size,
                 const DraftOptions& options,
                 SuffixDraft& draft) const;

  // Asks for what append of the token to the sequence reads. Of many sequences, so that the waits
  // overlap: pass 0 of all, then 1 and 2, each of which reads what the one before asked for.
  void prefetch(int32_t sequence, int32_t token, int32_t pass) const;

  int32_t max_depth() const;
  int64_t num_sequences() const;
  int64_t num_tokens() const;          // in sequences that were not removed
  int64_t num_pending_tokens() const;  // of removed ones, to be given back by `reclaim`
  int64_t num_nodes() const;
  int64_t num_bytes() const;               // taken from the system
  int64_t num_used_bytes() const;          // without what is free to be used again
  int64_t length(int32_t sequence) const;  // -1: no such sequence

  // Checks every invariant (suffix_state.h lists them); returns what is wrong, or "". Changes nothing.
  std::string check_integrity() const;

  // Sequences come back finished, with the handles they had. `load` wants an empty tree, and throws
  // std::runtime_error where the data contradict themselves.
  void save(FileWriter& file) const;
  void load(FileReader& file);

  struct State;  // suffix_state.h

 private:
  std::unique_ptr<State> state_;
};

}  // namespace specops
