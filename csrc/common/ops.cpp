// SPDX-License-Identifier: Apache-2.0
// Settings of threads, instruction sets and launches, and reporting of CUDA kernel errors to
// Python.
#include "common/ops.h"

#include <string>

#include "common/build_facts.h"
#include "common/cuda_stream.h"
#include "common/error_flag.h"
#include "common/error_sentence.h"
#include "common/isa.h"
#include "common/parallel.h"
#include "common/tensor_view.h"

namespace specops {
namespace {

void set_threads(Argument num_threads) {
  Checker check("set_num_threads");
  int64_t count = check.integer("num_threads", num_threads, 1, kMaxThreads);
  pybind11::gil_scoped_release release;
  set_num_threads(static_cast<int>(count));
}

pybind11::list supported_isas() {
  pybind11::list names;
  for (Isa isa : kAllIsas) {
    if (isa_supported(isa)) names.append(isa_name(isa));
  }
  return names;
}

void choose_isa(Argument given) {
  Checker check("set_isa");
  std::string expected = "one of " + std::string(pybind11::str(supported_isas()));
  std::string name = check.text("isa", given, expected);
  for (Isa isa : kAllIsas) {
    if (name == isa_name(isa) && isa_supported(isa)) return set_isa(isa);
  }
  check.fail("isa", expected, "'" + name + "'");
}

void set_kernel_overlap(Argument overlap) {
  kernels_overlap = Checker("set_kernel_overlap").flag("overlap", overlap);
}

void take_error(const TensorView& out) {
  Checker check("take_error");
  Dim one{"1", 1};
  check.tensor("out", out, {DType::kInt32}, {&one});
  TakeErrorParams params{.error = check.error_flag(), .out = out.data<int32_t>()};
  if (check.on_cuda()) return take_error_cuda(params, check.stream());
  *params.out = 0;  // CPU ops throw immediately
}

}  // namespace

void register_runtime(pybind11::module_& m) {
  m.def("set_num_threads", &set_threads);
  m.def("num_threads", &num_threads);
  m.def("supported_isas", &supported_isas);
  m.def("set_isa", &choose_isa);
  m.def("use_vnni", [](bool use) { use_vnni(use); });
  m.def("active_isa", [] { return isa_name(active_isa()); });
  m.attr("source_digest") = source_digest();
  m.attr("compiler") = compiler();
  m.def("set_kernel_overlap", &set_kernel_overlap);
  m.def("kernel_overlap", [] { return kernels_overlap.load(); });
  m.attr("has_cuda") = has_cuda();
  m.attr("no_gradient") = kNoGradient;
  m.def("take_error", &take_error);
  m.def("take_error_sync", [](Argument device) {
    int64_t index = Checker("check_errors").integer("device_index", device, 0, Checker::kMaxInt32);
    return take_error_sync(static_cast<int>(index));
  });
  m.def("error_sentence", [](Argument code) -> pybind11::object {
    constexpr int64_t kMost = Checker::kMaxInt32;
    int64_t number = Checker("error_sentence").integer("code", code, -kMost, kMost);
    std::string sentence = error_sentence(static_cast<int32_t>(number));
    if (sentence.empty()) return pybind11::none();
    return pybind11::str(sentence);
  });
}

}  // namespace specops
