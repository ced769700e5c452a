// SPDX-License-Identifier: Apache-2.0
#include "common/parallel.h"
#include "suffix_tree/ngram_index.h"
#include "suffix_tree/ngram_propose.h"
#include "suffix_tree/ngram_share.h"

namespace specops::SPECOPS_ISA {
namespace {

constexpr int32_t kBlock = 64;
constexpr int32_t kGroup = 8;  // number of ends whose table entries are in flight at once

// Returns whether any of kBlock tokens equals `last` while the token `distance` before it equals
// `first`.
inline bool block_has(const int32_t* tokens, int64_t distance, int32_t last, int32_t first) {
  int32_t any = 0;
  for (int64_t i = 0; i < kBlock; ++i) {
    any |= (tokens[i] == last) & (tokens[i - distance] == first);
  }
  return any != 0;
}

// Returns the best match with more than `size` and at most max_size tokens among the ends low ..
// high, which must all be tokens of the row, not drafts. The best match is the longest one and, of
// equally long ones, the rightmost or leftmost.
template <bool kLeftmost>
NgramMatch scan_row(const NgramRequest& request, int32_t low, int32_t high, int32_t size) {
  const int32_t* tokens = request.tokens;
  int32_t last_idx = text_len(request) - 1;
  int32_t row_end = high;
  int32_t last = token_at(request, last_idx);
  NgramMatch best{.size = size, .end = -1};
  // Only a match of more than `size` tokens matters. Its last token must be `last`, and the token
  // `size` before that must be `first`. Hence a candidate that passes both tests and the comparison
  // always improves the result.
  while (true) {
    if (low < best.size) low = best.size;
    if (low > high) return best;
    int32_t first = token_at(request, last_idx - best.size);
    int32_t count = high - low + 1 < kBlock ? high - low + 1 : kBlock;
    int32_t from = kLeftmost ? low : high - count + 1;
    // The last block overlaps ends that were tested before, which costs only a second comparison.
    int32_t probe = kLeftmost ? from + count - kBlock : from;
    bool is_block = probe >= best.size && probe + kBlock - 1 <= row_end;
    if (!is_block || block_has(tokens + probe, best.size, last, first)) {
      for (int32_t i = 0; i < count; ++i) {
        int32_t end = kLeftmost ? from + i : from + count - 1 - i;
        if (end < best.size || tokens[end] != last || tokens[end - best.size] != first) continue;
        int32_t match = match_size(request, end, request.max_size);
        if (match <= best.size) continue;
        best = {.size = match, .end = end};
        if (match == request.max_size) return best;
        first = token_at(request, last_idx - match);
      }
    }
    (kLeftmost ? low : high) = kLeftmost ? low + count : high - count;
  }
}

// Scans all ends from `low` on, including the few among the drafts already in the row.
template <bool kLeftmost>
NgramMatch scan(const NgramRequest& request, int32_t low, int32_t size) {
  int32_t last_end = text_len(request) - 2;
  int32_t row_end = last_end < request.len - 1 ? last_end : request.len - 1;
  auto scan_given = [&](NgramMatch best) {
    int32_t count = last_end - row_end;
    for (int32_t i = 0; i < count && best.size < request.max_size; ++i) {
      int32_t end = kLeftmost ? row_end + 1 + i : last_end - i;
      int32_t match = match_size(request, end, request.max_size);
      if (match > best.size) best = {.size = match, .end = end};
    }
    return best;
  };
  NgramMatch best{.size = size, .end = -1};
  if (last_end < size) return best;
  if constexpr (kLeftmost) {
    best = scan_row<true>(request, low, row_end, size);
    return scan_given(best.end < 0 ? NgramMatch{.size = size, .end = -1} : best);
  } else {
    best = scan_given(best);
    if (best.size == request.max_size) return best;
    NgramMatch older = scan_row<false>(request, low, row_end, best.size);
    return older.end < 0 ? best : older;
  }
}

inline int32_t num_probes(const NgramPlan& plan) {
  return plan.num_entries < kNgramProbes ? plan.num_entries : kNgramProbes;
}

inline int32_t next_entry(int32_t idx, int32_t num_entries) {
  return idx + 1 == num_entries ? 0 : idx + 1;
}

// Hashes of the n-grams that end at one position, from min_size on.
struct Hashes {
  uint32_t of_size[kNgramMaxSizes];
};

// A row with its tables (one per size, in sequence), and hashes that are computed early enough for
// the entries to be in cache when they are needed.
struct Row {
  NgramRequest request;
  NgramPlan plan;
  int32_t* state;
  uint32_t* tables;
  Hashes last;           // of the last tokens of the text
  Hashes first[kGroup];  // of the first ends to add to the index

  uint32_t* table(int32_t idx) const { return tables + int64_t{idx} * plan.num_entries; }

  // Returns the number of n-grams that end at `end`.
  int32_t num_sizes_at(int32_t end) const {
    int32_t count = end + 2 - request.min_size;
    return count < plan.num_sizes ? count : plan.num_sizes;
  }
};

// Prefetches the entries of the n-grams that end at `end`.
void fetch(const Row& row, int32_t end, Hashes& hashes) {
  int32_t num_sizes = row.num_sizes_at(end);
  if (num_sizes <= 0) return;
  uint32_t hash = ngram_hash_at(row.request, end, row.request.min_size - 1);
  for (int32_t i = 0; i < num_sizes; ++i) {
    hash = ngram_hash(hash, token_at(row.request, end - (row.request.min_size - 1 + i)));
    hashes.of_size[i] = hash;
    __builtin_prefetch(row.table(i) + first_entry(hash, row.plan.num_entries));
  }
}

void fetch_ends(const Row& row, int32_t begin, int32_t stop, Hashes (&hashes)[kGroup]) {
  for (int32_t i = 0; i < kGroup && begin + i < stop; ++i) fetch(row, begin + i, hashes[i]);
}

void prepare(const NgramProposeParams& params, int64_t batch_idx, Row& row) {
  ErrorCode fault;
  bool has_index = params.table != nullptr;
  row.request = load_request(params, batch_idx, &fault);
  row.state = has_index ? params.state + 2 * batch_idx : nullptr;
  row.tables = has_index ? params.table + batch_idx * params.table_entries : nullptr;
  row.plan = plan_index(params, row.request, row.state);
  const NgramPlan& plan = row.plan;
  if (plan.num_indexed == 0) return;
  fetch(row, text_len(row.request) - 1, row.last);
  fetch_ends(row, plan.num_indexed, plan.num_indexed + plan.num_new, row.first);
}

// Returns the longest suffix of more than `size` tokens that the tables have.
NgramMatch find_indexed(const Row& row, int32_t size) {
  int32_t last = text_len(row.request) - 1;
  for (int32_t i = row.num_sizes_at(last - 1) - 1; i > size - row.request.min_size; --i) {
    int32_t wanted = row.request.min_size + i;
    uint32_t hash = row.last.of_size[i];
    const uint32_t* table = row.table(i);
    int32_t idx = first_entry(hash, row.plan.num_entries);
    for (int32_t probe = 0; probe < num_probes(row.plan) && table[idx] != 0; ++probe) {
      int32_t end = entry_end(table[idx], hash);
      if (end >= wanted - 1 && end < row.plan.num_indexed &&
          match_size(row.request, end, wanted) == wanted) {
        return {.size = wanted, .end = end};
      }
      idx = next_entry(idx, row.plan.num_entries);
    }
  }
  return {.size = size, .end = -1};
}

// Adds an n-gram to a table. Returns false if there is no free entry for it.
bool insert(const Row& row, uint32_t* table, uint32_t hash, int32_t end, int32_t size) {
  int32_t idx = first_entry(hash, row.plan.num_entries);
  for (int32_t i = 0; i < num_probes(row.plan); ++i) {
    int32_t other = entry_end(table[idx], hash);
    bool is_own = table[idx] != 0 && other >= size - 1 && other < end &&
                  same_ngram(row.request.tokens, other, end, size);
    if (table[idx] == 0 || is_own) {
      if (!is_own || !row.request.is_leftmost) table[idx] = make_entry(hash, end);
      return true;
    }
    idx = next_entry(idx, row.plan.num_entries);
  }
  return false;
}

// Adds the ends of the plan in order. Returns how many ends the tables then cover.
int32_t extend(const Row& row) {
  int32_t begin = row.plan.num_indexed, stop = begin + row.plan.num_new;
  Hashes hashes[2][kGroup];
  if (begin == 0) {
    int64_t count = int64_t{row.plan.num_sizes} * row.plan.num_entries;
    for (int64_t i = 0; i < count; ++i) row.tables[i] = 0;
    fetch_ends(row, begin, stop, hashes[0]);
  }
  const Hashes* now = begin == 0 ? hashes[0] : row.first;
  for (int32_t group = 1; begin < stop; ++group, begin += kGroup) {
    Hashes(&next)[kGroup] = hashes[group % 2];
    fetch_ends(row, begin + kGroup, stop, next);
    for (int32_t end = begin; end < begin + kGroup && end < stop; ++end) {
      for (int32_t i = 0; i < row.num_sizes_at(end); ++i) {
        uint32_t hash = now[end - begin].of_size[i];
        if (!insert(row, row.table(i), hash, end, row.request.min_size + i)) return end;
      }
    }
    now = next;
  }
  return stop;
}

NgramMatch best_match(const Row& row) {
  int32_t low = row.plan.num_indexed;
  int32_t size = row.request.min_size - 1;
  if (row.request.is_leftmost) {
    NgramMatch indexed = low > 0 ? find_indexed(row, size) : NgramMatch{size};
    if (indexed.size == row.request.max_size) return indexed;
    NgramMatch scanned = scan<true>(row.request, low, indexed.size);
    return scanned.end < 0 ? indexed : scanned;
  }
  NgramMatch scanned = scan<false>(row.request, low, size);
  if (low == 0 || scanned.size == row.request.max_size) return scanned;
  NgramMatch indexed = find_indexed(row, scanned.size);
  return indexed.end < 0 ? scanned : indexed;
}

// Truncates the drafts of the batch to max_total_draft_tokens; see ngram_share.h.
void share_drafts(const NgramProposeParams& params) {
  auto share_of = [&](int64_t idx) {
    return unpack_share(params.num_draft_tokens[idx], params.capacity);
  };
  auto total = [&](int32_t cap) {
    int64_t sum = 0;
    for (int64_t i = 0; i < params.batch; ++i) sum += capped(share_of(i), cap);
    return sum;
  };
  auto low = int32_t{0}, high = static_cast<int32_t>(params.capacity);
  if (total(high) <= params.max_total_draft_tokens) low = high;
  while (low + 1 < high) {  // the total exceeds the limit at `high`, and at `low` only if low is 0
    int32_t cap = low + (high - low) / 2;
    (total(cap) <= params.max_total_draft_tokens ? low : high) = cap;
  }
  int64_t rest = params.max_total_draft_tokens - total(low);
  for (int64_t i = 0; i < params.batch; ++i) {
    NgramShare share = share_of(i);
    int32_t kept = capped(share, low);
    if (is_cut(share, low) && rest-- > 0) ++kept;
    for (int32_t j = kept; j < share.count; ++j) {
      params.draft_token_ids[i * params.capacity + j] = -1;
    }
    params.num_draft_tokens[i] = kept;
    if (params.match_lens && kept == share.num_given) params.match_lens[i] = 0;
  }
}

}  // namespace

// Copies drafts: the tokens after the best earlier occurrence of the longest suffix of the text
// that occurs earlier.
// Cost:    without an index, one scan of a row, 8 bytes read per token, until a match of max_size.
//          With an index, a scan of the tokens that it does not cover, a few random reads per size,
//          and as many per size and new token.
// Assumes: lens, limits and sizes checked by ops.cpp; 1 <= min size <= max size.
// Order:   integers only; longest first, then most recent or leftmost.
// Source:  Saxena 2023, prompt lookup decoding; FastDeploy's ngram_match.
// Threads: rows, in pieces of about 32,768 scanned tokens; less is not worth waking a thread for.
void ngram_propose_cpu(const NgramProposeParams& params) {
  constexpr int64_t kTokensWorthAThread = 32 * 1024;
  int64_t chunks = params.work / kTokensWorthAThread + 1;
  int64_t grain = (params.batch + chunks - 1) / chunks;
  bool shares = params.max_total_draft_tokens >= 0;
  parallel_for(params.batch, grain, [&](int64_t begin, int64_t end) {
    Row rows[2];
    prepare(params, begin, rows[begin % 2]);
    for (int64_t batch_idx = begin; batch_idx < end; ++batch_idx) {
      if (batch_idx + 1 < end) prepare(params, batch_idx + 1, rows[(batch_idx + 1) % 2]);
      const Row& row = rows[batch_idx % 2];
      const NgramRequest& request = row.request;
      int32_t* drafts = params.draft_token_ids + batch_idx * params.capacity;
      int32_t count = 0, match_len = 0;
      if (request.room > 0) {
        NgramMatch match = best_match(row);
        if (match.end >= 0) {
          count = text_len(request) - 1 - match.end;
          match_len = match.size;
        }
        if (count > request.room) count = request.room;
        for (int32_t i = 0; i < count; ++i) {
          drafts[request.num_given + i] = token_at(request, match.end + 1 + i);
        }
        if (row.plan.num_new > 0) keep_state(row.plan, extend(row), row.state);
      }
      count += request.num_given;
      for (int64_t i = count; i < params.capacity; ++i) drafts[i] = -1;
      NgramShare share{.num_given = request.num_given, .count = count};
      params.num_draft_tokens[batch_idx] = shares ? pack_share(share, params.capacity) : count;
      if (params.match_lens) params.match_lens[batch_idx] = match_len;
    }
  });
  if (shares) share_drafts(params);
}

}  // namespace specops::SPECOPS_ISA
