// SPDX-License-Identifier: Apache-2.0
// Argument checks and registration of rope_append_latent.
#include "attention/checks.h"
#include "attention/ops.h"
#include "attention/rope_append_latent/rope_append_latent.h"

namespace specops {
namespace {

void rope_append_latent(const TensorView& q,
                        const TensorView& kv,
                        const TensorView& latent_cache,
                        const TensorView& cache_slots,
                        const TensorView& positions,
                        const TensorView& cos_sin,
                        Argument interleaved,
                        const TensorView& norm_weight,
                        Argument norm_eps,
                        const TensorView& q_out) {
  Checker check("rope_append_latent");
  Dim rows{"rows"}, heads{"num_qo_heads"}, num_pages{"num_pages"}, page_size{"page_size"};
  Dim key_dim{"key_dim", kLatentKeyDim}, latent_dim{"latent_dim", kLatentDim};
  Dim one{"num_kv_heads", 1}, max_positions{"max_positions"},
      rotary_dim{"rotary_dim", kLatentRopeDim};
  check.tensor("q", q, kFloats, {&rows, &heads, &key_dim}, Layout::kRows);
  DType dtype = q.dtype();
  check.tensor("kv", kv, {dtype}, {&rows, &key_dim}, Layout::kRows);
  check.tensor("latent_cache", latent_cache, {dtype}, {&num_pages, &page_size, &one, &key_dim});
  check.tensor("cache_slots", cache_slots, {DType::kInt64}, {&rows});
  check.tensor("positions", positions, {DType::kInt32}, {&rows});
  check.tensor("cos_sin", cos_sin, {DType::kFloat32}, {&max_positions, &rotary_dim});
  check.optional("norm_weight", norm_weight, {dtype}, {&latent_dim});
  bool are_pairs_neighbors = check.flag("interleaved", interleaved);
  float eps = check.number("norm_eps", norm_eps);
  check.tensor("q_out", q_out, {dtype}, {&rows, &heads, &key_dim});
  if (rows == 0) return;
  RopeAppendLatentParams params{
      .q = q.raw(),
      .kv = kv.raw(),
      .q_out = q_out.raw(),
      .latent_cache = latent_cache.raw(),
      .cache_slots = cache_slots.data<int64_t>(),
      .positions = positions.data<int32_t>(),
      .cos_sin = cos_sin.data<float>(),
      .norm_weight = norm_weight.data<void>(),
      .rows = rows,
      .num_qo_heads = heads,
      .num_slots = num_pages * page_size,
      .max_positions = max_positions,
      .q_stride = q.stride(0),
      .kv_stride = kv.stride(0),
      .norm_eps = eps,
      .interleaved = are_pairs_neighbors,
      .dtype = dtype,
      .error = check.error_flag(),
  };
  if (check.on_cuda()) {
    check_aligned(check, "q", q);
    check_aligned(check, "kv", kv);
    check_aligned(check, "latent_cache", latent_cache);
    check_aligned(check, "q_out", q_out);
    if (norm_weight.defined()) check_aligned(check, "norm_weight", norm_weight);
    return rope_append_latent_cuda(params, check.stream());
  }

  // Validate every index before anything is written.
  for (int64_t row = 0; row < rows; ++row) check.refuse(find_fault(params, row));
  if (rows * (heads + 1) * kLatentKeyDim < kGilElements) return rope_append_latent_cpu(params);
  pybind11::gil_scoped_release release;
  rope_append_latent_cpu(params);
}

}  // namespace

void register_rope_append_latent(pybind11::module_& m) {
  m.def("rope_append_latent", &rope_append_latent);
}

}  // namespace specops
