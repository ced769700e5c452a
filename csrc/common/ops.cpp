// SPDX-License-Identifier: Apache-2.0
// How the faults that CUDA kernels report come to Python.
#include "common/ops.h"

#include "common/error_flag.h"
#include "common/error_sentence.h"
#include "common/tensor_view.h"

namespace specops {
namespace {

void take_error(const TensorView& out) {
  Checker check("take_error");
  Dim one{"1", 1};
  check.tensor("out", out, {DType::kInt32}, {&one});
  TakeErrorParams params{.error = check.error_flag(), .out = out.data<int32_t>()};
  if (check.on_cuda()) return take_error_cuda(params, check.stream());
  *params.out = 0;  // CPU ops raise at once
}

}  // namespace

void register_errors(pybind11::module_& m) {
  m.attr("has_cuda") = has_cuda();
  m.def("take_error", &take_error);
  m.def("take_error_sync", &take_error_sync);
  m.def("error_sentence", [](int32_t code) -> pybind11::object {
    std::string sentence = error_sentence(code);
    if (sentence.empty()) return pybind11::none();
    return pybind11::str(sentence);
  });
}

}  // namespace specops
