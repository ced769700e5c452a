// SPDX-License-Identifier: Apache-2.0
#include "common/parallel.h"
#include "sampling/row_cpu.h"
#include "sampling/top_logprobs.h"

namespace specops::SPECOPS_ISA {
namespace {

bool precedes(float a, int32_t a_id, float b, int32_t b_id) { return a != b ? a > b : a_id < b_id; }

// Heap sort of parallel arrays by (logit descending, id ascending).
void sort_descending(float* logits, int32_t* ids, int64_t count) {
  auto swap = [&](int64_t i, int64_t j) {
    float logit = logits[i];
    int32_t id = ids[i];
    logits[i] = logits[j];
    ids[i] = ids[j];
    logits[j] = logit;
    ids[j] = id;
  };
  // The heap's root is the token that comes last.
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

// The first n tokens of softmax(logits) by (logit descending, id ascending).
// Cost:    one read of rows * vocab_size logits, and a few passes over the row in L2.
// Assumes: rows contiguous, n <= vocab_size.
// Order:   row_cpu.h; ties to the lower id.
// Source:  threshold selection without a sort.
// Threads: rows.
template <typename T>
void run(const TopLogprobsParams& params) {
  const T* logits = static_cast<const T*>(params.logits);
  parallel_for(params.rows, row_grain(params.vocab_size), [&](int64_t begin, int64_t end) {
    for (int64_t row_idx = begin; row_idx < end; ++row_idx) {
      Row<T> row(logits + row_idx * params.logits_stride, params.vocab_size, 1.0f);
      row.scan(true, false);
      params.lse[row_idx] = row.lse();
      if (params.n == 0) continue;
      int32_t* ids = params.token_ids + row_idx * params.n;
      float* values = params.logprobs + row_idx * params.n;
      Cut cut{-INFINITY, static_cast<int32_t>(params.vocab_size - 1)};
      bool listed = false;
      if (params.n < params.vocab_size) cut = row.select_count(params.n, &listed);
      int64_t count = 0;
      row.for_each_of(cut, [&](int32_t id, float logit) {
        ids[count] = id;
        values[count] = logit;
        ++count;
      });
      sort_descending(values, ids, count);
      for (int64_t i = 0; i < count; ++i) values[i] = row.logprob(values[i]);
    }
  });
}

}  // namespace

void top_logprobs_cpu(const TopLogprobsParams& params) {
  return params.dtype == DType::kBFloat16 ? run<bfloat16>(params) : run<float>(params);
}

}  // namespace specops::SPECOPS_ISA
