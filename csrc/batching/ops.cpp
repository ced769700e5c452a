// SPDX-License-Identifier: Apache-2.0
// Argument checks and registration of the batching ops.
#include "batching/ops.h"

#include <string>

#include "batching/advance_draft_batch.h"
#include "batching/build_tree.h"
#include "batching/gather_input_ids.h"
#include "batching/gather_output_rows.h"
#include "batching/keep_hidden_rows.h"
#include "batching/prepare_batch.h"
#include "batching/prepare_draft_batch.h"
#include "common/tensor_view.h"

namespace specops {
namespace {

constexpr int64_t kMaxInt32 = Checker::kMaxInt32;

// Checks entries [begin, end) of kv_indices, in which rows lie. It uses one reduction instead of a
// branch per page, and looks up the invalid page afterwards.
void check_page_ids(
    const Checker& check, ErrorCode code, const int32_t* kv_indices, int64_t begin, int64_t end) {
  int32_t all = 0;
  for (int64_t place = begin; place < end; ++place) all |= kv_indices[place];
  if (is_page_id(all)) return;
  for (int64_t place = begin; place < end; ++place) {
    check.refuse(find_page_id_fault(code, kv_indices[place], place));
  }
}

// Checks all values, before anything is written.
void check_values(const Checker& check, const PrepareBatchParams& params) {
  int64_t rows = 0;
  int64_t outputs = 0;
  for (int64_t b = 0; b < params.batch; ++b) {
    check.refuse(find_fault(params, b));
    int32_t qo_len = params.qo_lens[b];
    if (qo_len > 0 && params.kv_indptr) {
      // Pages before this step's rows may have been released.
      int64_t kv_len = params.kv_lens[b], first_page = params.kv_indptr[b];
      check_page_ids(check,
                     kPrepareBatchKvIndices,
                     params.kv_indices,
                     first_page + (kv_len - qo_len) / params.page_size,
                     first_page + (kv_len + params.page_size - 1) / params.page_size);
    }
    rows += qo_len;
    outputs += num_outputs(static_cast<OutputMode>(params.output_modes[b]), qo_len);
  }
  check.refuse(find_capacity_fault(params, rows, outputs));
}

void prepare_batch(const TensorView& qo_lens,
                   const TensorView& kv_lens,
                   const TensorView& output_modes,
                   const TensorView& kv_indptr,
                   const TensorView& kv_indices,
                   Argument page_size_given,
                   Argument total_rows_given,
                   Argument num_output_rows_given,
                   Argument max_seq_len_given,
                   const TensorView& qo_indptr,
                   const TensorView& row_to_request,
                   const TensorView& positions,
                   const TensorView& cache_slots,
                   const TensorView& output_indptr,
                   const TensorView& output_rows,
                   const TensorView& output_row_to_request,
                   const TensorView& output_padding_offset,
                   const TensorView& output_cum_offsets) {
  Checker check("prepare_batch");
  bool paged = kv_indptr.defined() || kv_indices.defined() || page_size_given.defined();
  int64_t page_size = 0;
  if (paged) {
    if (!page_size_given.defined()) {
      check.fail("page_size", "given together with kv_indptr and kv_indices", "None");
    }
    page_size = check.integer("page_size", page_size_given, 1, kMaxInt32);
  }
  int64_t total_rows = check.integer("total_rows", total_rows_given, 0, kMaxInt32);
  int64_t num_output_rows = check.integer("num_output_rows", num_output_rows_given, 0, kMaxInt32);
  Dim batch{"batch"}, batch_plus_1{"batch + 1"}, pages{"pages"};
  Dim rows{"total_rows", total_rows}, outputs{"num_output_rows", num_output_rows};
  check.tensor("qo_lens", qo_lens, {DType::kInt32}, {&batch});
  batch_plus_1.value = batch + 1;
  check.tensor("kv_lens", kv_lens, {DType::kInt32}, {&batch});
  check.tensor("output_modes", output_modes, {DType::kInt32}, {&batch});
  if (paged) {
    check.tensor("kv_indptr", kv_indptr, {DType::kInt32}, {&batch_plus_1});
    check.tensor("kv_indices", kv_indices, {DType::kInt32}, {&pages});
  }
  check.tensor("qo_indptr", qo_indptr, {DType::kInt32}, {&batch_plus_1});
  check.tensor("row_to_request", row_to_request, {DType::kInt32}, {&rows});
  check.tensor("positions", positions, {DType::kInt32}, {&rows});
  check.tensor("cache_slots", cache_slots, {DType::kInt64}, {&rows});
  check.tensor("output_indptr", output_indptr, {DType::kInt32}, {&batch_plus_1});
  check.tensor("output_rows", output_rows, {DType::kInt32}, {&outputs});
  check.tensor("output_row_to_request", output_row_to_request, {DType::kInt32}, {&outputs});
  bool is_padded = max_seq_len_given.defined();
  int64_t max_seq_len = 0;
  if (is_padded) {
    max_seq_len = check.integer("max_seq_len", max_seq_len_given, 1);
    check.that(
        max_seq_len <= kMaxInt32 / (batch > 0 ? batch : 1),
        "max_seq_len",
        "small enough that batch * max_seq_len fits int32, with batch = " + std::to_string(batch),
        max_seq_len);
    check.tensor("output_padding_offset", output_padding_offset, {DType::kInt32}, {&outputs});
    check.tensor("output_cum_offsets", output_cum_offsets, {DType::kInt32}, {&batch});
  } else if (output_padding_offset.defined() || output_cum_offsets.defined()) {
    check.fail(
        "max_seq_len", "given when out has output_padding_offset or output_cum_offsets", "None");
  }
  PrepareBatchParams params{
      .qo_lens = qo_lens.data<int32_t>(),
      .kv_lens = kv_lens.data<int32_t>(),
      .output_modes = output_modes.data<int32_t>(),
      .kv_indptr = kv_indptr.data<int32_t>(),
      .kv_indices = kv_indices.data<int32_t>(),
      .qo_indptr = qo_indptr.data<int32_t>(),
      .row_to_request = row_to_request.data<int32_t>(),
      .positions = positions.data<int32_t>(),
      .cache_slots = cache_slots.data<int64_t>(),
      .output_indptr = output_indptr.data<int32_t>(),
      .output_rows = output_rows.data<int32_t>(),
      .output_row_to_request = output_row_to_request.data<int32_t>(),
      .output_padding_offset = is_padded ? output_padding_offset.data<int32_t>() : nullptr,
      .output_cum_offsets = is_padded ? output_cum_offsets.data<int32_t>() : nullptr,
      .batch = batch,
      .num_indices = paged ? pages.value : 0,
      .total_rows = total_rows,
      .num_output_rows = num_output_rows,
      .page_size = page_size,
      .max_seq_len = max_seq_len,
      .error = check.error_flag(),
  };
  if (check.on_cuda()) return prepare_batch_cuda(params, check.stream());
  check_values(check, params);
  prepare_batch_cpu(params);
}

void gather_input_ids(const TensorView& row_to_request,
                      const TensorView& positions,
                      const TensorView& slots,
                      const TensorView& token_ids,
                      const TensorView& lens,
                      const TensorView& draft_token_ids,
                      const TensorView& out) {
  Checker check("gather_input_ids");
  Dim rows{"rows"}, batch{"batch"}, num_slots{"num_slots"}, max_len{"max_len"}, capacity{"k"};
  check.tensor("row_to_request", row_to_request, {DType::kInt32}, {&rows});
  check.tensor("positions", positions, {DType::kInt32}, {&rows});
  check.tensor("slots", slots, {DType::kInt32}, {&batch});
  check.tensor("token_ids", token_ids, {DType::kInt32}, {&num_slots, &max_len}, Layout::kRows);
  check.tensor("lens", lens, {DType::kInt32}, {&num_slots});
  check.optional("draft_token_ids", draft_token_ids, {DType::kInt32}, {&batch, &capacity});
  check.tensor("out", out, {DType::kInt32}, {&rows});
  if (rows == 0) return;
  GatherInputIdsParams params{
      .row_to_request = row_to_request.data<int32_t>(),
      .positions = positions.data<int32_t>(),
      .slots = slots.data<int32_t>(),
      .token_ids = token_ids.data<int32_t>(),
      .lens = lens.data<int32_t>(),
      .draft_token_ids = draft_token_ids.data<int32_t>(),
      .out = out.data<int32_t>(),
      .rows = rows,
      .batch = batch,
      .num_slots = num_slots,
      .max_len = max_len,
      .token_stride = token_ids.stride(0),
      .capacity = draft_token_ids.defined() ? capacity.value : 0,
      .error = check.error_flag(),
  };
  if (check.on_cuda()) return gather_input_ids_cuda(params, check.stream());
  for (int64_t row = 0; row < rows; ++row) check.refuse(input_id(params, row).fault);
  gather_input_ids_cpu(params);
}

void gather_output_rows(const TensorView& hidden,
                        const TensorView& output_rows,
                        const TensorView& out) {
  Checker check("gather_output_rows");
  Dim rows{"rows"}, width{"width"}, outputs{"num_output_rows"};
  check.tensor("hidden",
               hidden,
               {DType::kFloat32, DType::kBFloat16, DType::kFloat16},
               {&rows, &width},
               Layout::kRows);
  check.tensor("output_rows", output_rows, {DType::kInt32}, {&outputs});
  check.tensor("out", out, {hidden.dtype()}, {&outputs, &width});
  GatherOutputRowsParams params{
      .hidden = hidden.raw(),
      .output_rows = output_rows.data<int32_t>(),
      .out = out.raw(),
      .rows = rows,
      .num_output_rows = outputs,
      .row_bytes = width * dtype_bytes(hidden.dtype()),
      .hidden_stride_bytes = hidden.stride(0) * dtype_bytes(hidden.dtype()),
      .error = check.error_flag(),
  };
  if (check.on_cuda()) return gather_output_rows_cuda(params, check.stream());
  for (int64_t i = 0; i < outputs; ++i) check.refuse(find_fault(params, i));
  if (outputs == 0 || width == 0) return;
  gather_output_rows_cpu(params);
}

void build_tree(const TensorView& parents,
                const TensorView& num_draft_tokens,
                const TensorView& positions,
                const TensorView& depths,
                const TensorView& row_positions,
                const TensorView& ancestor_mask,
                const TensorView& first_child,
                const TensorView& next_sibling,
                const TensorView& sibling_index) {
  Checker check("build_tree");
  Dim batch{"batch"}, nodes{"nodes"}, rows{"nodes + 1"}, words{"words"};
  check.tensor("parents", parents, {DType::kInt32}, {&batch, &nodes});
  rows.value = nodes + 1;
  words.value = rows / 32 + (rows % 32 > 0);
  check.tensor("num_draft_tokens", num_draft_tokens, {DType::kInt32}, {&batch});
  check.tensor("positions", positions, {DType::kInt32}, {&batch});
  check.tensor("depths", depths, {DType::kInt32}, {&batch, &rows});
  check.tensor("row_positions", row_positions, {DType::kInt32}, {&batch, &rows});
  check.tensor("ancestor_mask", ancestor_mask, {DType::kInt32}, {&batch, &rows, &words});
  check.tensor("first_child", first_child, {DType::kInt32}, {&batch, &rows});
  check.tensor("next_sibling", next_sibling, {DType::kInt32}, {&batch, &nodes});
  check.tensor("sibling_index", sibling_index, {DType::kInt32}, {&batch, &nodes});
  check.that(nodes <= kMaxTreeNodes,
             "parents",
             "of at most " + std::to_string(kMaxTreeNodes) + " nodes",
             nodes.value);
  if (batch == 0) return;
  BuildTreeParams params{
      .parents = parents.data<int32_t>(),
      .num_draft_tokens = num_draft_tokens.data<int32_t>(),
      .positions = positions.data<int32_t>(),
      .depths = depths.data<int32_t>(),
      .row_positions = row_positions.data<int32_t>(),
      .ancestor_mask = ancestor_mask.data<int32_t>(),
      .first_child = first_child.data<int32_t>(),
      .next_sibling = next_sibling.data<int32_t>(),
      .sibling_index = sibling_index.data<int32_t>(),
      .batch = batch,
      .nodes = nodes,
      .words = words,
      .error = check.error_flag(),
  };
  if (check.on_cuda()) return build_tree_cuda(params, check.stream());
  for (int64_t b = 0; b < batch; ++b) {
    check.refuse(find_fault(params, b));
    for (int32_t node = 0; node < params.num_draft_tokens[b]; ++node) {
      check.refuse(find_parent_fault(params, b, node));
    }
  }
  build_tree_cpu(params);
}

// Checks all values, before anything is written.
void check_values(const Checker& check, const PrepareDraftBatchParams& params) {
  int64_t total = 0;
  for (int64_t b = 0; b < params.batch; ++b) {
    check.refuse(find_fault(params, b));
    if (params.slots[b] < 0) continue;
    DraftRows rows = draft_rows(params, b);
    if (rows.end == rows.first) continue;
    int64_t first_page = params.kv_indptr[b];
    check_page_ids(check,
                   kPrepareDraftBatchKvIndices,
                   params.kv_indices,
                   first_page + rows.first / params.page_size,
                   first_page + (rows.end + params.page_size - 1) / params.page_size);
    total += rows.end - rows.first;
  }
  check.refuse(find_capacity_fault(params, total));
}

void prepare_draft_batch(const TensorView& slots,
                         const TensorView& qo_indptr,
                         const TensorView& kv_lens,
                         const TensorView& redraft_lens,
                         const TensorView& kv_indptr,
                         const TensorView& kv_indices,
                         const TensorView& lens,
                         const TensorView& max_draft_tokens,
                         Argument page_size_given,
                         Argument window_given,
                         Argument total_rows_given,
                         const TensorView& draft_qo_indptr,
                         const TensorView& draft_kv_lens,
                         const TensorView& last_rows,
                         const TensorView& draft_positions,
                         const TensorView& row_to_request,
                         const TensorView& positions,
                         const TensorView& cache_slots,
                         const TensorView& source_rows) {
  Checker check("prepare_draft_batch");
  int64_t page_size = check.integer("page_size", page_size_given, 1, kMaxInt32);
  int64_t window = check.integer("window", window_given, 0);
  int64_t total_rows = check.integer("total_rows", total_rows_given, 0, kMaxInt32);
  Dim batch{"batch"}, batch_plus_1{"batch + 1"}, pages{"pages"}, num_slots{"num_slots"};
  Dim rows{"total_rows", total_rows};
  check.tensor("slots", slots, {DType::kInt32}, {&batch});
  batch_plus_1.value = batch + 1;
  check.tensor("qo_indptr", qo_indptr, {DType::kInt32}, {&batch_plus_1});
  check.tensor("kv_lens", kv_lens, {DType::kInt32}, {&batch});
  check.tensor("redraft_lens", redraft_lens, {DType::kInt32}, {&batch});
  check.tensor("kv_indptr", kv_indptr, {DType::kInt32}, {&batch_plus_1});
  check.tensor("kv_indices", kv_indices, {DType::kInt32}, {&pages});
  check.tensor("lens", lens, {DType::kInt32}, {&num_slots});
  check.tensor("max_draft_tokens", max_draft_tokens, {DType::kInt32}, {&num_slots});
  check.tensor("draft_qo_indptr", draft_qo_indptr, {DType::kInt32}, {&batch_plus_1});
  check.tensor("draft_kv_lens", draft_kv_lens, {DType::kInt32}, {&batch});
  check.tensor("last_rows", last_rows, {DType::kInt32}, {&batch});
  check.tensor("draft_positions", draft_positions, {DType::kInt32}, {&batch});
  check.tensor("row_to_request", row_to_request, {DType::kInt32}, {&rows});
  check.tensor("positions", positions, {DType::kInt32}, {&rows});
  check.tensor("cache_slots", cache_slots, {DType::kInt64}, {&rows});
  check.tensor("source_rows", source_rows, {DType::kInt32}, {&rows});
  // Kept rows have int32 indices.
  check.that(window <= (kMaxInt32 - 2) / (num_slots > 0 ? num_slots : 1),
             "window",
             "small enough that num_slots * window fits int32",
             window);
  PrepareDraftBatchParams params{
      .slots = slots.data<int32_t>(),
      .qo_indptr = qo_indptr.data<int32_t>(),
      .kv_lens = kv_lens.data<int32_t>(),
      .redraft_lens = redraft_lens.data<int32_t>(),
      .kv_indptr = kv_indptr.data<int32_t>(),
      .kv_indices = kv_indices.data<int32_t>(),
      .lens = lens.data<int32_t>(),
      .max_draft_tokens = max_draft_tokens.data<int32_t>(),
      .draft_qo_indptr = draft_qo_indptr.data<int32_t>(),
      .draft_kv_lens = draft_kv_lens.data<int32_t>(),
      .last_rows = last_rows.data<int32_t>(),
      .draft_positions = draft_positions.data<int32_t>(),
      .row_to_request = row_to_request.data<int32_t>(),
      .positions = positions.data<int32_t>(),
      .cache_slots = cache_slots.data<int64_t>(),
      .source_rows = source_rows.data<int32_t>(),
      .batch = batch,
      .num_slots = num_slots,
      .num_indices = pages,
      .total_rows = total_rows,
      .page_size = page_size,
      .window = window,
      .error = check.error_flag(),
  };
  if (check.on_cuda()) return prepare_draft_batch_cuda(params, check.stream());
  check_values(check, params);
  prepare_draft_batch_cpu(params);
}

void advance_draft_batch(const TensorView& sampled_token_ids,
                         const TensorView& last_rows,
                         const TensorView& slots,
                         const TensorView& kv_indptr,
                         const TensorView& kv_indices,
                         const TensorView& lens,
                         const TensorView& max_draft_tokens,
                         Argument page_size_given,
                         Argument step_given,
                         Argument ahead_given,
                         const TensorView& draft_token_ids,
                         const TensorView& num_draft_tokens,
                         const TensorView& draft_qo_indptr,
                         const TensorView& draft_kv_lens,
                         const TensorView& next_last_rows,
                         const TensorView& draft_positions,
                         const TensorView& row_to_request,
                         const TensorView& positions,
                         const TensorView& cache_slots,
                         const TensorView& source_rows) {
  Checker check("advance_draft_batch");
  int64_t page_size = check.integer("page_size", page_size_given, 1, kMaxInt32);
  int64_t step = check.integer("step", step_given, 0);
  int64_t ahead = check.integer("ahead", ahead_given, 1, kMaxInt32);
  Dim batch{"batch"}, batch_plus_1{"batch + 1"}, pages{"pages"}, num_slots{"num_slots"};
  Dim capacity{"k"};
  check.tensor("sampled_token_ids", sampled_token_ids, {DType::kInt32}, {&batch});
  batch_plus_1.value = batch + 1;
  check.tensor("last_rows", last_rows, {DType::kInt32}, {&batch});
  check.tensor("slots", slots, {DType::kInt32}, {&batch});
  check.tensor("kv_indptr", kv_indptr, {DType::kInt32}, {&batch_plus_1});
  check.tensor("kv_indices", kv_indices, {DType::kInt32}, {&pages});
  check.tensor("lens", lens, {DType::kInt32}, {&num_slots});
  check.tensor("max_draft_tokens", max_draft_tokens, {DType::kInt32}, {&num_slots});
  check.tensor("draft_token_ids", draft_token_ids, {DType::kInt32}, {&num_slots, &capacity});
  check.tensor("num_draft_tokens", num_draft_tokens, {DType::kInt32}, {&num_slots});
  check.that(step < capacity, "step", "below k = " + std::to_string(capacity), step);
  bool has_rows = draft_qo_indptr.defined();
  auto next = [&](const char* name, const TensorView& view, DType dtype, Dim* size) {
    if (view.defined() != has_rows) {
      check.fail(name,
                 has_rows ? "given together with draft_qo_indptr" : "None without draft_qo_indptr",
                 has_rows ? "None" : "a tensor");
    }
    if (has_rows) check.tensor(name, view, {dtype}, {size});
  };
  if (has_rows) {
    check.tensor("draft_qo_indptr", draft_qo_indptr, {DType::kInt32}, {&batch_plus_1});
  }
  next("draft_kv_lens", draft_kv_lens, DType::kInt32, &batch);
  next("next_last_rows", next_last_rows, DType::kInt32, &batch);
  next("draft_positions", draft_positions, DType::kInt32, &batch);
  next("row_to_request", row_to_request, DType::kInt32, &batch);
  next("positions", positions, DType::kInt32, &batch);
  next("cache_slots", cache_slots, DType::kInt64, &batch);
  next("source_rows", source_rows, DType::kInt32, &batch);
  AdvanceDraftBatchParams params{
      .sampled_token_ids = sampled_token_ids.data<int32_t>(),
      .last_rows = last_rows.data<int32_t>(),
      .slots = slots.data<int32_t>(),
      .kv_indptr = kv_indptr.data<int32_t>(),
      .kv_indices = kv_indices.data<int32_t>(),
      .lens = lens.data<int32_t>(),
      .max_draft_tokens = max_draft_tokens.data<int32_t>(),
      .draft_token_ids = draft_token_ids.data<int32_t>(),
      .num_draft_tokens = num_draft_tokens.data<int32_t>(),
      .draft_qo_indptr = has_rows ? draft_qo_indptr.data<int32_t>() : nullptr,
      .draft_kv_lens = has_rows ? draft_kv_lens.data<int32_t>() : nullptr,
      .next_last_rows = has_rows ? next_last_rows.data<int32_t>() : nullptr,
      .draft_positions = has_rows ? draft_positions.data<int32_t>() : nullptr,
      .row_to_request = has_rows ? row_to_request.data<int32_t>() : nullptr,
      .positions = has_rows ? positions.data<int32_t>() : nullptr,
      .cache_slots = has_rows ? cache_slots.data<int64_t>() : nullptr,
      .source_rows = has_rows ? source_rows.data<int32_t>() : nullptr,
      .batch = batch,
      .num_slots = num_slots,
      .num_indices = pages,
      .capacity = capacity,
      .page_size = page_size,
      .step = static_cast<int32_t>(step),
      .ahead = static_cast<int32_t>(ahead),
      .error = check.error_flag(),
  };
  if (check.on_cuda()) return advance_draft_batch_cuda(params, check.stream());
  for (int64_t b = 0; b < batch; ++b) {
    check.refuse(find_fault(params, b));
    int32_t slot = params.slots[b];
    if (slot < 0 || !wants_row(params, slot, params.last_rows[b])) continue;
    check.refuse(find_row_fault(params, b));
  }
  advance_draft_batch_cpu(params);
}

void keep_hidden_rows(const TensorView& hidden,
                      const TensorView& slots,
                      const TensorView& qo_indptr,
                      const TensorView& kv_lens,
                      const TensorView& lens,
                      const TensorView& kept) {
  Checker check("keep_hidden_rows");
  Dim rows{"rows"}, width{"width"}, batch{"batch"}, batch_plus_1{"batch + 1"};
  Dim num_slots{"num_slots"}, window{"window"};
  check.tensor("hidden",
               hidden,
               {DType::kFloat32, DType::kBFloat16, DType::kFloat16},
               {&rows, &width},
               Layout::kRows);
  check.tensor("slots", slots, {DType::kInt32}, {&batch});
  batch_plus_1.value = batch + 1;
  check.tensor("qo_indptr", qo_indptr, {DType::kInt32}, {&batch_plus_1});
  check.tensor("kv_lens", kv_lens, {DType::kInt32}, {&batch});
  check.tensor("lens", lens, {DType::kInt32}, {&num_slots});
  check.tensor("kept", kept, {hidden.dtype()}, {&num_slots, &window, &width});
  KeepHiddenRowsParams params{
      .hidden = hidden.raw(),
      .slots = slots.data<int32_t>(),
      .qo_indptr = qo_indptr.data<int32_t>(),
      .kv_lens = kv_lens.data<int32_t>(),
      .lens = lens.data<int32_t>(),
      .kept = kept.raw(),
      .batch = batch,
      .num_slots = num_slots,
      .rows = rows,
      .window = window,
      .row_bytes = width * dtype_bytes(hidden.dtype()),
      .hidden_stride_bytes = hidden.stride(0) * dtype_bytes(hidden.dtype()),
      .error = check.error_flag(),
  };
  if (batch == 0 || window == 0 || width == 0) return;
  if (check.on_cuda()) return keep_hidden_rows_cuda(params, check.stream());
  for (int64_t b = 0; b < batch; ++b) check.refuse(find_fault(params, b));
  keep_hidden_rows_cpu(params);
}

}  // namespace

void register_batching(pybind11::module_& m) {
  register_faults<3000>();
  register_tree_chains(m);
  register_shared_prefixes(m);
  m.def("prepare_batch", &prepare_batch);
  m.def("gather_input_ids", &gather_input_ids);
  m.def("gather_output_rows", &gather_output_rows);
  m.def("build_tree", &build_tree);
  m.def("prepare_draft_batch", &prepare_draft_batch);
  m.def("advance_draft_batch", &advance_draft_batch);
  m.def("keep_hidden_rows", &keep_hidden_rows);
}

}  // namespace specops
