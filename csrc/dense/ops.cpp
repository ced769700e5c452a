// SPDX-License-Identifier: Apache-2.0
// Argument checks and registration of the dense ops.
#include "dense/ops.h"

#include <pybind11/stl.h>

#include <array>
#include <atomic>
#include <string>
#include <vector>

#include "common/ops.h"
#include "common/tensor_view.h"
#include "dense/embedding.h"
#include "dense/gated_mul.h"
#include "dense/linear.h"
#include "dense/mtp_input.h"
#include "dense/output_gate.h"
#include "dense/rms_norm.h"
#include "gemm/checks.h"
#include "gemm/rounded_rows.h"

namespace specops {
namespace {

constexpr const char* gated_name(Activation activation) {
  if (activation == Activation::kSilu) return "silu_mul";
  return activation == Activation::kGeluTanh ? "gelu_tanh_mul" : "swiglu_oai_mul";
}

template <Activation kActivation>
void gated_mul(const TensorView& gate_up, const TensorView& out) {
  Checker check(gated_name(kActivation));
  Dim rows{"rows"}, width{"width"}, two_width{"2 * width"};
  check.tensor("gate_up",
               gate_up,
               {DType::kFloat32, DType::kBFloat16, DType::kFloat16},
               {&rows, &two_width},
               Layout::kRows);
  check.that(two_width % 2 == 0, "gate_up", "[rows, 2 * width]", two_width.value);
  width.value = two_width / 2;
  check.tensor("out", out, {gate_up.dtype()}, {&rows, &width});
  if (rows == 0 || width == 0) return;
  GatedMulParams params{
      .gate_up = gate_up.raw(),
      .out = out.raw(),
      .rows = rows,
      .width = width,
      .gate_up_stride = gate_up.stride(0),
      .dtype = out.dtype(),
      .activation = kActivation,
  };
  if (check.on_cuda()) return gated_mul_cuda(params, check.stream());
  gated_mul_cpu(params);
}

// Returns the layout of a packed weight as (blocks, steps, word, scale_block, turn,
// workspace_per_row, max_workspace_rows). The first three are the shape of `packed` on the device.
// scale_block: outputs per row of scales; 0 if scales are not packed. turn: number of gates that
// are followed by as many ups. workspace_per_row: floats of workspace of linear on CUDA.
// max_workspace_rows: largest number of rows for which a workspace helps.
std::array<int64_t, 7> packed_weight_layout(Argument device,
                                            Argument kind_given,
                                            Argument element_bytes,
                                            Argument outputs,
                                            Argument inputs,
                                            Argument activation_given,
                                            Argument group_given,
                                            Argument activations_given) {
  Checker check("pack_weight");
  bool on_cuda =
      check.text("device", device, "the type of a device") == "cuda" || interprets_cuda();
  WeightKind kind = read_weight_kind(check, "kind", kind_given);
  int64_t bytes = check.integer("element_bytes", element_bytes, 1, 16);
  int64_t num_outputs = check.integer("num_outputs", outputs, 0, kMostInputs);
  int64_t num_inputs = check.integer("num_inputs", inputs, 0, kMostInputs);
  Activation activation = read_activation(check, "activation", activation_given);
  int64_t group = read_group(check, "group", group_given, kind);
  RowNumbers numbers = read_row_numbers(check, "activations", activations_given, kind);
  PackedDims dims = packed_dims(on_cuda, kind, bytes, num_outputs, num_inputs, activation, group);
  WeightParams weight{};
  weight.kind = kind;
  weight.group = group;
  weight.row_numbers = numbers;
  weight.num_inputs = num_inputs;
  int64_t floats = 0, rows = 0;
  if (on_cuda && kind == WeightKind::kPlain) {
    DType dtype = bytes == 2 ? DType::kBFloat16 : DType::kFloat32;
    floats = sum_leaves(num_inputs).leaves * weight_groups(num_outputs) * kWeightGroup;
    rows = linear_max_split_rows(num_outputs, num_inputs, dtype);
  } else if (on_cuda && code_tile_steps(weight) != 0) {
    floats = rounded_row_floats(weight);
    rows = INT32_MAX / kRoundedRows * kRoundedRows;
  }
  return {dims.blocks, dims.steps, dims.word, dims.scale_block, dims.turn, floats, rows};
}

// Returns the weight kind for a matrix of elements of `dtype`.
WeightKind kind_of(DType dtype) {
  for (const WeightKindName& one : kWeightKinds) {
    if (one.kind != WeightKind::kPlain && code_dtype(one.kind) == dtype) return one.kind;
  }
  return WeightKind::kPlain;
}

void pack_weight(const TensorView& weight, const TensorView& packed, Argument activation_given) {
  Checker check("pack_weight");
  Dim num_outputs{"num_outputs"}, num_inputs{"num_inputs"};
  Activation activation = read_activation(check, "activation", activation_given);
  std::initializer_list<Dim*> shape = {&num_outputs, &num_inputs};
  DType dtype = weight.dtype();
  WeightKind kind = kind_of(dtype);
  if (kind == WeightKind::kPlain) {
    check_real(check, "weight", weight, wants_cuda(weight), shape, Layout::kRows);
  } else {
    check.tensor("weight", weight, {dtype}, shape, Layout::kRows);
  }
  check_halves(check, "weight", num_outputs, activation);
  PackedDims dims = packed_dims(
      check.on_cuda(), kind, dtype_bytes(dtype), num_outputs, num_inputs, activation, 0);
  check.tensor("packed", packed, {dtype}, {&dims.blocks, &dims.steps, &dims.word});
  if (num_outputs == 0 || num_inputs == 0) return;
  if (check.on_cuda()) check.on_16_bytes("packed", packed);
  PackWeightParams params{
      .weight = weight.raw(),
      .packed = packed.raw(),
      .num_outputs = num_outputs,
      .num_inputs = num_inputs,
      .weight_stride = weight.stride(0),
      .dtype = dtype,
      .activation = activation,
  };
  if (check.on_cuda()) return pack_weight_cuda(params, check.stream());
  ReleaseGil release(num_outputs * num_inputs > (256 << 10));
  pack_weight_cpu(params);
}

// The kernel that set_linear_kernel() selected.
std::atomic<LinearKernel> linear_kernel{LinearKernel::kByShape};

// Returns the names of the kernels that support this many rows.
std::vector<std::string> linear_kernels(Argument num_rows) {
  int64_t rows = Checker("linear_kernels").integer("num_rows", num_rows, 0);
  std::vector<std::string> names;
  for (const LinearKernelName& one : kLinearKernels) {
    if (rows <= one.max_rows) names.emplace_back(one.name);
  }
  return names;
}

void set_linear_kernel(Argument kernel) {
  LinearKernel chosen = LinearKernel::kByShape;
  std::string names;
  for (const LinearKernelName& one : kLinearKernels) {
    names += std::string(names.empty() ? "" : ", ") + one.name;
  }
  std::string expected = "one of " + names + " or None";
  Checker check("set_linear_kernel");
  if (kernel.defined()) {
    std::string name = check.text("kernel", kernel, expected);
    for (const LinearKernelName& one : kLinearKernels) {
      if (name == one.name) chosen = one.kernel;
    }
    check.that(chosen != LinearKernel::kByShape, "kernel", expected, "'" + name + "'");
  }
  linear_kernel.store(chosen, std::memory_order_relaxed);
}

// Returns the kernel that set_linear_kernel() selected; an error if it does not support this many
// rows.
LinearKernel kernel_for(Checker& check, int64_t rows) {
  LinearKernel chosen = linear_kernel.load(std::memory_order_relaxed);
  for (const LinearKernelName& one : kLinearKernels) {
    if (one.kernel != chosen) continue;
    std::string most = std::to_string(one.max_rows) + " rows or fewer for the kernel " + one.name;
    check.that(rows <= one.max_rows, "x", most, rows);
  }
  return chosen;
}

void linear(const TensorView& x,
            Argument packed_weight,
            const TensorView& bias,
            const TensorView& out,
            const TensorView& workspace) {
  Checker check("linear");
  Dim rows{"rows"}, num_outputs{"num_outputs"}, num_inputs{"num_inputs"};
  Dim width{"num_outputs / 2"}, workspace_size{"floats"};
  PackedWeightArgument packed = check_packed_weight(check, packed_weight, num_outputs, num_inputs);
  bool is_plain = packed.params.kind == WeightKind::kPlain;
  width.value = num_outputs / 2;
  if (is_plain) {
    check.tensor("x", x, {packed.dtype}, {&rows, &num_inputs}, Layout::kRows);
  } else {
    check_real(check, "x", x, check.on_cuda(), {&rows, &num_inputs}, Layout::kRows);
  }
  DType dtype = x.dtype();
  check.optional("bias", bias, {dtype}, {&num_outputs});
  if (is_gated(packed.params.activation)) {
    check.tensor("out", out, {dtype}, {&rows, &width});
  } else if (dtype == DType::kFloat32) {
    check.tensor("out", out, {DType::kFloat32}, {&rows, &num_outputs});
  } else {
    check.tensor("out", out, {dtype, DType::kFloat32}, {&rows, &num_outputs});
  }
  check.optional("workspace", workspace, {DType::kFloat32}, {&workspace_size});
  if (rows == 0 || num_outputs == 0) return;
  if (check.on_cuda() && workspace.defined()) check.on_16_bytes("workspace", workspace);
  GemmParams gemm{
      .x = x.raw(),
      .weight = packed.params,
      .bias = bias.defined() ? bias.raw() : nullptr,
      .out = out.raw(),
      .rows = rows,
      .x_stride = x.stride(0),
      .dtype = dtype,
      .out_dtype = out.dtype(),
  };
  LinearParams params{gemm,
                      workspace.data<float>(),
                      workspace.defined() ? workspace_size.value : 0,
                      LinearKernel::kByShape,
                      check.error_flag()};
  if (check.on_cuda()) {
    if (is_plain && dtype != DType::kFloat32) params.kernel = kernel_for(check, rows);
    return linear_cuda(params, check.stream());
  }
  // Release the GIL for ops of 50 us or more: reading about 1.5 MB of weights, or passing over them
  // with eight rows.
  ReleaseGil release(packed.bytes * ((rows + 7) / 8) > (1536 << 10));
  linear_cpu(params);
}

void rms_norm(const TensorView& x,
              const TensorView& weight,
              Argument eps_given,
              const TensorView& residual,
              const TensorView& out) {
  Checker check("rms_norm");
  Dim rows{"rows"}, width{"width"};
  check.tensor(
      "x", x, {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {&rows, &width}, Layout::kRows);
  DType dtype = x.dtype();
  check.tensor("weight", weight, {dtype}, {&width});
  float eps = check.number("eps", eps_given);
  check.optional("residual", residual, {dtype}, {&rows, &width});
  check.tensor("out", out, {dtype}, {&rows, &width});
  if (rows == 0 || width == 0) return;
  if (residual.defined() && overlap(residual, out)) {
    check.fail("out", "another tensor than residual", "overlapping memory");
  }
  if (residual.defined() && overlap(residual, x)) {
    check.fail("residual", "another tensor than x", "overlapping memory");
  }
  RmsNormParams params{
      .x = x.raw(),
      .weight = weight.raw(),
      .residual = residual.defined() ? residual.raw() : nullptr,
      .out = out.raw(),
      .rows = rows,
      .width = width,
      .x_stride = x.stride(0),
      .eps = eps,
      .dtype = dtype,
  };
  if (check.on_cuda()) return rms_norm_cuda(params, check.stream());
  ReleaseGil release(rows * width > (256 << 10));
  rms_norm_cpu(params);
}

void output_gate(const TensorView& x,
                 const TensorView& gate,
                 Argument activation_given,
                 const TensorView& norm_weight,
                 Argument norm_eps_given,
                 const TensorView& out) {
  Checker check("output_gate");
  Dim rows{"rows"}, heads{"heads"}, dim{"dim"}, gate_dim{"dim or 1"};
  check.tensor("x",
               x,
               {DType::kFloat32, DType::kBFloat16, DType::kFloat16},
               {&rows, &heads, &dim},
               Layout::kRows);
  DType dtype = x.dtype();
  check.tensor("gate", gate, {dtype}, {&rows, &heads, &gate_dim}, Layout::kRows);
  check.that(gate_dim == dim || gate_dim == 1,
             "gate",
             "of dim=" + std::to_string(dim.value) + " elements a head, or one",
             gate_dim.value);
  std::string activation = check.text("activation", activation_given, "'sigmoid' or 'silu'");
  check.that(activation == "sigmoid" || activation == "silu",
             "activation",
             "'sigmoid' or 'silu'",
             "'" + activation + "'");
  check.optional("norm_weight", norm_weight, {dtype}, {&dim});
  float eps = check.number("norm_eps", norm_eps_given);
  check.tensor("out", out, {dtype}, {&rows, &heads, &dim});
  if (rows == 0 || heads == 0 || dim == 0) return;
  if (overlap(gate, out)) check.fail("out", "another tensor than gate", "overlapping memory");
  OutputGateParams params{
      .x = x.raw(),
      .gate = gate.raw(),
      .weight = norm_weight.data<void>(),
      .out = out.raw(),
      .rows = rows,
      .heads = heads,
      .dim = dim,
      .gate_dim = gate_dim,
      .x_stride = x.stride(0),
      .gate_stride = gate.stride(0),
      .eps = eps,
      .is_silu = activation == "silu",
      .dtype = dtype,
  };
  if (check.on_cuda()) return output_gate_cuda(params, check.stream());
  ReleaseGil release(rows * heads * dim > (256 << 10));
  output_gate_cpu(params);
}

void embedding(const TensorView& token_ids, const TensorView& weight, const TensorView& out) {
  Checker check("embedding");
  Dim rows{"rows"}, vocab{"vocab"}, width{"width"};
  check.tensor("token_ids", token_ids, {DType::kInt32}, {&rows});
  check.tensor(
      "weight", weight, {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {&vocab, &width});
  check.tensor("out", out, {weight.dtype()}, {&rows, &width});
  if (rows == 0 || width == 0) return;
  EmbeddingParams params{
      .token_ids = token_ids.data<int32_t>(),
      .weight = weight.raw(),
      .out = out.raw(),
      .rows = rows,
      .vocab = vocab,
      .row_bytes = width * dtype_bytes(weight.dtype()),
      .error = check.error_flag(),
  };
  if (check.on_cuda()) return embedding_cuda(params, check.stream());
  for (int64_t row = 0; row < rows; ++row) check.refuse(find_fault(params, row));
  ReleaseGil release(rows * params.row_bytes > (512 << 10));
  embedding_cpu(params);
}

void mtp_input(Argument rows_given,
               Argument tokens_given,
               const TensorView& embedding,
               const TensorView& embedding_norm,
               const TensorView& hidden_norm,
               const TensorView& hidden,
               const TensorView& kept,
               Argument eps_given,
               Argument ahead_given,
               Argument hidden_first,
               Argument mask_first_position,
               const TensorView& out) {
  Checker check("mtp_input");
  Dim rows{"rows"}, batch{"batch"}, num_slots{"num_slots"}, max_len{"max_len"}, capacity{"k"};
  Dim vocab{"vocab"}, width{"width"}, twice{"2 * width"}, hidden_rows{"hidden rows"};
  Dim window{"window"};
  auto [row_to_request, positions, source_rows] = check.fields<3>("rows", "ModuleRows", rows_given);
  check.tensor("rows.row_to_request", row_to_request, {DType::kInt32}, {&rows});
  check.tensor("rows.positions", positions, {DType::kInt32}, {&rows});
  check.tensor("rows.source_rows", source_rows, {DType::kInt32}, {&rows});
  auto [slots, token_ids, lens, draft_token_ids] =
      check.fields<4>("tokens", "TokenTables", tokens_given);
  check.tensor("tokens.slots", slots, {DType::kInt32}, {&batch});
  check.tensor(
      "tokens.token_ids", token_ids, {DType::kInt32}, {&num_slots, &max_len}, Layout::kRows);
  check.tensor("tokens.lens", lens, {DType::kInt32}, {&num_slots});
  check.tensor("tokens.draft_token_ids", draft_token_ids, {DType::kInt32}, {&num_slots, &capacity});
  check.tensor("embedding",
               embedding,
               {DType::kFloat32, DType::kBFloat16, DType::kFloat16},
               {&vocab, &width});
  DType dtype = embedding.dtype();
  check.tensor("embedding_norm", embedding_norm, {dtype}, {&width});
  check.tensor("hidden_norm", hidden_norm, {dtype}, {&width});
  check.tensor("hidden", hidden, {dtype}, {&hidden_rows, &width}, Layout::kRows);
  check.optional("kept", kept, {dtype}, {&num_slots, &window, &width});
  float eps = check.number("eps", eps_given);
  int64_t ahead = check.integer("ahead", ahead_given, 1, 1 << 20);
  bool is_hidden_first = check.flag("hidden_first", hidden_first);
  bool masks_first = check.flag("mask_first_position", mask_first_position);
  twice.value = 2 * width;
  check.tensor("out", out, {dtype}, {&rows, &twice});
  MtpInputParams params{
      .row_to_request = row_to_request.data<int32_t>(),
      .positions = positions.data<int32_t>(),
      .source_rows = source_rows.data<int32_t>(),
      .slots = slots.data<int32_t>(),
      .token_ids = token_ids.data<int32_t>(),
      .lens = lens.data<int32_t>(),
      .draft_token_ids = draft_token_ids.data<int32_t>(),
      .embedding = embedding.raw(),
      .embedding_norm = embedding_norm.raw(),
      .hidden_norm = hidden_norm.raw(),
      .hidden = hidden.raw(),
      .kept = kept.defined() ? kept.raw() : nullptr,
      .out = out.raw(),
      .rows = rows,
      .batch = batch,
      .num_slots = num_slots,
      .max_len = max_len,
      .token_stride = token_ids.stride(0),
      .capacity = capacity,
      .vocab = vocab,
      .width = width,
      .hidden_rows = hidden_rows,
      .hidden_stride = hidden.stride(0),
      .kept_rows = kept.defined() ? num_slots * window : 0,
      .ahead = static_cast<int32_t>(ahead),
      .eps = eps,
      .hidden_first = is_hidden_first,
      .mask_first_position = masks_first,
      .dtype = dtype,
      .error = check.error_flag(),
  };
  if (rows == 0 || width == 0) return;
  if (check.on_cuda()) return mtp_input_cuda(params, check.stream());
  for (int64_t row = 0; row < rows; ++row) check.refuse(find_fault(params, row));
  ReleaseGil release(rows * width > (128 << 10));
  mtp_input_cpu(params);
}

}  // namespace

void register_dense(pybind11::module_& m) {
  register_faults<1000>();
  m.def("silu_mul", &gated_mul<Activation::kSilu>);
  m.def("gelu_tanh_mul", &gated_mul<Activation::kGeluTanh>);
  m.def("swiglu_oai_mul", &gated_mul<Activation::kSwigluOai>);
  m.def("packed_weight_layout", &packed_weight_layout);
  m.def("pack_weight", &pack_weight);
  m.def("linear_kernels", &linear_kernels);
  m.def("set_linear_kernel", &set_linear_kernel);
  m.def("linear", &linear);
  m.def("rms_norm", &rms_norm);
  m.def("output_gate", &output_gate);
  m.def("embedding", &embedding);
  m.def("mtp_input", &mtp_input);
}

}  // namespace specops
