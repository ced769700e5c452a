// SPDX-License-Identifier: Apache-2.0
// Argument checks and registration of the mixture-of-experts ops.
#include "moe/ops.h"

#include <string>

#include "common/ops.h"
#include "common/tensor_view.h"
#include "gemm/checks.h"
#include "moe/moe_combine.h"
#include "moe/moe_linear.h"
#include "moe/moe_route.h"
#include "moe/moe_sort.h"

namespace specops {
namespace {

Scoring read_scoring(const Checker& check, Argument given) {
  const char* expected = "'softmax' or 'sigmoid'";
  std::string name = check.text("scoring", given, expected);
  if (name == "softmax") return Scoring::kSoftmax;
  if (name == "sigmoid") return Scoring::kSigmoid;
  check.fail("scoring", expected, "'" + name + "'");
}

void moe_route(const TensorView& logits,
               Argument top_k_given,
               const TensorView& bias,
               Argument scoring,
               Argument groups_given,
               Argument top_k_groups_given,
               Argument min_sum_given,
               Argument scale_given,
               const TensorView& expert_ids,
               const TensorView& expert_weights) {
  Checker check("moe_route");
  Dim rows{"rows"}, experts{"num_experts"}, top_k{"top_k"};
  check.tensor("logits", logits, {DType::kFloat32}, {&rows, &experts}, Layout::kRows);
  check.that(experts >= 1 && experts <= kMostExperts,
             "logits",
             "of 1 to " + std::to_string(kMostExperts) + " experts",
             experts.value);
  check.optional("bias", bias, {DType::kFloat32}, {&experts});
  int64_t groups = check.integer("num_groups", groups_given, 1, experts);
  bool has_pairs = experts % groups == 0 && (groups == 1 || experts / groups >= 2);
  check.that(has_pairs,
             "num_groups",
             "1, or such that each group has as many experts of " + std::to_string(experts.value) +
                 ", two at least",
             groups);
  int64_t top_k_groups = check.integer("top_k_groups", top_k_groups_given, 1, groups);
  bool normalizes = min_sum_given.defined();
  float min_sum = normalizes ? check.number("min_sum", min_sum_given) : 0.0f;
  float scale = check.number("scale", scale_given);
  // top_k is at most the number of experts in the chosen groups.
  top_k.value = check.integer("top_k", top_k_given, 0, experts / groups * top_k_groups);
  check.tensor("expert_ids", expert_ids, {DType::kInt32}, {&rows, &top_k});
  check.tensor("expert_weights", expert_weights, {DType::kFloat32}, {&rows, &top_k});
  MoeRouteParams params{
      .logits = logits.data<float>(),
      .bias = bias.data<float>(),
      .expert_ids = expert_ids.data<int32_t>(),
      .expert_weights = expert_weights.data<float>(),
      .rows = rows,
      .num_experts = experts,
      .top_k = top_k,
      .logits_stride = logits.stride(0),
      .num_groups = groups,
      .top_k_groups = top_k_groups,
      .scoring = read_scoring(check, scoring),
      .normalizes = normalizes,
      .min_sum = min_sum,
      .scale = scale,
  };
  if (rows == 0 || top_k == 0) return;
  if (check.on_cuda()) return moe_route_cuda(params, check.stream());
  ReleaseGil release(rows > 32);
  moe_route_cpu(params);
}

// Checks that the number of pairs fits int32, because positions in the sorted order are int32.
void check_pairs(Checker& check, const char* argument, int64_t pairs) {
  check.that(pairs <= Checker::kMaxInt32, argument, "fewer than 2^31 pairs", pairs);
}

void moe_sort(const TensorView& expert_ids,
              Argument num_experts_given,
              const TensorView& expert_indptr,
              const TensorView& row_indices,
              const TensorView& places) {
  Checker check("moe_sort");
  Dim rows{"rows"}, top_k{"top_k"}, entries{"num_experts + 1"}, pairs{"rows * top_k"};
  check.tensor("expert_ids", expert_ids, {DType::kInt32}, {&rows, &top_k});
  pairs.value = rows * top_k;
  check_pairs(check, "expert_ids", pairs);
  entries.value = check.integer("num_experts", num_experts_given, 1, Checker::kMaxInt32 - 1) + 1;
  check.tensor("expert_indptr", expert_indptr, {DType::kInt32}, {&entries});
  check.tensor("row_indices", row_indices, {DType::kInt32}, {&pairs});
  check.tensor("places", places, {DType::kInt32}, {&rows, &top_k});
  MoeSortParams params{
      .expert_ids = expert_ids.data<int32_t>(),
      .expert_indptr = expert_indptr.data<int32_t>(),
      .row_indices = row_indices.data<int32_t>(),
      .places = places.data<int32_t>(),
      .pairs = pairs,
      .top_k = top_k,
      .num_experts = entries - 1,
      .error = check.error_flag(),
  };
  if (check.on_cuda()) return moe_sort_cuda(params, check.stream());
  for (int64_t pair = 0; pair < pairs; ++pair) check.refuse(find_fault(params, pair));
  ReleaseGil release(pairs > (16 << 10));
  moe_sort_cpu(params);
}

// Reduces a tensor that has one entry per expert to the entry of the first expert. Returns the
// number of elements from one expert to the next. Leaves any other argument unchanged; the check of
// the field reports it.
int64_t take_first(Checker& check, const char* argument, TensorView& view, Dim& experts) {
  if (!view.is_tensor || view.ndim() == 0) return 0;
  if (experts.value < 0) experts.value = view.size(0);
  check.that(view.size(0) == experts,
             argument,
             "of num_experts=" + std::to_string(experts.value),
             view.size(0));
  int64_t apart = 1;
  for (int axis = 1; axis < view.ndim(); ++axis) apart *= view.size(axis);
  bool follows = experts <= 1 || apart == 0 || view.stride(0) == apart;
  check.that(
      follows, argument, "contiguous", "experts " + std::to_string(view.stride(0)) + " apart");
  ++view.dl.shape;
  ++view.dl.strides;
  --view.dl.ndim;
  return apart;
}

void moe_linear(const TensorView& x,
                Argument packed_weight,
                const TensorView& bias,
                const TensorView& expert_indptr,
                const TensorView& row_indices,
                const TensorView& out,
                const TensorView& workspace) {
  Checker check("moe_linear");
  Dim x_rows{"rows"}, num_outputs{"num_outputs"}, num_inputs{"num_inputs"};
  Dim experts{"num_experts"}, entries{"num_experts + 1"}, pairs{"pairs"};
  Dim width{"num_outputs / 2"}, workspace_size{"floats"};
  WeightFields fields = weight_fields(check, packed_weight);
  int64_t data = take_first(check, "weight.data", fields.data, experts);
  int64_t scales = take_first(check, "weight.scales", fields.scales, experts);
  int64_t offsets = take_first(check, "weight.offsets", fields.offsets, experts);
  int64_t code_values = take_first(check, "weight.code_values", fields.code_values, experts);
  if (fields.input_order.defined()) {
    check.fail("weight.input_order", "None of experts", "an order");
  }
  PackedWeightArgument packed = check_weight_fields(check, fields, num_outputs, num_inputs);
  bool is_gate_up = is_gated(packed.params.activation);
  entries.value = experts + 1;
  width.value = num_outputs / 2;
  if (packed.params.kind == WeightKind::kPlain) {
    check.tensor("x", x, {packed.dtype}, {&x_rows, &num_inputs}, Layout::kRows);
  } else {
    check_real(check, "x", x, check.on_cuda(), {&x_rows, &num_inputs}, Layout::kRows);
  }
  DType dtype = x.dtype();
  check.optional("bias", bias, {dtype}, {&experts, &num_outputs});
  check.tensor("expert_indptr", expert_indptr, {DType::kInt32}, {&entries});
  if (row_indices.defined()) {
    check.tensor("row_indices", row_indices, {DType::kInt32}, {&pairs});
  } else {
    pairs.value = x_rows;
  }
  check_pairs(check, "out", pairs);
  if (is_gate_up) {
    check.tensor("out", out, {dtype}, {&pairs, &width});
  } else if (dtype == DType::kFloat32) {
    check.tensor("out", out, {DType::kFloat32}, {&pairs, &num_outputs});
  } else {
    check.tensor("out", out, {dtype, DType::kFloat32}, {&pairs, &num_outputs});
  }
  check.optional("workspace", workspace, {DType::kFloat32}, {&workspace_size});
  GemmParams gemm{
      .x = x.raw(),
      .weight = packed.params,
      .bias = bias.defined() ? bias.raw() : nullptr,
      .out = out.raw(),
      .rows = pairs,
      .x_stride = x.stride(0),
      .dtype = dtype,
      .out_dtype = out.dtype(),
      .row_indices = row_indices.data<int32_t>(),
  };
  ExpertsParams params{gemm,
                       expert_indptr.data<int32_t>(),
                       experts,
                       x_rows,
                       data * dtype_bytes(packed.dtype),
                       scales,
                       offsets,
                       code_values,
                       workspace.data<float>(),
                       workspace.defined() ? workspace_size.value : 0,
                       check.error_flag()};
  if (pairs == 0 || num_outputs == 0 || experts == 0) return;
  if (check.on_cuda() && workspace.defined()) check.on_16_bytes("workspace", workspace);
  if (check.on_cuda()) return moe_linear_cuda(params, check.stream());
  int64_t busy = 0;
  for (int64_t e = 0; e < experts; ++e) {
    check.refuse(find_expert_fault(params, e));
    busy += params.expert_indptr[e + 1] > params.expert_indptr[e];
  }
  if (row_indices.defined()) {
    for (int64_t pair = 0; pair < params.expert_indptr[experts]; ++pair) {
      check.refuse(find_row_fault(params, pair));
    }
  }
  ReleaseGil release(packed.bytes * busy > (1536 << 10));
  moe_linear_cpu(params);
}

void moe_combine(const TensorView& expert_out,
                 const TensorView& places,
                 const TensorView& expert_weights,
                 const TensorView& shared,
                 const TensorView& out) {
  Checker check("moe_combine");
  Dim pairs{"pairs"}, rows{"rows"}, top_k{"top_k"}, width{"width"};
  check.tensor("expert_out", expert_out, {DType::kFloat32}, {&pairs, &width});
  check.tensor("places", places, {DType::kInt32}, {&rows, &top_k});
  check.tensor("expert_weights", expert_weights, {DType::kFloat32}, {&rows, &top_k});
  check.optional("shared", shared, {DType::kFloat32}, {&rows, &width});
  check.tensor("out", out, {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {&rows, &width});
  MoeCombineParams params{
      .expert_out = expert_out.data<float>(),
      .places = places.data<int32_t>(),
      .expert_weights = expert_weights.data<float>(),
      .shared = shared.data<float>(),
      .out = out.raw(),
      .pairs = pairs,
      .rows = rows,
      .top_k = top_k,
      .width = width,
      .dtype = out.dtype(),
      .error = check.error_flag(),
  };
  if (rows == 0 || width == 0) return;
  if (check.on_cuda()) return moe_combine_cuda(params, check.stream());
  for (int64_t pair = 0; pair < rows * top_k; ++pair) check.refuse(find_fault(params, pair));
  ReleaseGil release(rows * (top_k + 1) * width > (256 << 10));
  moe_combine_cpu(params);
}

}  // namespace

void register_moe(pybind11::module_& m) {
  register_faults<6000>();
  m.def("moe_route", &moe_route);
  m.def("moe_sort", &moe_sort);
  m.def("moe_linear", &moe_linear);
  m.def("moe_combine", &moe_combine);
}

}  // namespace specops
