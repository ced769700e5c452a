// SPDX-License-Identifier: Apache-2.0
// Argument checks and registration of the attention family.
#include "attention/ops.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "attention/append_attention/append_attention.h"
#include "attention/checks.h"
#include "attention/compact_kv/compact_kv.h"
#include "attention/copy_kv/copy_kv.h"
#include "attention/merge_states/merge_states.h"
#include "attention/rope_append_kv/rope_append_kv.h"
#include "attention/rope_append_latent/rope_append_latent.h"
#include "common/stamps_checks.h"

namespace specops {
namespace {

constexpr int64_t kMaxInt32 = Checker::kMaxInt32;
constexpr auto kSlots = {
    DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kInt8, DType::kFloat8E4M3};

bool is_8_bit(DType cache_dtype) {
  return cache_dtype == DType::kInt8 || cache_dtype == DType::kFloat8E4M3;
}

// Dimensions of a pair of caches.
struct CacheDims {
  Dim& num_pages;
  Dim& page_size;
  Dim& heads;
  Dim& head_dim;
};

// Paged caches of keys and values, and the scales of 8-bit ones; fields as in argument_groups.py.
struct PagedKv {
  TensorView k;
  TensorView v;  // absent: latents
  TensorView k_scales;
  TensorView v_scales;

  DType dtype() const { return k.dtype(); }
};

// Checks caches of `dtype`, or 8-bit caches and their scales.
PagedKv check_cache(Checker& check, Argument given, DType dtype, bool may_be_latent, CacheDims d) {
  auto [k, v, k_scales, v_scales] = check.fields<4>("cache", "PagedKv", given);
  std::initializer_list<Dim*> slots = {&d.num_pages, &d.page_size, &d.heads, &d.head_dim};
  std::initializer_list<Dim*> scales = {&d.num_pages, &d.page_size, &d.heads};
  check.tensor("cache.k", k, {dtype, DType::kInt8, DType::kFloat8E4M3}, slots);
  if (!may_be_latent || v.defined()) check.tensor("cache.v", v, {k.dtype()}, slots);
  for (auto [name, view] :
       {std::pair{"cache.k_scales", &k_scales}, std::pair{"cache.v_scales", &v_scales}}) {
    if (is_8_bit(k.dtype())) {
      check.tensor(name, *view, {DType::kFloat32}, scales);
    } else if (view->defined()) {
      check.fail(name,
                 std::string("None where the caches are ") + dtype_name(dtype),
                 Checker::describe_object(view->object));
    }
  }
  check.that(!check.on_cuda() || !is_8_bit(k.dtype()) || dtype == DType::kBFloat16,
             "q",
             "bfloat16 where the caches have 8 bits on cuda",
             dtype_name(dtype));
  return {.k = k, .v = v, .k_scales = k_scales, .v_scales = v_scales};
}

void rope_append_kv(const TensorView& q,
                    const TensorView& k,
                    const TensorView& v,
                    Argument cache_given,
                    const TensorView& cache_slots,
                    const TensorView& positions,
                    const TensorView& cos_sin,
                    Argument interleaved,
                    const TensorView& q_norm_weight,
                    const TensorView& k_norm_weight,
                    Argument norm_eps,
                    const TensorView& q_out) {
  Checker check("rope_append_kv");
  Dim rows{"rows"}, qo_heads{"num_qo_heads"}, kv_heads{"num_kv_heads"}, head_dim{"head_dim"};
  Dim num_pages{"num_pages"}, page_size{"page_size"};
  Dim max_positions{"max_positions"}, rotary_dim{"rotary_dim"};
  check.tensor("q", q, kFloats, {&rows, &qo_heads, &head_dim}, Layout::kRows);
  DType dtype = q.dtype();
  check.tensor("k", k, {dtype}, {&rows, &kv_heads, &head_dim}, Layout::kRows);
  check.tensor("v", v, {dtype}, {&rows, &kv_heads, &head_dim}, Layout::kRows);
  PagedKv cache =
      check_cache(check, cache_given, dtype, false, {num_pages, page_size, kv_heads, head_dim});
  check.tensor("cache_slots", cache_slots, {DType::kInt64}, {&rows});
  check.tensor("positions", positions, {DType::kInt32}, {&rows});
  check.tensor("cos_sin", cos_sin, {DType::kFloat32}, {&max_positions, &rotary_dim});
  check.optional("q_norm_weight", q_norm_weight, {dtype}, {&head_dim});
  check.optional("k_norm_weight", k_norm_weight, {dtype}, {&head_dim});
  bool are_pairs_neighbors = check.flag("interleaved", interleaved);
  float eps = check.number("norm_eps", norm_eps);
  check.tensor("q_out", q_out, {dtype}, {&rows, &qo_heads, &head_dim});
  check.that(head_dim <= 512, "head_dim", "at most 512", head_dim.value);
  check.that(rotary_dim % 2 == 0 && rotary_dim <= head_dim,
             "rotary_dim",
             "even and at most head_dim=" + std::to_string(head_dim),
             rotary_dim.value);
  if (rows * (qo_heads + kv_heads) * head_dim == 0) return;
  RopeAppendKvParams params{
      .q = q.raw(),
      .k = k.raw(),
      .v = v.raw(),
      .q_out = q_out.raw(),
      .k_cache = cache.k.raw(),
      .v_cache = cache.v.raw(),
      .cache_slots = cache_slots.data<int64_t>(),
      .positions = positions.data<int32_t>(),
      .cos_sin = cos_sin.data<float>(),
      .q_norm_weight = q_norm_weight.data<void>(),
      .k_norm_weight = k_norm_weight.data<void>(),
      .rows = rows,
      .num_qo_heads = qo_heads,
      .num_kv_heads = kv_heads,
      .head_dim = head_dim,
      .rotary_dim = rotary_dim,
      .num_slots = num_pages * page_size,
      .max_positions = max_positions,
      .q_stride = q.stride(0),
      .k_stride = k.stride(0),
      .v_stride = v.stride(0),
      .norm_eps = eps,
      .interleaved = are_pairs_neighbors,
      .dtype = dtype,
      .cache_dtype = cache.dtype(),
      .error = check.error_flag(),
      .k_scales = cache.k_scales.data<float>(),
      .v_scales = cache.v_scales.data<float>(),
  };
  if (check.on_cuda()) return rope_append_kv_cuda(params, check.stream());

  // Validate every index before anything is written.
  for (int64_t row = 0; row < rows; ++row) check.refuse(find_fault(params, row));
  launch(rows * (qo_heads + 2 * kv_heads) * head_dim, [&] { rope_append_kv_cpu(params); });
}

// Returns into how many groups of equal size the query heads over one latent are split on the CPU:
// the fewest for which one query's group fits a tile. The plan treats the groups as KV heads.
int64_t latent_head_groups(int64_t num_qo_heads) {
  int64_t groups = (num_qo_heads + kAttentionTile - 1) / kAttentionTile;
  while (groups > 0 && num_qo_heads % groups != 0) ++groups;
  return groups;
}

// Checks the head counts and head_dim of keys and values, or of latents (cache.v is None).
void check_heads(const Checker& check,
                 bool is_latent,
                 DType cache_dtype,
                 int64_t head_dim,
                 int64_t qo_heads,
                 int64_t kv_heads) {
  if (!is_latent) {
    bool known =
        head_dim == 64 || head_dim == 96 || head_dim == 128 || head_dim == 256 || head_dim == 512;
    if (!known) check.fail("head_dim", "64, 96, 128, 256 or 512", std::to_string(head_dim));
    int64_t group = kv_heads > 0 && qo_heads % kv_heads == 0 ? qo_heads / kv_heads : 0;
    if (group >= 1 && group <= 64) return;
    check.fail("num_qo_heads",
               "1 to 64 times num_kv_heads=" + std::to_string(kv_heads),
               std::to_string(qo_heads));
  }
  if (head_dim != kLatentKeyDim) {
    check.fail("cache.v", "a tensor where head_dim=" + std::to_string(head_dim), "None");
  }
  if (kv_heads != 1) check.fail("num_kv_heads", "1 of latents", std::to_string(kv_heads));
  if (qo_heads < 1) check.fail("num_qo_heads", "at least 1", std::to_string(qo_heads));
  bool served = !is_8_bit(cache_dtype) && !(check.on_cuda() && cache_dtype == DType::kFloat32);
  if (served) return;
  check.fail("cache.k",
             check.on_cuda() ? "bfloat16 or float16 where cache.v is None on cuda"
                             : "float32, bfloat16 or float16 where cache.v is None",
             dtype_name(cache_dtype));
}

// Checks the contents of the index arrays in one pass over the batch and the pages in use. Returns
// the KV tokens that the launch reads, summed over rows.
int64_t check_paged_batch(Checker& check, const AppendAttentionParams& params) {
  int64_t work = 0;
  check.that(params.qo_indptr[0] == 0, "batch.qo_indptr[0]", "0", params.qo_indptr[0]);
  for (int64_t batch_idx = 0; batch_idx < params.batch; ++batch_idx) {
    check.refuse(find_fault(params, batch_idx));
    int64_t qo_len = params.qo_indptr[batch_idx + 1] - params.qo_indptr[batch_idx];
    if (qo_len == 0) continue;
    // Pages before every row's window are never read and may already have been released.
    int64_t kv_len = params.kv_lens[batch_idx];
    int64_t first = params.sliding_window > 0 ? kv_len - qo_len - params.sliding_window + 1 : 0;
    int64_t first_place = params.kv_indptr[batch_idx];
    int64_t place = first_place + (first > 0 ? first / params.page_size : 0);
    int64_t last_place = first_place + (kv_len - 1) / params.page_size;
    for (; place <= last_place; ++place) {
      check.refuse(find_page_fault(params, place, params.kv_indices[place]));
    }
    work += qo_len * kv_len;
  }
  return work;
}

// Checks the shared prefixes that the caller declares; call it after check_paged_batch.
void check_prefixes(Checker& check, const AppendAttentionParams& params) {
  int64_t batch = params.batch;
  auto at_level = [](const char* name, int64_t level, int64_t batch_idx) {
    return std::string(name) + "[" + std::to_string(level) + ", " + std::to_string(batch_idx) + "]";
  };
  for (int64_t level = 0; level < params.num_prefix_levels; ++level) {
    const int32_t* leaders = params.prefix_leaders + level * batch;
    const int32_t* lens = params.prefix_lens + level * batch;
    for (int64_t b = 0; b < batch; ++b) {
      bool joined = b > 0 && leaders[b] == leaders[b - 1];
      if (leaders[b] != b && !joined) {
        check.fail(at_level("prefixes.leaders", level, b),
                   b == 0 ? "0"
                          : std::to_string(b) + " (a group of its own) or " +
                                std::to_string(leaders[b - 1]) + " (that of the request before)",
                   std::to_string(leaders[b]));
      }
      if (lens[b] < 0) {
        check.fail(at_level("prefixes.lens", level, b), "at least 0", std::to_string(lens[b]));
      }
      if (!joined) continue;
      if (lens[b] != lens[b - 1]) {
        check.fail(at_level("prefixes.lens", level, b),
                   std::to_string(lens[b - 1]) + " as in the rest of its group",
                   std::to_string(lens[b]));
      }
      if (level == 0) continue;
      if (leaders[b - batch] != leaders[b - batch - 1]) {
        check.fail(
            at_level("prefixes.leaders", level, b),
            std::to_string(b) + ", where a group of level " + std::to_string(level - 1) + " begins",
            std::to_string(leaders[b]));
      }
      if (lens[b] < lens[b - batch]) {
        check.fail(at_level("prefixes.lens", level, b),
                   "at least that of level " + std::to_string(level - 1) + ", " +
                       std::to_string(lens[b - batch]),
                   std::to_string(lens[b]));
      }
    }
    // Compare each request that has rows with the previous one in its group that has rows: both
    // must see the same shared pages. Pages that no row's window reaches may hold anything.
    int64_t before = -1;
    for (int64_t b = 0; b < batch; ++b) {
      int64_t qo_len = int64_t{params.qo_indptr[b + 1]} - params.qo_indptr[b];
      bool alone = leaders[b] == b && (b + 1 == batch || leaders[b + 1] != b);
      if (qo_len == 0 || alone || lens[b] == 0) continue;
      int64_t first_position = params.kv_lens[b] - qo_len;
      if (lens[b] > first_position) {
        check.fail(at_level("prefixes.lens", level, b),
                   "at most batch.kv_lens - rows of request " + std::to_string(b) + ", " +
                       std::to_string(first_position),
                   std::to_string(lens[b]));
      }
      int64_t begin = mask_begin(params, b, first_position);
      if (lens[b] > begin) {
        check.fail(at_level("prefixes.lens", level, b),
                   "at most mask.starts[" + std::to_string(b) + "]=" + std::to_string(begin),
                   std::to_string(lens[b]));
      }
      int64_t previous = before;
      before = b;
      if (previous < 0 || leaders[previous] != leaders[b]) continue;
      int64_t other_position = int64_t{params.kv_lens[previous]} - params.qo_indptr[previous + 1] +
                               params.qo_indptr[previous];
      int64_t last = first_position > other_position ? first_position : other_position;
      int64_t seen = params.sliding_window > 0 ? last - params.sliding_window + 1 : 0;
      const int32_t* ids = params.kv_indices + params.kv_indptr[b];
      const int32_t* other_ids = params.kv_indices + params.kv_indptr[previous];
      for (int64_t page = (seen > 0 ? seen : 0) / params.page_size;
           page * params.page_size < lens[b];
           ++page) {
        if (ids[page] == other_ids[page]) continue;
        check.fail("page " + std::to_string(page) + " of request " + std::to_string(b) +
                       " in batch.kv_indices",
                   "that of request " + std::to_string(previous) + ", " +
                       std::to_string(other_ids[page]) + ", as " +
                       at_level("prefixes.lens", level, b) + "=" + std::to_string(lens[b]) +
                       " tokens are shared",
                   std::to_string(ids[page]));
      }
    }
  }
}

// Stamp buffer in which append_attention on CUDA records phase times.
GivenPhaseStamps given_phase_stamps;

void set_phase_stamps(const TensorView& stamps) {
  given_phase_stamps.set("set_phase_stamps", stamps, kAttentionStampWords);
}

void append_attention(const TensorView& q,
                      Argument cache_given,
                      Argument batch_given,
                      Argument sm_scale,
                      Argument sliding_window,
                      Argument is_causal,
                      const TensorView& sinks,
                      Argument mask_given,
                      Argument prefixes_given,
                      const TensorView& out,
                      const TensorView& lse,
                      const TensorView& workspace) {
  Checker check("append_attention");
  Dim rows{"rows"}, qo_heads{"num_qo_heads"}, kv_heads{"num_kv_heads"}, head_dim{"head_dim"};
  Dim num_pages{"num_pages"}, page_size{"page_size"}, batch{"batch"}, batch_plus_1{"batch + 1"};
  Dim num_indices{"pages"}, workspace_size{"floats"}, levels{"levels"}, mask_words{"words"};
  check.tensor("q", q, kFloats, {&rows, &qo_heads, &head_dim}, Layout::kRows);
  DType dtype = q.dtype();
  PagedKv cache =
      check_cache(check, cache_given, dtype, true, {num_pages, page_size, kv_heads, head_dim});
  bool is_latent = !cache.v.defined();
  // Check this before the heads: it is the error to report for a cache with heads before slots.
  check.that(page_size == 16 || page_size == 32 || page_size == 64,
             "page_size",
             "16, 32 or 64 (it is the second dimension of cache.k)",
             page_size.value);
  check_heads(check, is_latent, cache.dtype(), head_dim, qo_heads, kv_heads);
  auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
  if (sm_scale.defined()) {
    scale = check.number("sm_scale", sm_scale);
  } else if (is_latent) {
    check.fail("sm_scale", "given where cache.v is None", "None");
  }
  int64_t window = 0;
  if (sliding_window.defined()) window = check.integer("sliding_window", sliding_window, 1);
  bool sees_no_later = check.flag("is_causal", is_causal);
  Dim value_dim{is_latent ? "latent_dim" : "head_dim", value_dim_of(head_dim)};
  auto [qo_indptr, kv_indptr, kv_indices, kv_lens] =
      check.fields<4>("batch", "PagedBatch", batch_given);
  check.tensor("batch.kv_lens", kv_lens, {DType::kInt32}, {&batch});
  batch_plus_1.value = batch + 1;
  check.tensor("batch.qo_indptr", qo_indptr, {DType::kInt32}, {&batch_plus_1});
  check.tensor("batch.kv_indptr", kv_indptr, {DType::kInt32}, {&batch_plus_1});
  check.tensor("batch.kv_indices", kv_indices, {DType::kInt32}, {&num_indices});
  check.optional("sinks", sinks, {DType::kFloat32}, {&qo_heads});
  auto [mask_bits, mask_starts] = check.fields<2>("mask", "AttentionMask", mask_given);
  if (mask_given.defined()) {
    check.optional("mask.starts", mask_starts, {DType::kInt32}, {&batch});
    check.tensor("mask.bits", mask_bits, {DType::kInt32}, {&rows, &mask_words});
    check.that(mask_words >= 1, "mask.bits", "of at least one word", mask_words.value);
  }
  auto [leaders, prefix_lens] = check.fields<2>("prefixes", "PrefixTensors", prefixes_given);
  if (prefixes_given.defined()) {
    check.tensor("prefixes.leaders", leaders, {DType::kInt32}, {&levels, &batch});
    check.tensor("prefixes.lens", prefix_lens, {DType::kInt32}, {&levels, &batch});
  }
  check.tensor("out", out, {dtype}, {&rows, &qo_heads, &value_dim});
  check.optional("lse", lse, {DType::kFloat32}, {&rows, &qo_heads});
  check.optional("workspace", workspace, {DType::kFloat32}, {&workspace_size});
  AppendAttentionParams params{
      .q = q.raw(),
      .k_cache = cache.k.raw(),
      .v_cache = is_latent ? cache.k.raw() : cache.v.raw(),
      .k_scales = cache.k_scales.data<float>(),
      .v_scales = cache.v_scales.data<float>(),
      .qo_indptr = qo_indptr.data<int32_t>(),
      .kv_indptr = kv_indptr.data<int32_t>(),
      .kv_indices = kv_indices.data<int32_t>(),
      .kv_lens = kv_lens.data<int32_t>(),
      .sinks = sinks.data<float>(),
      .mask = mask_bits.data<int32_t>(),
      .mask_starts = mask_starts.data<int32_t>(),
      .mask_words = mask_given.defined() ? mask_words.value : 0,
      .prefix_leaders = leaders.data<int32_t>(),
      .prefix_lens = prefix_lens.data<int32_t>(),
      .num_prefix_levels = prefixes_given.defined() ? levels.value : 0,
      .out = out.raw(),
      .lse = lse.data<float>(),
      .workspace = workspace.data<float>(),
      .workspace_size = workspace.defined() ? workspace_size.value : 0,
      .rows = rows,
      .batch = batch,
      .num_pages = num_pages,
      .num_indices = num_indices,
      .num_qo_heads = qo_heads,
      .num_kv_heads = is_latent && !check.on_cuda() ? latent_head_groups(qo_heads) : kv_heads.value,
      .head_dim = head_dim,
      .page_size = page_size,
      .q_stride = q.stride(0),
      .sliding_window = window,
      .is_causal = sees_no_later,
      .sm_scale = scale,
      .dtype = dtype,
      .cache_dtype = cache.dtype(),
      .error = check.error_flag(),
      .stamps = nullptr,
      .stamped_blocks = 0,
  };
  if (check.on_cuda()) {
    PhaseStamps to = given_phase_stamps.get();
    params.stamps = to.words;
    params.stamped_blocks = to.blocks;
    check.that(to.words == nullptr || has_stamped_kernel(params),
               "q",
               "bfloat16 with head_dim=128 while phases are stamped",
               "head_dim=" + std::to_string(head_dim));
    check_aligned(check, "q", q);
    check_aligned(check, "cache.k", cache.k);
    if (!is_latent) check_aligned(check, "cache.v", cache.v);
    check_aligned(check, "out", out);
    if (workspace.defined()) check_aligned(check, "workspace", workspace);
    if (rows > 0) append_attention_cuda(params, check.stream());
    return;
  }
  int64_t tokens = check_paged_batch(check, params);
  check_prefixes(check, params);
  if (rows == 0) return;
  launch(tokens * qo_heads * head_dim / 16, [&] {
    switch (params.dtype) {
      case DType::kBFloat16:
        return append_attention_bf16_cpu(params);
      case DType::kFloat16:
        return append_attention_f16_cpu(params);
      default:
        return append_attention_f32_cpu(params);
    }
  });
}

// Returns (floats, zeros): the workspace size that never limits how append_attention splits, and
// how many of its first floats must be zero on first use. device: -1 for the CPU, else the CUDA
// device index.
std::pair<int64_t, int64_t> attention_workspace_size(Argument rows_given,
                                                     Argument qo_heads_given,
                                                     Argument head_dim_given,
                                                     Argument kv_heads_given,
                                                     Argument pages_given,
                                                     Argument page_size_given,
                                                     Argument batch_given,
                                                     Argument device_given) {
  constexpr int64_t kMost = kMaxInt32, kMostHeads = 4096;  // keep sizes within 64 bits
  Checker check("attention_workspace_size");
  int64_t rows = check.integer("rows", rows_given, 0, kMost);
  int64_t num_qo_heads = check.integer("num_qo_heads", qo_heads_given, 1, kMostHeads);
  int64_t head_dim = check.integer("head_dim", head_dim_given, 1, kLatentKeyDim);
  int64_t num_kv_heads = check.integer("num_kv_heads", kv_heads_given, 1, kMostHeads);
  int64_t tokens = check.integer("num_pages", pages_given, 0, kMost) *
                   check.integer("page_size", page_size_given, 1, 64);
  int64_t batch = check.integer("batch", batch_given, 0, kMost);
  int device = static_cast<int>(check.integer("device", device_given, -1, kMost));
  int64_t floats = 0, zeros = 0;
  if (check.on_cuda() || device >= 0) {
    attention_workspace_size_cuda(
        {
            .rows = rows,
            .batch = batch,
            .num_qo_heads = num_qo_heads,
            .num_kv_heads = num_kv_heads,
            .head_dim = head_dim,
            .tokens = tokens,
            .floats = &floats,
            .zeros = &zeros,
        },
        {nullptr, device < 0 ? 0 : device});
    return {floats, zeros};
  }
  if (tokens <= kAttentionChunk) return {0, 0};
  if (head_dim == kLatentKeyDim) num_kv_heads = latent_head_groups(num_qo_heads);
  // Only requests whose rows fit one tile are split, and none in a large batch. With shared
  // prefixes every request may store chunk states here: one more than its full chunks.
  int64_t split_rows = std::min(rows * num_qo_heads, kAttentionTile * num_kv_heads);
  int64_t chunks = tokens / kAttentionChunk + 2 * std::min<int64_t>(batch, 16);
  return {(chunks * split_rows + rows * num_qo_heads) * (value_dim_of(head_dim) + 2), 0};
}

void merge_states(const TensorView& outs,
                  const TensorView& lses,
                  const TensorView& out,
                  const TensorView& lse) {
  Checker check("merge_states");
  Dim states{"states"}, rows{"rows"}, heads{"num_heads"}, head_dim{"head_dim"};
  check.tensor("outs", outs, kFloats, {&states, &rows, &heads, &head_dim});
  check.that(head_dim >= 1, "head_dim", "at least 1", head_dim.value);
  check.tensor("lses", lses, {DType::kFloat32}, {&states, &rows, &heads});
  check.tensor("out", out, {outs.dtype()}, {&rows, &heads, &head_dim});
  check.tensor("lse", lse, {DType::kFloat32}, {&rows, &heads});
  if (rows == 0) return;
  MergeStatesParams params{
      .outs = outs.raw(),
      .lses = lses.data<float>(),
      .out = out.raw(),
      .lse = lse.data<float>(),
      .num_states = states,
      .num_items = rows * heads,
      .head_dim = head_dim,
      .dtype = outs.dtype(),
  };
  if (check.on_cuda()) return merge_states_cuda(params, check.stream());
  launch(states * rows * heads * head_dim, [&] { merge_states_cpu(params); });
}

// Checks all values before anything is written. Returns the number of moves per cache.
int64_t check_moves(const Checker& check, const CompactKvParams& params) {
  int64_t moves = 0;
  for (int64_t b = 0; b < params.batch; ++b) {
    check.refuse(find_fault(params, b));
    int64_t first = params.kv_lens[b] - num_rows(params, b) + 1;
    const int32_t* nodes = params.accepted_nodes + b * params.nodes;
    for (int64_t i = 0; i < params.num_accepted_tokens[b]; ++i) {
      check.refuse(find_node_fault(params, b, i));
      if (nodes[i] == i) continue;
      ++moves;
      for (int64_t token : {first + i, first + nodes[i]}) {
        check.refuse(find_page_fault(params, params.kv_indptr[b] + token / params.page_size));
      }
    }
  }
  return moves;
}

void compact_kv(const TensorView& k_cache,
                const TensorView& v_cache,
                const TensorView& accepted_nodes,
                const TensorView& num_accepted_tokens,
                const TensorView& qo_indptr,
                const TensorView& kv_lens,
                const TensorView& kv_indptr,
                const TensorView& kv_indices) {
  Checker check("compact_kv");
  Dim num_pages{"num_pages"}, page_size{"page_size"}, heads{"num_kv_heads"}, head_dim{"head_dim"};
  Dim batch{"batch"}, batch_plus_1{"batch + 1"}, nodes{"nodes"}, num_indices{"pages"};
  check.tensor("k_cache", k_cache, kSlots, {&num_pages, &page_size, &heads, &head_dim});
  DType dtype = k_cache.dtype();
  check.optional("v_cache", v_cache, {dtype}, {&num_pages, &page_size, &heads, &head_dim});
  check.tensor("accepted_nodes", accepted_nodes, {DType::kInt32}, {&batch, &nodes});
  batch_plus_1.value = batch + 1;
  check.tensor("num_accepted_tokens", num_accepted_tokens, {DType::kInt32}, {&batch});
  check.tensor("qo_indptr", qo_indptr, {DType::kInt32}, {&batch_plus_1});
  check.tensor("kv_lens", kv_lens, {DType::kInt32}, {&batch});
  check.tensor("kv_indptr", kv_indptr, {DType::kInt32}, {&batch_plus_1});
  check.tensor("kv_indices", kv_indices, {DType::kInt32}, {&num_indices});
  CompactKvParams params{
      .k_cache = k_cache.raw(),
      .v_cache = v_cache.data<void>(),
      .accepted_nodes = accepted_nodes.data<int32_t>(),
      .num_accepted_tokens = num_accepted_tokens.data<int32_t>(),
      .qo_indptr = qo_indptr.data<int32_t>(),
      .kv_lens = kv_lens.data<int32_t>(),
      .kv_indptr = kv_indptr.data<int32_t>(),
      .kv_indices = kv_indices.data<int32_t>(),
      .batch = batch,
      .nodes = nodes,
      .num_indices = num_indices,
      .num_pages = num_pages,
      .page_size = page_size,
      .slot_bytes = heads * head_dim * dtype_bytes(dtype),
      .error = check.error_flag(),
  };
  check.that(params.slot_bytes <= kMaxInt32, "k_cache", "of slots below 2 GiB", params.slot_bytes);
  if (batch == 0 || page_size == 0 || params.slot_bytes == 0) return;
  if (check.on_cuda()) return compact_kv_cuda(params, check.stream());
  int64_t moves = check_moves(check, params);
  if (moves > 0) launch(moves * heads * head_dim, [&] { compact_kv_cpu(params); });
}

void copy_kv(const TensorView& k_cache,
             const TensorView& v_cache,
             const TensorView& from_slots,
             const TensorView& to_slots) {
  Checker check("copy_kv");
  Dim num_pages{"num_pages"}, page_size{"page_size"}, heads{"num_kv_heads"}, head_dim{"head_dim"};
  Dim copies{"copies"};
  check.tensor("k_cache", k_cache, kSlots, {&num_pages, &page_size, &heads, &head_dim});
  DType dtype = k_cache.dtype();
  check.optional("v_cache", v_cache, {dtype}, {&num_pages, &page_size, &heads, &head_dim});
  check.tensor("from_slots", from_slots, {DType::kInt64}, {&copies});
  check.tensor("to_slots", to_slots, {DType::kInt64}, {&copies});
  CopyKvParams params{
      .k_cache = k_cache.raw(),
      .v_cache = v_cache.data<void>(),
      .from_slots = from_slots.data<int64_t>(),
      .to_slots = to_slots.data<int64_t>(),
      .copies = copies,
      .num_slots = num_pages * page_size,
      .slot_bytes = heads * head_dim * dtype_bytes(dtype),
      .error = check.error_flag(),
  };
  check.that(params.slot_bytes <= kMaxInt32, "k_cache", "of slots below 2 GiB", params.slot_bytes);
  if (copies == 0 || params.slot_bytes == 0) return;
  if (check.on_cuda()) return copy_kv_cuda(params, check.stream());
  for (int64_t i = 0; i < copies; ++i) check.refuse(find_fault(params, i));
  launch(copies * heads * head_dim, [&] { copy_kv_cpu(params); });
}

}  // namespace

void register_attention(pybind11::module_& m) {
  register_faults<2000>();
  m.def("rope_append_kv", &rope_append_kv);
  register_rope_append_latent(m);
  m.def("append_attention", &append_attention);
  m.def("attention_workspace_size", &attention_workspace_size);
  m.def("set_phase_stamps", &set_phase_stamps);
  m.def("merge_states", &merge_states);
  m.def("compact_kv", &compact_kv);
  m.def("copy_kv", &copy_kv);
}

}  // namespace specops
