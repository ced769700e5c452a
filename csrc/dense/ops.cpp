// SPDX-License-Identifier: Apache-2.0
// Argument checks and registration of the dense family.
#include "dense/ops.h"

#include <optional>

#include "common/tensor_view.h"
#include "dense/embedding.h"
#include "dense/linear.h"
#include "dense/rms_norm.h"
#include "dense/silu_mul.h"

namespace specops {
namespace {

// Lets other Python threads run while an op takes long enough (about 50 us) for it to pay.
class ReleaseGil {
 public:
  explicit ReleaseGil(bool worth_it) {
    if (worth_it) release_.emplace();
  }

 private:
  std::optional<pybind11::gil_scoped_release> release_;
};

void silu_mul(const TensorView& gate_up, const TensorView& out) {
  Checker check("silu_mul");
  Dim rows{"rows"}, width{"width"}, two_width{"2 * width"};
  check.tensor("out", out, {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {&rows, &width});
  two_width.value = 2 * width;
  check.tensor("gate_up", gate_up, {out.dtype()}, {&rows, &two_width}, Layout::kRows);
  if (rows == 0 || width == 0) return;
  SiluMulParams params{
      .gate_up = gate_up.raw(),
      .out = out.raw(),
      .rows = rows,
      .width = width,
      .gate_up_stride = gate_up.stride(0),
      .dtype = out.dtype(),
  };
  if (check.on_cuda()) return silu_mul_cuda(params, check.stream());
  silu_mul_cpu(params);
}

void pack_weight(const TensorView& weight, const TensorView& packed) {
  Checker check("pack_weight");
  Dim num_outputs{"num_outputs"}, num_inputs{"num_inputs"};
  Dim blocks{"blocks"}, steps{"steps"}, word{"block of one step"};
  check.tensor("weight",
               weight,
               {DType::kBFloat16, DType::kFloat32},
               {&num_outputs, &num_inputs},
               Layout::kRows);
  DType dtype = weight.dtype();
  blocks.value = linear_blocks(num_outputs);
  steps.value = linear_steps(num_inputs, dtype);
  word.value = kLinearBlock * 4 / dtype_bytes(dtype);
  check.tensor("packed", packed, {dtype}, {&blocks, &steps, &word});
  if (num_outputs == 0 || num_inputs == 0) return;
  ReleaseGil release(num_outputs * num_inputs > (256 << 10));
  pack_weight_cpu({
      .weight = weight.raw(),
      .packed = packed.raw(),
      .num_outputs = num_outputs,
      .num_inputs = num_inputs,
      .weight_stride = weight.stride(0),
      .dtype = dtype,
  });
}

void linear(const TensorView& x,
            const TensorView& packed,
            int64_t packed_outputs,
            int64_t packed_inputs,
            const TensorView& bias,
            const TensorView& out) {
  Checker check("linear");
  Dim rows{"rows"}, num_outputs{"num_outputs", packed_outputs};
  Dim num_inputs{"num_inputs", packed_inputs};
  Dim blocks{"blocks"}, steps{"steps"}, word{"block of one step"};
  DType dtype = packed.dtype();
  blocks.value = linear_blocks(num_outputs);
  steps.value = linear_steps(num_inputs, dtype);
  word.value = dtype == DType::kBFloat16 ? 32 : 16;
  check.tensor("weight", packed, {DType::kBFloat16, DType::kFloat32}, {&blocks, &steps, &word});
  check.tensor("x", x, {dtype}, {&rows, &num_inputs}, Layout::kRows);
  check.optional("bias", bias, {dtype}, {&num_outputs});
  if (dtype == DType::kBFloat16) {
    check.tensor("out", out, {DType::kBFloat16, DType::kFloat32}, {&rows, &num_outputs});
  } else {
    check.tensor("out", out, {DType::kFloat32}, {&rows, &num_outputs});
  }
  if (rows == 0 || num_outputs == 0) return;
  // About 1.5 MB of weights are read, or passed over by eight rows, in 50 us.
  ReleaseGil release(blocks * steps * 64 * ((rows + 7) / 8) > (1536 << 10));
  linear_cpu({
      .x = x.raw(),
      .packed = packed.raw(),
      .bias = bias.defined() ? bias.raw() : nullptr,
      .out = out.raw(),
      .rows = rows,
      .num_outputs = num_outputs,
      .num_inputs = num_inputs,
      .x_stride = x.stride(0),
      .dtype = dtype,
      .out_dtype = out.dtype(),
  });
}

void rms_norm(const TensorView& x,
              const TensorView& weight,
              double eps,
              const TensorView& residual,
              const TensorView& out) {
  Checker check("rms_norm");
  Dim rows{"rows"}, width{"width"};
  check.tensor(
      "x", x, {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {&rows, &width}, Layout::kRows);
  DType dtype = x.dtype();
  check.tensor("weight", weight, {dtype}, {&width});
  check.that(eps >= 0.0, "eps", "at least 0", eps);
  check.optional("residual", residual, {dtype}, {&rows, &width});
  check.tensor("out", out, {dtype}, {&rows, &width});
  if (rows == 0 || width == 0) return;
  if (residual.defined() && residual.raw() == out.raw()) {
    check.fail("out", "another tensor than residual", "the same memory");
  }
  ReleaseGil release(rows * width > (256 << 10));
  rms_norm_cpu({
      .x = x.raw(),
      .weight = weight.raw(),
      .residual = residual.defined() ? residual.raw() : nullptr,
      .out = out.raw(),
      .rows = rows,
      .width = width,
      .x_stride = x.stride(0),
      .eps = static_cast<float>(eps),
      .dtype = dtype,
  });
}

void embedding(const TensorView& token_ids, const TensorView& weight, const TensorView& out) {
  Checker check("embedding");
  Dim rows{"rows"}, vocab{"vocab"}, width{"width"};
  check.tensor("token_ids", token_ids, {DType::kInt32}, {&rows});
  check.tensor(
      "weight", weight, {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {&vocab, &width});
  check.tensor("out", out, {weight.dtype()}, {&rows, &width});
  if (rows == 0 || width == 0) return;
  const auto* ids = token_ids.data<int32_t>();
  for (int64_t row = 0; row < rows; ++row) {
    if (ids[row] < 0 || ids[row] >= vocab) {
      check.fail("token_ids[" + std::to_string(row) + "]",
                 "in [0, vocab=" + std::to_string(vocab.value) + ")",
                 std::to_string(ids[row]));
    }
  }
  int64_t row_bytes = width * dtype_bytes(weight.dtype());
  ReleaseGil release(rows * row_bytes > (512 << 10));
  embedding_cpu({
      .token_ids = ids,
      .weight = weight.raw(),
      .out = out.raw(),
      .rows = rows,
      .row_bytes = row_bytes,
  });
}

}  // namespace

void register_dense(pybind11::module_& m) {
  m.def("silu_mul", &silu_mul);
  m.def("pack_weight", &pack_weight);
  m.def("linear", &linear);
  m.def("rms_norm", &rms_norm);
  m.def("embedding", &embedding);
}

}  // namespace specops
