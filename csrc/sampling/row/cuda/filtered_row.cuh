// SPDX-License-Identifier: Apache-2.0
// The filters of a row, in the order temperature, top-k, top-p of the remaining tokens, min-p,
// typical-p.
#pragma once

#include <cfloat>

#include "sampling/row/cuda/draw.cuh"
#include "sampling/row/cuda/row.cuh"
#include "sampling/row/cuda/row_passes.cuh"
#include "sampling/row/cuda/select.cuh"
#include "sampling/row/cuda/token_list.cuh"
#include "sampling/row/cuda/typical.cuh"

namespace specops {

// Location of the weights of the kept tokens: in the scan's sums, in the list, in row.masses(), or
// not computed.
enum class Where { kScan, kList, kMasses, kNowhere };

// Applies all filters except typical-p; together they keep a prefix of the ranking. Leaves the cut
// in shared.cut and returns where the weights of the kept tokens are.
template <typename T, bool kProcessed>
__device__ __forceinline__ Where cut_ranking(const Row<T, kProcessed>& row) {
  if (row.thread() == 0) {
    const SamplingParams& params = row.shared.filters;
    row.shared.likely = -INFINITY;
    if (params.min_p > 0.0f) {  // min-p: weight >= min_p * the largest weight, which is 1
      // The threshold must not be -inf, which means that min-p is off: if min-p is on, the scan may
      // not have computed the sum that is used in that case.
      double least = row.max + static_cast<double>(logf(params.min_p)) / row.shared.inverse;
      row.shared.likely = fminf(least > -FLT_MAX ? static_cast<float>(least) : -FLT_MAX, row.max);
    }
  }
  int32_t top_k = row.shared.filters.top_k;
  bool counted = top_k > 0 && top_k < row.logits.size;
  begin_selection(row, everything(), static_cast<Mass>(top_k), 0);
  Where where = Where::kScan;
#pragma unroll 1
  for (int stage = counted ? 0 : 1; stage < 2; ++stage) {
    bool by_mass = stage == 1;
    float low;
    if (by_mass) {
      bool weighed = row.shared.filters.top_p < 1.0f;
      if (!weighed && row.shared.likely > -INFINITY) {
        begin_selection(row, tighter(row.shared.cut, {row.shared.likely, INT32_MAX}), 0, 0);
        if (where == Where::kScan) where = Where::kNowhere;
      }
      Mass total = 0;
      if (where == Where::kNowhere) {
        total = gather(row, INFINITY, -INFINITY, true);
        where = Where::kMasses;
      } else if (weighed) {
        total =
            where == Where::kScan ? row.scanned_total() : listed_total(row, true, row.shared.cut);
      }
      if (!weighed) break;
      double part = static_cast<double>(row.shared.filters.top_p) * static_cast<double>(total);
      Mass target = part < 1.0 ? 1 : static_cast<Mass>(part);
      begin_selection(row, row.shared.cut, target, total);
      if (where == Where::kList) {
        RankKey least = rank_key(row.shared.cut.value, row.shared.cut.last_id);
        Cut cut = cut_at(select_listed(row, true, least, rank_key(row.max, 0), 0, target));
        begin_selection(row, tighter(cut, {row.shared.likely, INT32_MAX}), 0, 0);
        break;
      }
      low = mass_floor(row);
    } else {
      low = count_floor(row, row.shared.filters.top_k);
    }
    bool listed = false;
    begin_selection(row, select(row, by_mass, low, &listed), 0, 0);
    where = by_mass ? Where::kMasses : listed ? Where::kList : Where::kNowhere;
  }
  if (where == Where::kList) {
    deposit(row, row.shared.cut);
    where = Where::kMasses;
  }
  return where;
}

// Applies the filters, in the order temperature, top-k, top-p of the remaining tokens, min-p,
// typical-p. A one-hot row keeps only its first token. Leaves the result in shared.kept and
// shared.typical.
template <typename T, bool kProcessed>
__device__ __forceinline__ void filter(const Row<T, kProcessed>& row) {
  if (row.one_hot()) {
    RowToken first{0, row.max};
    if (row.max > -INFINITY) first = first_token(row);
    if (row.thread() == 0) row.shared.kept = {row.max, first.id};
    __syncthreads();
    return;
  }
  bool weighed = cut_ranking(row) == Where::kMasses;
  if (row.thread() == 0) row.shared.kept = row.shared.cut;
  __syncthreads();
  if (row.shared.filters.typical_p < 1.0f) {
    keep_typical(row);
    weighed = true;
  }
  if (row.thread() == 0) row.shared.weighed = weighed;
  __syncthreads();
}

}  // namespace specops
