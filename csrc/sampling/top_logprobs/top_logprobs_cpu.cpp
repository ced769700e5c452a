// SPDX-License-Identifier: Apache-2.0
#include "common/parallel.h"
#include "sampling/row/cpu/row_passes.h"
#include "sampling/row/cpu/select.h"
#include "sampling/row/cpu/target_row.h"
#include "sampling/top_logprobs/top_logprobs.h"

namespace specops::SPECOPS_ISA {
namespace {

bool precedes(float a, int32_t a_id, float b, int32_t b_id) { return a != b ? a > b : a_id < b_id; }

// Sorts parallel arrays by logit (descending), then id (ascending), with heap sort.
void sort_descending(float* logits, int32_t* ids, int64_t count) {
  auto swap = [&](int64_t i, int64_t j) {
    float logit = logits[i];
    int32_t id = ids[i];
    logits[i] = logits[j];
    ids[i] = ids[j];
    logits[j] = logit;
    ids[j] = id;
  };
  // The root of the heap is the token that ranks last.
  auto sift = [&](int64_t root, int64_t end) {
    for (int64_t child; (child = 2 * root + 1) < end; root = child) {
      if (child + 1 < end &&
          precedes(logits[child], ids[child], logits[child + 1], ids[child + 1])) {
        ++child;
      }
      if (!precedes(logits[root], ids[root], logits[child], ids[child])) return;
      swap(root, child);
    }
  };
  for (int64_t root = count / 2; root-- > 0;) sift(root, count);
  for (int64_t end = count; end-- > 1;) {
    swap(0, end);
    sift(0, end);
  }
}

// Writes the ranks of a row's first tokens, which are sorted: 1 + the number of greater logits.
void rank_sorted(const float* logits, int64_t count, int32_t* ranks) {
  for (int64_t i = 0; i < count; ++i) {
    bool tied = i > 0 && logits[i] == logits[i - 1];
    ranks[i] = tied ? ranks[i - 1] : static_cast<int32_t>(i + 1);
  }
}

// Returns the request to which a row belongs; -1 for a row after the last request's.
int64_t request_of(const TopLogprobsParams& params, int64_t row_idx) {
  if (params.drafts.output_indptr == nullptr) return row_idx;
  int64_t low = 0, high = params.batch;  // search for the first request that ends after the row
  while (low < high) {
    int64_t middle = low + (high - low) / 2;
    if (params.drafts.output_indptr[middle + 1] <= row_idx) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < params.batch ? low : -1;
}

RowProcessors processors_of(const TopLogprobsParams& params, int64_t batch_idx, int64_t row_idx) {
  int64_t first = params.drafts.output_indptr ? params.drafts.output_indptr[batch_idx] : row_idx;
  DraftPath path{.node = static_cast<int32_t>(row_idx - first - 1)};
  if (params.drafts.token_ids) {
    path.draft_token_ids = params.drafts.token_ids + batch_idx * params.drafts.max_draft_tokens;
  }
  if (params.drafts.parents)
    path.parents = params.drafts.parents + batch_idx * params.drafts.max_draft_tokens;
  return row_processors(params.processors, batch_idx, row_idx, params.positions[batch_idx], path);
}

// Finds the first n tokens of softmax(logits) or of target_probs, ranked by logit (descending),
// then id (ascending).
// Cost:    one read of rows * vocab_size logits, and a few passes over the row in L2.
// Assumes: rows contiguous, n <= vocab_size, output_indptr ascending from 0.
// Order:   row/cpu/row.h; ties to the lower id.
// Source:  threshold selection without a sort.
// Threads: one item per row.
template <typename T>
void run(const TopLogprobsParams& params) {
  const T* logits = static_cast<const T*>(params.logits);
  RowScores scores{.logprob = true,
                   .rank = params.outputs.ranks != nullptr,
                   .processed = params.processed_logprobs,
                   .lse = true};
  parallel_for(params.rows, row_grain(params.vocab_size), [&](int64_t begin, int64_t end) {
    for (int64_t row_idx = begin; row_idx < end; ++row_idx) {
      int64_t batch_idx = params.processed_logprobs ? request_of(params, row_idx) : -1;
      SamplingParams filters;
      RowProcessors processors;
      if (batch_idx >= 0) {
        filters = filters_of(params.sampling, batch_idx);
        if (has_processors(params.processors)) {
          processors = processors_of(params, batch_idx, row_idx);
        }
      }
      TargetRow<T> row(
          logits + row_idx * params.logits_stride, params.vocab_size, filters, &processors, scores);
      params.outputs.lse[row_idx] = row.lse();
      if (params.n == 0) continue;
      int32_t* ids = params.outputs.token_ids + row_idx * params.n;
      float* values = params.outputs.logprobs + row_idx * params.n;
      Cut cut{-INFINITY, static_cast<int32_t>(params.vocab_size - 1)};
      bool listed = false;
      if (params.n < params.vocab_size) cut = select_count(row.processed(), params.n, &listed);
      int64_t count = 0;
      for_each_of(row.processed(), cut, [&](int32_t id, float logit) {
        ids[count] = id;
        values[count] = logit;
        ++count;
      });
      sort_descending(values, ids, count);
      if (params.outputs.ranks)
        rank_sorted(values, count, params.outputs.ranks + row_idx * params.n);
      for (int64_t i = 0; i < count; ++i) values[i] = row.logprob(ids[i]);
    }
  });
}

}  // namespace

void top_logprobs_cpu(const TopLogprobsParams& params) {
  return params.dtype == DType::kBFloat16 ? run<bfloat16>(params) : run<float>(params);
}

}  // namespace specops::SPECOPS_ISA
