// SPDX-License-Identifier: Apache-2.0
// SuffixTree: exact counts of the occurrences of strings in many token sequences, and drafts based
// on them.
//
// For a string q of 1 .. max_depth tokens, count(q) is the number of occurrences of q in all
// sequences together. No occurrence crosses the end of a sequence. An appended token counts at
// once.
//
// Order: sequences are ordered by their start, and positions within a sequence by index. The
// younger of two occurrences is the one in the sequence that started later or, in the same
// sequence, the one with the higher index. Of equally frequent continuations, the one with the
// youngest occurrence wins. Every answer therefore depends only on the sequences and their order,
// not on the order in which their tokens were appended.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace specops {

class FileReader;
class FileWriter;

// Options of drafting. Their names are those of FastDeploy and of the paper.
struct DraftOptions {
  int32_t max_draft_tokens = 0;
  // A match of m tokens drafts at most trunc(m * max_spec_factor + max_spec_offset + 1e-6) tokens.
  float max_spec_factor = 1.0f;
  float max_spec_offset = 0.0f;
  float min_token_prob = 0.1f;  // smallest probability of a path from its first token on
  bool use_tree = false;        // draft a tree of the most probable continuations, not a path
  bool read_on = true;          // past max_depth, continue with the text of the youngest occurrence
  float above_score = 0.0f;     // a draft is returned only if its score is above this
};

// A draft: arrays that the caller allocated for max_draft_tokens tokens, and the result.
struct SuffixDraft {
  int32_t* token_ids = nullptr;
  int32_t* parents = nullptr;  // -1: follows the last token; nullptr: not requested
  float* probs = nullptr;      // of the path from the root to the token; nullptr: not requested
  int32_t size = 0;
  float score = 0.0f;     // sum of probs: the expected number of accepted tokens
  int32_t match_len = 0;  // number of tokens of the context that the draft follows
};

class SuffixTree {
 public:
  // Creates an empty tree. max_depth: 1 .. 32,767.
  explicit SuffixTree(int32_t max_depth);
  ~SuffixTree();
  SuffixTree(const SuffixTree&) = delete;
  SuffixTree& operator=(const SuffixTree&) = delete;

  // Methods that write: one call at a time, without concurrent readers.

  // Starts a sequence younger than all others. Handles of removed sequences are reused.
  int32_t start();
  void append(int32_t sequence, const int32_t* token_ids, int64_t size);
  // Declares that nothing more will be appended to a sequence. A sequence may be kept forever,
  // finished or not.
  void finish(int32_t sequence);
  // Removes a sequence, finished or not; its handle becomes invalid. If there is no older sequence,
  // `reclaim` frees its positions later, from the first token on; until then, the tree is exactly
  // that of the remaining tokens. Otherwise the positions are freed at once, in a pass over all
  // older positions.
  void remove(int32_t sequence);
  // Frees at most max_positions positions of removed sequences, and returns how many were freed.
  int64_t reclaim(int64_t max_positions);
  // Removes everything but keeps the memory.
  void clear();

  // Methods that read: any number at a time.

  int64_t count(const int32_t* token_ids, int64_t size) const;
  // Finds the best draft after `context`, over all of its suffixes that occur in the tree:
  //
  //   for m = min(size, max_depth) down to 1, if count(last m tokens) > 0:
  //     draft from them within the budget of m; keep the draft if its score is above the best so
  //     far
  //
  // `sequence` is the live sequence with which context ends, so that its suffixes need not be
  // searched for; -1 if there is none. A draft without tokens has score 0 and match_len 0.
  void speculate(int32_t sequence,
                 const int32_t* context,
                 int64_t size,
                 const DraftOptions& options,
                 SuffixDraft& draft) const;

  // Prefetches what appending the token to the sequence reads. To overlap the waits of many
  // sequences, run pass 0 for all of them, then pass 1, then pass 2; each pass reads what the
  // previous one has prefetched.
  void prefetch(int32_t sequence, int32_t token, int32_t pass) const;

  int32_t max_depth() const;
  int64_t num_sequences() const;
  int64_t num_tokens() const;          // tokens in sequences that are not removed
  int64_t num_pending_tokens() const;  // tokens of removed sequences that `reclaim` has not freed
  int64_t num_nodes() const;
  int64_t num_bytes() const;               // bytes allocated from the system
  int64_t num_used_bytes() const;          // bytes without memory that is free for reuse
  int64_t length(int32_t sequence) const;  // -1: no such sequence

  // Checks every invariant in suffix_state.h. Returns a description of the first violation, or "".
  // Changes nothing.
  std::string check_integrity() const;

  // Save and load all sequences. Loaded sequences are finished and have the same handles. `load`
  // requires an empty tree, and throws std::runtime_error if the data are inconsistent.
  void save(FileWriter& file) const;
  void load(FileReader& file);

  struct State;  // suffix_state.h

 private:
  std::unique_ptr<State> state_;
};

}  // namespace specops
