// SPDX-License-Identifier: Apache-2.0
// Argument checks and registration of find_shared_prefixes, which runs on the host without a
// kernel.
#include <string>

#include "batching/ops.h"
#include "batching/shared_prefixes.h"
#include "common/tensor_view.h"

namespace specops {
namespace {

void check_indptr(const Checker& check, const int32_t* indptr, int64_t batch, int64_t pages) {
  for (int64_t i = 0; i <= batch; ++i) {
    int32_t least = i == 0 ? 0 : indptr[i - 1];
    if (indptr[i] >= least && indptr[i] <= pages) continue;
    check.fail("kv_indptr[" + std::to_string(i) + "]",
               "in " + std::to_string(least) + " .. " + std::to_string(pages),
               std::to_string(indptr[i]));
  }
}

// `counts` receives the number of levels, and of tokens that need not be read once per request.
void find_prefixes(const TensorView& kv_indptr,
                   const TensorView& kv_indices,
                   Argument page_size_given,
                   Argument leaf_tokens_given,
                   Argument max_levels_given,
                   const TensorView& order,
                   const TensorView& prefix_leaders,
                   const TensorView& prefix_lens,
                   const TensorView& counts) {
  Checker check("find_shared_prefixes");
  Dim batch{"batch"}, batch_plus_1{"batch + 1"}, pages{"pages"}, levels{"max_levels"};
  Dim two{"2", 2};
  levels.value = check.integer("max_levels", max_levels_given, 0, Checker::kMaxInt32);
  check.tensor("kv_indptr", kv_indptr, {DType::kInt32}, {&batch_plus_1});
  check.that(batch_plus_1 >= 1, "kv_indptr", "at least 1 long", batch_plus_1.value);
  batch.value = batch_plus_1 - 1;
  check.tensor("kv_indices", kv_indices, {DType::kInt32}, {&pages});
  int64_t page_size = check.integer("page_size", page_size_given, 1, Checker::kMaxInt32);
  int64_t leaf_tokens = check.integer("leaf_tokens", leaf_tokens_given, 1, Checker::kMaxInt32);
  check.that(leaf_tokens % page_size == 0,
             "leaf_tokens",
             "a multiple of page_size=" + std::to_string(page_size),
             leaf_tokens);
  check.tensor("order", order, {DType::kInt32}, {&batch});
  check.tensor("prefix_leaders", prefix_leaders, {DType::kInt32}, {&levels, &batch});
  check.tensor("prefix_lens", prefix_lens, {DType::kInt32}, {&levels, &batch});
  check.tensor("counts", counts, {DType::kInt64}, {&two});
  bool is_on_host = order.dl.device.device_type == kDLCPU;
  check.that(is_on_host, "kv_indptr", "on cpu, as all arguments", "another device");
  check_indptr(check, kv_indptr.data<int32_t>(), batch, pages);
  auto found = find_shared_prefixes({.kv_indptr = kv_indptr.data<int32_t>(),
                                     .kv_indices = kv_indices.data<int32_t>(),
                                     .batch = batch,
                                     .leaf_pages = leaf_tokens / page_size,
                                     .leaf_tokens = leaf_tokens,
                                     .max_levels = levels,
                                     .order = order.data<int32_t>(),
                                     .prefix_leaders = prefix_leaders.data<int32_t>(),
                                     .prefix_lens = prefix_lens.data<int32_t>()});
  counts.data<int64_t>()[0] = found.num_levels;
  counts.data<int64_t>()[1] = found.num_saved_tokens;
}

}  // namespace

void register_shared_prefixes(pybind11::module_& m) {
  m.def("find_shared_prefixes", &find_prefixes);
}

}  // namespace specops
