// SPDX-License-Identifier: Apache-2.0
// Argument checks and registration of tree_chains, which runs on the host without a kernel.
#include <algorithm>
#include <string>
#include <vector>

#include "batching/ops.h"
#include "batching/tree_chains.h"
#include "common/tensor_view.h"

namespace specops {
namespace {

void check_room(Checker& check, const char* name, int64_t size, size_t count) {
  check.that(size >= static_cast<int64_t>(count),
             name,
             "of at least " + std::to_string(count) + " elements",
             size);
}

// Writes the values and pads the rest.
template <typename T>
void write_padded(const TensorView& view, const std::vector<T>& values, T padding) {
  T* end = std::copy(values.begin(), values.end(), view.data<T>());
  std::fill(end, view.data<T>() + view.size(0), padding);
}

// Runs on the host, because the sizes of a step's arrays depend on the result.
void tree_chains(const TensorView& parents,
                 const TensorView& num_draft_tokens,
                 const TensorView& qo_lens,
                 const TensorView& kv_lens,
                 const TensorView& kv_indptr,
                 const TensorView& kv_indices,
                 const TensorView& spare_pages,
                 Argument page_size_given,
                 const TensorView& chain_indptr,
                 const TensorView& chain_qo_lens,
                 const TensorView& chain_kv_lens,
                 const TensorView& chain_kv_indptr,
                 const TensorView& chain_kv_indices,
                 const TensorView& from_slots,
                 const TensorView& to_slots) {
  Checker check("tree_chains");
  Dim batch{"batch"}, batch_plus_1{"batch + 1"}, nodes{"nodes"}, pages{"pages"}, spare{"spare"};
  Dim chains{"chains"}, chains_plus_1{"chains + 1"}, entries{"entries"}, copies{"copies"};
  check.tensor("parents", parents, {DType::kInt32}, {&batch, &nodes});
  batch_plus_1.value = batch + 1;
  check.tensor("num_draft_tokens", num_draft_tokens, {DType::kInt32}, {&batch});
  check.tensor("qo_lens", qo_lens, {DType::kInt32}, {&batch});
  check.tensor("kv_lens", kv_lens, {DType::kInt32}, {&batch});
  check.tensor("kv_indptr", kv_indptr, {DType::kInt32}, {&batch_plus_1});
  check.tensor("kv_indices", kv_indices, {DType::kInt32}, {&pages});
  check.tensor("spare_pages", spare_pages, {DType::kInt32}, {&spare});
  int64_t page_size = check.integer("page_size", page_size_given, 1, Checker::kMaxInt32);
  check.tensor("chain_indptr", chain_indptr, {DType::kInt32}, {&batch_plus_1});
  check.tensor("chain_qo_lens", chain_qo_lens, {DType::kInt32}, {&chains});
  chains_plus_1.value = chains + 1;
  check.tensor("chain_kv_lens", chain_kv_lens, {DType::kInt32}, {&chains});
  check.tensor("chain_kv_indptr", chain_kv_indptr, {DType::kInt32}, {&chains_plus_1});
  check.tensor("chain_kv_indices", chain_kv_indices, {DType::kInt32}, {&entries});
  check.tensor("from_slots", from_slots, {DType::kInt64}, {&copies});
  check.tensor("to_slots", to_slots, {DType::kInt64}, {&copies});
  bool is_on_host = parents.dl.device.device_type == kDLCPU;
  check.that(is_on_host, "parents", "on cpu, as all arguments", "another device");
  TreeChains found;
  TreeFault fault = find_tree_chains({.parents = parents.data<int32_t>(),
                                      .num_draft_tokens = num_draft_tokens.data<int32_t>(),
                                      .qo_lens = qo_lens.data<int32_t>(),
                                      .kv_lens = kv_lens.data<int32_t>(),
                                      .kv_indptr = kv_indptr.data<int32_t>(),
                                      .kv_indices = kv_indices.data<int32_t>(),
                                      .spare_pages = spare_pages.data<int32_t>(),
                                      .batch = batch,
                                      .nodes = nodes,
                                      .num_indices = pages,
                                      .num_spare_pages = spare,
                                      .page_size = page_size},
                                     found);
  if (!fault.argument.empty()) {
    check.fail(fault.argument, fault.expected, std::to_string(fault.got));
  }
  check_room(check, "chain_qo_lens", chains, found.qo_lens.size());
  check_room(check, "chain_kv_indices", entries, found.kv_indices.size());
  check_room(check, "from_slots", copies, found.from_slots.size());
  write_padded(chain_indptr, found.chain_indptr, 0);
  write_padded(chain_qo_lens, found.qo_lens, 0);
  write_padded(chain_kv_lens, found.kv_lens, 0);
  write_padded(chain_kv_indptr, found.kv_indptr, found.kv_indptr.back());
  write_padded(chain_kv_indices, found.kv_indices, 0);
  write_padded(from_slots, found.from_slots, int64_t{-1});
  write_padded(to_slots, found.to_slots, int64_t{-1});
}

}  // namespace

void register_tree_chains(pybind11::module_& m) { m.def("tree_chains", &tree_chains); }

}  // namespace specops
