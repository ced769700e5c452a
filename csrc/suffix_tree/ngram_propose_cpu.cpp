// SPDX-License-Identifier: Apache-2.0
#include "common/parallel.h"
#include "suffix_tree/ngram_propose.h"

namespace specops::SPECOPS_ISA {
namespace {

constexpr int64_t kBlock = 64;

// True when one of kBlock tokens equals `last` and the one `distance` before it equals `first`.
inline bool block_has(const int32_t* tokens, int64_t distance, int32_t last, int32_t first) {
  int32_t any = 0;
  for (int64_t i = 0; i < kBlock; ++i) {
    any |= (tokens[i] == last) & (tokens[i - distance] == first);
  }
  return any != 0;
}

// The index after the best earlier occurrence of a suffix of tokens[0, len), or -1: the longest of
// min_size..max_size tokens, and among the longest the most recent.
int64_t best_match(const int32_t* tokens, int64_t len, int64_t min_size, int64_t max_size) {
  const int32_t* tail = tokens + len - 1;
  int64_t best_end = -1;
  // Only a match longer than `size` tokens is of interest: its last token is tail[0] and the token
  // `size` before it is tail[-size]. Hence a candidate that verifies always improves.
  int64_t size = min_size - 1;
  int64_t end = len - 2;  // last token of the candidate, going backwards
  while (end >= size) {
    // The last block reaches back over tokens already seen, which can only cost a closer look.
    int64_t start = end - size >= kBlock ? end - kBlock + 1 : size;
    if (start + kBlock < len && !block_has(tokens + start, size, tail[0], tail[-size])) {
      end = start - 1;
      continue;
    }
    int64_t stop = end - kBlock < -1 ? -1 : end - kBlock;
    for (; end > stop && end >= size; --end) {
      const int32_t* candidate = tokens + end;
      if (candidate[0] != tail[0] || candidate[-size] != tail[-size]) continue;
      int64_t match = 1;
      while (match < max_size && match <= end && candidate[-match] == tail[-match]) ++match;
      if (match <= size) continue;
      best_end = end + 1;
      if (match == max_size) return best_end;
      size = match;
    }
  }
  return best_end;
}

}  // namespace

// drafts = the tokens behind the most recent earlier occurrence of the longest matching suffix.
// Cost:    one backward scan of a row, 8 bytes read per token, ended by a match of max_size.
// Assumes: lens, limits and sizes checked by ops.cpp; 1 <= min size <= max size.
// Order:   integers only; longest first, then most recent.
// Source:  Saxena 2023, prompt lookup decoding; FastDeploy's ngram_match.
// Threads: rows, in pieces of about 32,768 tokens; fewer are not worth waking a thread for.
void ngram_propose_cpu(const NgramProposeParams& params) {
  constexpr int64_t kTokensWorthAThread = 32 * 1024;
  int64_t chunks = params.total_tokens / kTokensWorthAThread + 1;
  int64_t grain = (params.batch + chunks - 1) / chunks;
  parallel_for(params.batch, grain, [&](int64_t begin, int64_t end) {
    for (int64_t batch_idx = begin; batch_idx < end; ++batch_idx) {
      const int32_t* tokens = params.token_ids + batch_idx * params.stride;
      int32_t* drafts = params.draft_token_ids + batch_idx * params.capacity;
      int64_t len = params.lens[batch_idx];
      int64_t limit = params.max_draft_tokens[batch_idx];
      if (limit > params.capacity) limit = params.capacity;
      int64_t min_size = params.min_sizes ? params.min_sizes[batch_idx] : params.min_size;
      int64_t max_size = params.max_sizes ? params.max_sizes[batch_idx] : params.max_size;
      int64_t match = limit > 0 ? best_match(tokens, len, min_size, max_size) : -1;
      int64_t count = match < 0 ? 0 : len - match;
      if (count > limit) count = limit;
      for (int64_t i = 0; i < count; ++i) drafts[i] = tokens[match + i];
      for (int64_t i = count; i < params.capacity; ++i) drafts[i] = -1;
      params.num_draft_tokens[batch_idx] = static_cast<int32_t>(count);
    }
  });
}

}  // namespace specops::SPECOPS_ISA
