// SPDX-License-Identifier: Apache-2.0
// Argument checks and registration of the dense family.
#include "dense/ops.h"

#include "common/tensor_view.h"
#include "dense/silu_mul.h"

namespace specops {
namespace {

void silu_mul(const TensorView& gate_up, const TensorView& out) {
  Checker check("silu_mul");
  Dim rows{"rows"}, width{"width"}, two_width{"2 * width"};
  check.tensor("out", out, {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, {&rows, &width});
  two_width.value = 2 * width;
  check.tensor("gate_up", gate_up, {out.dtype()}, {&rows, &two_width}, Layout::kRows);
  if (rows == 0 || width == 0) return;
  silu_mul_cpu({
      .gate_up = gate_up.raw(),
      .out = out.raw(),
      .rows = rows,
      .width = width,
      .gate_up_stride = gate_up.stride(0),
      .dtype = out.dtype(),
  });
}

}  // namespace

void register_dense(pybind11::module_& m) { m.def("silu_mul", &silu_mul); }

}  // namespace specops
