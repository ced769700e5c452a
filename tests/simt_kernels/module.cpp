// SPDX-License-Identifier: Apache-2.0
// Python bindings of the launchers in kernels.cu. Tensors are passed as addresses.
#include <pybind11/pybind11.h>

#include "simt/ops.h"
#include "simt_kernels/kernels.h"

namespace specops {
namespace {

template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace
}  // namespace specops

PYBIND11_MODULE(SPECOPS_MODULE, m) {
  using namespace specops;
  register_simt(m);
  m.def("mma", [](const std::string& type, uintptr_t a, uintptr_t b, uintptr_t d) {
    run_mma(type, at<void>(a), at<void>(b), at<float>(d));
  });
  m.def("ldmatrix", [](int tiles, bool trans, uintptr_t rows, uintptr_t out) {
    run_ldmatrix(tiles, trans, at<void>(rows), at<void>(out));
  });
  m.def("strided_ldmatrix",
        [](int stride, uintptr_t out) { run_strided_ldmatrix(stride, at<int>(out)); });
  m.def("shuffle", [](const std::string& kind, int width, uintptr_t in, uintptr_t out) {
    run_shuffle(kind, width, at<int>(in), at<int>(out));
  });
  m.def("votes", [](uintptr_t in, uintptr_t out) { run_votes(at<int>(in), at<unsigned>(out)); });
  m.def("atomics", [](uintptr_t out, int blocks) { run_atomics(at<int>(out), blocks); });
  m.def("order", [](uintptr_t out, int blocks) { run_order(at<int>(out), blocks); });
  m.def("approximate", [](const std::string& kind, uintptr_t in, uintptr_t out, int count) {
    run_approximate(kind, at<float>(in), at<float>(out), count);
  });
  m.def("planted", [](const std::string& name, bool fixed, uintptr_t out) {
    run_planted(name, fixed, at<int>(out));
  });
  m.def("cost", [](const std::string& what, int threads, int repeats, uintptr_t out) {
    run_cost(what, threads, repeats, at<int>(out));
  });
}
