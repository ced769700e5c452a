// SPDX-License-Identifier: Apache-2.0
// Argument checks and registration of the batching family.
#include "batching/ops.h"

#include <pybind11/stl.h>

#include <limits>
#include <optional>
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

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

std::string at(const char* name, int64_t index) {
  return std::string(name) + "[" + std::to_string(index) + "]";
}

std::string at(const char* name, int64_t row, int64_t column) {
  return std::string(name) + "[" + std::to_string(row) + ", " + std::to_string(column) + "]";
}

// In words what fault_of() found.
[[noreturn]] void fail_request(const Checker& check,
                               const PrepareBatchParams& params,
                               int64_t b,
                               ErrorCode fault) {
  int64_t qo_len = params.qo_lens[b];
  int64_t kv_len = params.kv_lens[b];
  int32_t mode = params.output_modes[b];
  if (fault == ErrorCode::kPrepareBatchQoLens) {
    check.fail(at("qo_lens", b), "at least 0", std::to_string(qo_len));
  }
  if (fault == ErrorCode::kPrepareBatchKvLens) {
    check.fail(at("kv_lens", b),
               "at least " + at("qo_lens", b) + " = " + std::to_string(qo_len) +
                   " (it includes this step's rows)",
               std::to_string(kv_len));
  }
  if (fault == ErrorCode::kPrepareBatchOutputModes) {
    check.fail(at("output_modes", b), "0 (none), 1 (last) or 2 (all)", std::to_string(mode));
  }
  if (fault == ErrorCode::kPrepareBatchMaxSeqLen) {
    int64_t outputs = num_outputs(static_cast<OutputMode>(mode), static_cast<int32_t>(qo_len));
    check.fail(
        "max_seq_len",
        "at least the " + std::to_string(outputs) + " output rows of request " + std::to_string(b),
        std::to_string(params.max_seq_len));
  }
  int64_t first_page = params.kv_indptr[b];
  int64_t end_page = params.kv_indptr[b + 1];
  if (first_page >= 0 && first_page <= end_page && end_page <= params.num_indices) {
    check.fail("kv_indptr",
               "wide enough for " +
                   std::to_string((kv_len + params.page_size - 1) / params.page_size) +
                   " pages of " + at("kv_lens", b) + " = " + std::to_string(kv_len) + " tokens",
               std::to_string(end_page - first_page) + " pages");
  }
  check.fail(
      "kv_indptr",
      "non-decreasing from 0 up to the size of kv_indices = " + std::to_string(params.num_indices),
      at("kv_indptr", b) + " = " + std::to_string(first_page) + ", " + at("kv_indptr", b + 1) +
          " = " + std::to_string(end_page));
}

// The page ids of a request that its rows lie in; those before may have been given back. One
// reduction instead of a branch per page; the page at fault is looked up afterwards.
void check_page_ids(const Checker& check, const PrepareBatchParams& params, int64_t b) {
  int64_t kv_len = params.kv_lens[b];
  int64_t first_page = params.kv_indptr[b];
  const int32_t* pages = params.kv_indices + first_page;
  int64_t touched = (kv_len - params.qo_lens[b]) / params.page_size;
  int64_t end = (kv_len + params.page_size - 1) / params.page_size;
  int32_t sign = 0;
  for (int64_t page = touched; page < end; ++page) sign |= pages[page];
  if (sign >= 0) return;
  int64_t page = touched;
  while (pages[page] >= 0) ++page;
  check.fail(
      at("kv_indices", first_page + page), "a page id, at least 0", std::to_string(pages[page]));
}

// Everything that depends on the values, before anything is written.
void check_lengths(const Checker& check, const PrepareBatchParams& params) {
  int64_t rows = 0;
  int64_t outputs = 0;
  for (int64_t b = 0; b < params.batch; ++b) {
    ErrorCode fault = fault_of(params, b);
    if (fault != ErrorCode::kNone) fail_request(check, params, b, fault);
    int32_t qo_len = params.qo_lens[b];
    if (qo_len > 0 && params.kv_indptr) check_page_ids(check, params, b);
    rows += qo_len;
    outputs += num_outputs(static_cast<OutputMode>(params.output_modes[b]), qo_len);
  }
  if (rows > params.total_rows) {
    check.fail("total_rows",
               "at least " + std::to_string(rows) + ", the sum of qo_lens",
               std::to_string(params.total_rows));
  }
  if (outputs > params.num_output_rows) {
    check.fail("num_output_rows",
               "at least " + std::to_string(outputs) + ", the output rows asked for",
               std::to_string(params.num_output_rows));
  }
}

void prepare_batch(const TensorView& qo_lens,
                   const TensorView& kv_lens,
                   const TensorView& output_modes,
                   const TensorView& kv_indptr,
                   const TensorView& kv_indices,
                   std::optional<int64_t> page_size,
                   int64_t total_rows,
                   int64_t num_output_rows,
                   std::optional<int64_t> max_seq_len,
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
  bool paged = kv_indptr.defined() || kv_indices.defined() || page_size;
  check.that(
      !paged || page_size, "page_size", "given together with kv_indptr and kv_indices", "None");
  check.that(!paged || (*page_size >= 1 && *page_size <= kMaxInt32),
             "page_size",
             "an int32 of at least 1",
             page_size.value_or(0));
  check.that(total_rows >= 0 && total_rows <= kMaxInt32,
             "total_rows",
             "an int32 of at least 0",
             total_rows);
  check.that(num_output_rows >= 0 && num_output_rows <= kMaxInt32,
             "num_output_rows",
             "an int32 of at least 0",
             num_output_rows);
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
  if (max_seq_len) {
    check.that(*max_seq_len >= 1, "max_seq_len", "at least 1", *max_seq_len);
    check.that(
        *max_seq_len <= kMaxInt32 / (batch > 0 ? batch : 1),
        "max_seq_len",
        "small enough that batch * max_seq_len fits int32, with batch = " + std::to_string(batch),
        *max_seq_len);
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
      .output_padding_offset = max_seq_len ? output_padding_offset.data<int32_t>() : nullptr,
      .output_cum_offsets = max_seq_len ? output_cum_offsets.data<int32_t>() : nullptr,
      .batch = batch,
      .num_indices = paged ? pages.value : 0,
      .total_rows = total_rows,
      .num_output_rows = num_output_rows,
      .page_size = page_size.value_or(0),
      .max_seq_len = max_seq_len.value_or(0),
      .error = check.error_flag(),
  };
  if (check.on_cuda()) return prepare_batch_cuda(params, check.stream());
  check_lengths(check, params);
  prepare_batch_cpu(params);
}

// Everything that depends on the values, before anything is written.
void check_input_ids(const Checker& check, const GatherInputIdsParams& params) {
  for (int64_t row = 0; row < params.rows; ++row) {
    ErrorCode fault = input_id(params, row).fault;
    if (fault == ErrorCode::kNone) continue;
    int64_t request = params.row_to_request[row];
    if (fault == ErrorCode::kGatherInputIdsRequest) {
      check.fail(at("row_to_request", row),
                 "-1 or below batch = " + std::to_string(params.batch),
                 std::to_string(request));
    }
    int64_t slot = params.slots[request];
    if (fault == ErrorCode::kGatherInputIdsSlot) {
      check.fail(
          at("slots", request),
          "a row of lens, below " + std::to_string(params.num_slots) + ", as the request has rows",
          std::to_string(slot));
    }
    int64_t len = params.lens[slot];
    if (fault == ErrorCode::kGatherInputIdsLength) {
      check.fail(at("lens", slot),
                 "at least 0 and at most max_len = " + std::to_string(params.max_len),
                 std::to_string(len));
    }
    int64_t position = params.positions[row];
    if (fault == ErrorCode::kGatherInputIdsPosition) {
      check.fail(at("positions", row),
                 "at least 0 and below " + at("lens", slot) +
                     " + k = " + std::to_string(len + params.capacity),
                 std::to_string(position));
    }
    bool drafted = position >= len;
    check.fail(
        drafted ? at("draft_token_ids", request, position - len) : at("token_ids", slot, position),
        "a token id, at least 0, as " + at("positions", row) + " takes it",
        std::to_string(drafted ? params.draft_token_ids[request * params.capacity + position - len]
                               : params.token_ids[slot * params.token_stride + position]));
  }
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
  check_input_ids(check, params);
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
  for (int64_t i = 0; i < outputs; ++i) {
    if (params.output_rows[i] < -1 || params.output_rows[i] >= rows) {
      check.fail(at("output_rows", i),
                 "-1 or a row of hidden, below " + std::to_string(rows),
                 std::to_string(params.output_rows[i]));
    }
  }
  if (outputs == 0 || width == 0) return;
  gather_output_rows_cpu(params);
}

// Everything that depends on the values, before anything is written.
void check_tree(const Checker& check, const BuildTreeParams& params) {
  for (int64_t b = 0; b < params.batch; ++b) {
    int64_t count = params.num_draft_tokens[b];
    if (count < 0 || count > params.nodes) {
      check.fail(at("num_draft_tokens", b),
                 "at least 0 and at most the width of parents, " + std::to_string(params.nodes),
                 std::to_string(count));
    }
    int64_t position = params.positions[b];
    if (position < 0 || position > kMaxInt32 - params.nodes) {
      check.fail(at("positions", b),
                 "at least 0, and an int32 with the depth of every node",
                 std::to_string(position));
    }
    const int32_t* parents = params.parents + b * params.nodes;
    for (int64_t node = 0; node < count; ++node) {
      if (parents[node] >= -1 && parents[node] < node) continue;
      check.fail(at("parents", b, node),
                 "-1 or a node before " + std::to_string(node),
                 std::to_string(parents[node]));
    }
  }
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
  check_tree(check, params);
  build_tree_cpu(params);
}

void check_slot(const Checker& check, const int32_t* slots, int64_t b, int64_t num_slots) {
  if (slots[b] >= -1 && slots[b] < num_slots) return;
  check.fail(at("slots", b),
             "-1 or a row of lens, below " + std::to_string(num_slots),
             std::to_string(slots[b]));
}

// The rows of a request in the target's step, by qo_indptr, and its length.
int64_t checked_qo_len(const Checker& check,
                       const int32_t* qo_indptr,
                       const int32_t* kv_lens,
                       int64_t b) {
  int64_t qo_len = int64_t{qo_indptr[b + 1]} - qo_indptr[b];
  if (qo_indptr[b] < 0 || qo_len < 0) {
    check.fail("qo_indptr",
               "non-decreasing from 0",
               at("qo_indptr", b) + " = " + std::to_string(qo_indptr[b]) + ", " +
                   at("qo_indptr", b + 1) + " = " + std::to_string(qo_indptr[b + 1]));
  }
  if (kv_lens[b] < qo_len) {
    check.fail(at("kv_lens", b),
               "at least the request's " + std::to_string(qo_len) + " rows",
               std::to_string(kv_lens[b]));
  }
  return qo_len;
}

// The page ids that positions first .. end of a request are looked up in.
void check_pages(const Checker& check,
                 const int32_t* kv_indptr,
                 const int32_t* kv_indices,
                 int64_t num_indices,
                 int64_t b,
                 int64_t first,
                 int64_t end) {
  int64_t begin = kv_indptr[b];
  int64_t stop = kv_indptr[b + 1];
  if (begin < 0 || stop < begin || stop > num_indices || begin + end > stop) {
    check.fail(
        "kv_indptr",
        "non-decreasing from 0 up to the size of kv_indices = " + std::to_string(num_indices) +
            ", with " + std::to_string(end) + " pages for request " + std::to_string(b),
        at("kv_indptr", b) + " = " + std::to_string(begin) + ", " + at("kv_indptr", b + 1) + " = " +
            std::to_string(stop));
  }
  for (int64_t page = begin + first; page < begin + end; ++page) {
    if (kv_indices[page] >= 0) continue;
    check.fail(at("kv_indices", page), "a page id, at least 0", std::to_string(kv_indices[page]));
  }
}

// Everything that depends on the values, before anything is written.
void check_draft_rows(const Checker& check, const PrepareDraftBatchParams& params) {
  int64_t total = 0;
  for (int64_t b = 0; b < params.batch; ++b) {
    check_slot(check, params.slots, b, params.num_slots);
    int32_t slot = params.slots[b];
    if (slot < 0) continue;
    int64_t qo_len = checked_qo_len(check, params.qo_indptr, params.kv_lens, b);
    int64_t begin = params.kv_lens[b] - qo_len;
    int64_t redraft = params.redraft_lens[b];
    if (redraft < 0 || redraft > params.window || redraft > begin) {
      check.fail(at("redraft_lens", b),
                 "at least 0, at most window = " + std::to_string(params.window) + " and the " +
                     std::to_string(begin) + " positions before the step's",
                 std::to_string(redraft));
    }
    if (params.lens[slot] <= begin) {
      check.fail(at("lens", slot),
                 "more than the " + std::to_string(begin) + " positions before the step's",
                 std::to_string(params.lens[slot]));
    }
    DraftRows rows = draft_rows(static_cast<int32_t>(qo_len),
                                params.kv_lens[b],
                                static_cast<int32_t>(redraft),
                                params.lens[slot]);
    if (rows.end == rows.first) continue;
    check_pages(check,
                params.kv_indptr,
                params.kv_indices,
                params.num_indices,
                b,
                rows.first / params.page_size,
                (rows.end + params.page_size - 1) / params.page_size);
    total += rows.end - rows.first;
  }
  if (total > params.total_rows) {
    check.fail("total_rows",
               "at least " + std::to_string(total) + ", the rows of all requests",
               std::to_string(params.total_rows));
  }
}

void prepare_draft_batch(const TensorView& slots,
                         const TensorView& qo_indptr,
                         const TensorView& kv_lens,
                         const TensorView& redraft_lens,
                         const TensorView& kv_indptr,
                         const TensorView& kv_indices,
                         const TensorView& lens,
                         const TensorView& max_draft_tokens,
                         int64_t page_size,
                         int64_t window,
                         int64_t total_rows,
                         const TensorView& draft_qo_indptr,
                         const TensorView& draft_kv_lens,
                         const TensorView& last_rows,
                         const TensorView& draft_positions,
                         const TensorView& row_to_request,
                         const TensorView& positions,
                         const TensorView& cache_slots,
                         const TensorView& source_rows) {
  Checker check("prepare_draft_batch");
  check.that(
      page_size >= 1 && page_size <= kMaxInt32, "page_size", "an int32 of at least 1", page_size);
  check.that(total_rows >= 0 && total_rows <= kMaxInt32,
             "total_rows",
             "an int32 of at least 0",
             total_rows);
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
  // Kept rows are named by int32.
  check.that(window >= 0 && window <= (kMaxInt32 - 2) / (num_slots > 0 ? num_slots : 1),
             "window",
             "at least 0, and small enough that num_slots * window fits int32",
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
  check_draft_rows(check, params);
  prepare_draft_batch_cpu(params);
}

// Everything that depends on the values, before anything is written.
void check_advance(const Checker& check, const AdvanceDraftBatchParams& params) {
  for (int64_t b = 0; b < params.batch; ++b) {
    check_slot(check, params.slots, b, params.num_slots);
    int32_t slot = params.slots[b];
    if (slot < 0 || params.last_rows[b] < 0 || !params.draft_qo_indptr) continue;
    int64_t position = int64_t{params.lens[slot]} + params.step - params.ahead;
    if (position < 0) {
      check.fail(at("lens", slot),
                 "at least ahead - step = " + std::to_string(params.ahead - params.step),
                 std::to_string(params.lens[slot]));
    }
    int64_t page = position / params.page_size;
    int64_t have = int64_t{params.kv_indptr[b + 1]} - params.kv_indptr[b];
    int64_t end = page < have ? page + 1 : 0;
    check_pages(check, params.kv_indptr, params.kv_indices, params.num_indices, b, page, end);
  }
}

void advance_draft_batch(const TensorView& sampled_token_ids,
                         const TensorView& last_rows,
                         const TensorView& slots,
                         const TensorView& kv_indptr,
                         const TensorView& kv_indices,
                         const TensorView& lens,
                         const TensorView& max_draft_tokens,
                         int64_t page_size,
                         int64_t step,
                         int64_t ahead,
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
  check.that(
      page_size >= 1 && page_size <= kMaxInt32, "page_size", "an int32 of at least 1", page_size);
  check.that(ahead >= 1 && ahead <= kMaxInt32, "ahead", "an int32 of at least 1", ahead);
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
  check.that(step >= 0 && step < capacity,
             "step",
             "at least 0 and below k = " + std::to_string(capacity),
             step);
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
  check_advance(check, params);
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
  for (int64_t b = 0; b < batch; ++b) {
    check_slot(check, params.slots, b, num_slots);
    if (params.slots[b] < 0) continue;
    checked_qo_len(check, params.qo_indptr, params.kv_lens, b);
    if (params.qo_indptr[b + 1] > rows) {
      check.fail(at("qo_indptr", b + 1),
                 "at most the rows of hidden, " + std::to_string(rows),
                 std::to_string(params.qo_indptr[b + 1]));
    }
  }
  keep_hidden_rows_cpu(params);
}

}  // namespace

void register_batching(pybind11::module_& m) {
  m.def("prepare_batch", &prepare_batch);
  m.def("gather_input_ids", &gather_input_ids);
  m.def("gather_output_rows", &gather_output_rows);
  m.def("build_tree", &build_tree);
  m.def("prepare_draft_batch", &prepare_draft_batch);
  m.def("advance_draft_batch", &advance_draft_batch);
  m.def("keep_hidden_rows", &keep_hidden_rows);
}

}  // namespace specops
