// SPDX-License-Identifier: Apache-2.0
// Logits processors, which change a row of logits before the filters: allowed tokens, bad words,
// minimum length, biases and penalties. The function adjusted_logit applies biases and penalties to
// one logit. All devices call it, and only for the few tokens that a table names. Plain C++ and
// CUDA.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "common/dtype.h"
#include "common/host_device.h"

namespace specops {

// Tables of the logits processors. They have one row per slot, so that they stay in place when
// requests start and end. Every pointer may be nullptr, which disables that processor.
struct LogitsProcessors {
  const int32_t* slots = nullptr;              // [batch], row of the tables; -1 = none
  const int32_t* token_ids = nullptr;          // [num_slots, max_len], known tokens
  const int32_t* prompt_lens = nullptr;        // [num_slots]
  const int32_t* counted_token_ids = nullptr;  // [num_slots, max_counted], ascending, then -1
  const int32_t* token_counts = nullptr;       // 2 * (count in the output) + (1 if in the prompt)
  const float* repetition_penalty = nullptr;   // [num_slots], 1 = off
  const float* presence_penalty = nullptr;     // [num_slots], 0 = off
  const float* frequency_penalty = nullptr;    // [num_slots], 0 = off
  const int32_t* logit_bias_token_ids = nullptr;  // [num_slots, max_biases], ascending, then -1
  const float* logit_bias = nullptr;              // [num_slots, max_biases]
  const int32_t* bad_words = nullptr;  // [num_slots, max_bad_words, max_bad_word_len], -1 padded
  const int32_t* stop_token_ids = nullptr;      // [num_slots, max_stop_tokens], -1 padded
  const int32_t* min_tokens = nullptr;          // [num_slots], minimum output length
  const int32_t* allowed_token_mask = nullptr;  // [num_masks, mask_words], a bit per token
  const int32_t* mask_indices = nullptr;  // [num_output_rows], row of the mask; -1 = all allowed
  int64_t num_slots = 0;
  int64_t max_len = 0;           // columns of token_ids
  int64_t token_ids_stride = 0;  // elements between rows of token_ids
  int64_t max_counted = 0;
  int64_t max_biases = 0;
  int64_t max_bad_words = 0;
  int64_t max_bad_word_len = 0;
  int64_t max_stop_tokens = 0;
  int64_t num_masks = 0;
  int64_t mask_words = 0;
};

// Returns whether any processor is enabled. If none is, the row functions without processors are
// used.
SPECOPS_HOST_DEVICE bool has_processors(const LogitsProcessors& processors) {
  return processors.slots != nullptr || processors.mask_indices != nullptr;
}

// The drafts before a row: the first drafts of a chain, or the ancestors of the row in a tree.
struct DraftPath {
  const int32_t* draft_token_ids = nullptr;  // drafts of the request
  const int32_t* parents = nullptr;          // parents of the request's drafts; nullptr: a chain
  int32_t node = -1;  // the last draft before the row; -1: the row follows the known tokens
};

SPECOPS_HOST_DEVICE int32_t node_before(const DraftPath& path, int32_t node) {
  return path.parents ? path.parents[node] : node - 1;
}

SPECOPS_HOST_DEVICE int32_t path_depth(const DraftPath& path) {
  int32_t depth = 0;
  for (int32_t node = path.node; node >= 0; node = node_before(path, node)) ++depth;
  return depth;
}

// The processors of one row: pointers to the slot's row of every table.
struct RowProcessors {
  const int32_t* token_ids = nullptr;
  const int32_t* counted_token_ids = nullptr;
  const int32_t* token_counts = nullptr;
  const int32_t* bias_token_ids = nullptr;
  const float* biases = nullptr;
  const int32_t* bad_words = nullptr;
  const int32_t* stop_token_ids = nullptr;  // nullptr once the minimum length is reached
  const int32_t* mask = nullptr;
  int32_t max_counted = 0;
  int32_t max_biases = 0;
  int32_t max_bad_words = 0;
  int32_t max_bad_word_len = 0;
  int32_t max_stop_tokens = 0;
  int32_t num_tokens = 0;  // known tokens; the drafts of `path` follow them
  float repetition = 1.0f;
  float presence = 0.0f;
  float frequency = 0.0f;
  bool penalizes = false;
  DraftPath path;
};

// Returns the processors of one row. `batch_idx`: index of the request; `output_row`: index of the
// row in the logits; `num_tokens`: number of the request's known tokens, which is also the position
// of the token after them. The slot and the mask index must be in range.
SPECOPS_HOST_DEVICE RowProcessors row_processors(const LogitsProcessors& all,
                                                 int64_t batch_idx,
                                                 int64_t output_row,
                                                 int32_t num_tokens,
                                                 const DraftPath& path) {
  RowProcessors row;
  row.num_tokens = num_tokens;
  row.path = path;
  if (all.mask_indices && all.mask_indices[output_row] >= 0) {
    row.mask = all.allowed_token_mask + all.mask_indices[output_row] * all.mask_words;
  }
  int64_t slot = all.slots ? all.slots[batch_idx] : -1;
  if (slot < 0) return row;
  if (all.repetition_penalty) row.repetition = all.repetition_penalty[slot];
  if (all.presence_penalty) row.presence = all.presence_penalty[slot];
  if (all.frequency_penalty) row.frequency = all.frequency_penalty[slot];
  row.penalizes = row.repetition != 1.0f || row.presence != 0.0f || row.frequency != 0.0f;
  if (row.penalizes) {
    row.counted_token_ids = all.counted_token_ids + slot * all.max_counted;
    row.token_counts = all.token_counts + slot * all.max_counted;
    row.max_counted = static_cast<int32_t>(all.max_counted);
  }
  if (all.logit_bias_token_ids) {
    row.bias_token_ids = all.logit_bias_token_ids + slot * all.max_biases;
    row.biases = all.logit_bias + slot * all.max_biases;
    row.max_biases = static_cast<int32_t>(all.max_biases);
  }
  if (all.bad_words) {
    row.token_ids = all.token_ids + slot * all.token_ids_stride;
    row.bad_words = all.bad_words + slot * all.max_bad_words * all.max_bad_word_len;
    row.max_bad_words = static_cast<int32_t>(all.max_bad_words);
    row.max_bad_word_len = static_cast<int32_t>(all.max_bad_word_len);
  }
  if (all.min_tokens &&
      int64_t{num_tokens} - all.prompt_lens[slot] + path_depth(path) < all.min_tokens[slot]) {
    row.stop_token_ids = all.stop_token_ids + slot * all.max_stop_tokens;
    row.max_stop_tokens = static_cast<int32_t>(all.max_stop_tokens);
  }
  return row;
}

// Returns the index of an id in an ascending list padded with -1 (the largest id when read as
// unsigned); -1 if it is not there.
SPECOPS_HOST_DEVICE int32_t find_sorted(const int32_t* ids, int32_t size, int32_t id) {
  int32_t low = 0, high = size;
  while (low < high) {
    int32_t middle = low + (high - low) / 2;
    if (static_cast<uint32_t>(ids[middle]) < static_cast<uint32_t>(id)) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < size && ids[low] == id ? low : -1;
}

// Returns whether the tokens before the row end with a bad word without its last token.
SPECOPS_HOST_DEVICE bool follows(const RowProcessors& row, const int32_t* word, int32_t length) {
  int32_t node = row.path.node, known = row.num_tokens;
  for (int32_t i = length - 2; i >= 0; --i) {
    int32_t token;
    if (node >= 0) {
      token = row.path.draft_token_ids[node];
      node = node_before(row.path, node);
    } else {
      if (known <= 0) return false;
      token = row.token_ids[--known];
    }
    if (token != word[i]) return false;
  }
  return true;
}

SPECOPS_HOST_DEVICE int32_t bad_word_len(const RowProcessors& row, const int32_t* word) {
  int32_t length = 0;
  while (length < row.max_bad_word_len && word[length] >= 0) ++length;
  return length;
}

// Returns the token that bad word `idx` forbids in this row; -1 if none.
SPECOPS_HOST_DEVICE int32_t forbidden_by(const RowProcessors& row, int32_t idx) {
  const int32_t* word = row.bad_words + static_cast<int64_t>(idx) * row.max_bad_word_len;
  int32_t length = bad_word_len(row, word);
  return length > 0 && follows(row, word, length) ? word[length - 1] : -1;
}

SPECOPS_HOST_DEVICE bool is_allowed(const RowProcessors& row, int32_t id) {
  return row.mask == nullptr || (static_cast<uint32_t>(row.mask[id / 32]) >> (id % 32) & 1u) != 0;
}

// Returns x with NaN as -inf and +inf as the largest finite float.
SPECOPS_HOST_DEVICE float clean_logit(float x) {
  if (!(x >= -FLT_MAX)) return -INFINITY;
  return x <= FLT_MAX ? x : FLT_MAX;
}

// Applies penalties to a logit. `outputs`: how often the token is in the output, including the
// drafts before the row.
SPECOPS_HOST_DEVICE float penalized_logit(const RowProcessors& row,
                                          float x,
                                          int32_t outputs,
                                          bool in_prompt) {
  if (outputs > 0 || in_prompt) {
    x = x > 0.0f ? x / row.repetition : x * row.repetition;
  }
  float scaled = row.frequency * static_cast<float>(outputs);
  x -= scaled;
  if (outputs > 0) x -= row.presence;
  return x;
}

// Applies biases and penalties to the logit of a token that is not forbidden. Each step is rounded
// to fp32. `find(ids, size, id)` is find_sorted or an equivalent that uses an index.
template <typename Find>
SPECOPS_HOST_DEVICE float adjusted_logit(const RowProcessors& row,
                                         int32_t id,
                                         float x,
                                         const Find& find) {
  x = clean_logit(x);
  if (row.max_biases > 0) {
    int32_t at = find(row.bias_token_ids, row.max_biases, id);
    if (at >= 0) x += row.biases[at];
  }
  if (!row.penalizes) return x;
  int32_t at = find(row.counted_token_ids, row.max_counted, id);
  int32_t counts = at >= 0 ? row.token_counts[at] : 0;
  int32_t outputs = counts >> 1;
  for (int32_t node = row.path.node; node >= 0; node = node_before(row.path, node)) {
    outputs += row.path.draft_token_ids[node] == id;
  }
  return penalized_logit(row, x, outputs, (counts & 1) != 0);
}

SPECOPS_HOST_DEVICE float adjusted_logit(const RowProcessors& row, int32_t id, float x) {
  return adjusted_logit(row, id, x, find_sorted);
}

// Calls visit(id) for every token that a bad word or the minimum length forbids. The id may be -1
// (padding).
template <typename Visit>
SPECOPS_HOST_DEVICE void for_each_forbidden(const RowProcessors& row,
                                            int32_t begin,
                                            int32_t step,
                                            Visit&& visit) {
  for (int32_t i = begin; i < row.max_stop_tokens; i += step) visit(row.stop_token_ids[i]);
  for (int32_t i = begin; i < row.max_bad_words; i += step) visit(forbidden_by(row, i));
}

// Calls visit(id) for every draft before the row.
template <typename Visit>
SPECOPS_HOST_DEVICE void for_each_in_flight(const RowProcessors& row, Visit&& visit) {
  for (int32_t node = row.path.node; node >= 0; node = node_before(row.path, node)) {
    visit(row.path.draft_token_ids[node]);
  }
}

}  // namespace specops
