// SPDX-License-Identifier: Apache-2.0
// The module specops._C: settings of threads, instruction sets and launches, the faults of CUDA
// kernels, then one call per family.
#include <pybind11/pybind11.h>

#include <string>

#include "attention/ops.h"
#include "batching/ops.h"
#include "common/build_facts.h"
#include "common/cuda_stream.h"
#include "common/isa.h"
#include "common/ops.h"
#include "common/parallel.h"
#include "dense/ops.h"
#include "sampling/ops.h"
#include "suffix_tree/ops.h"
#if defined(SPECOPS_SIMT)
#include "simt/ops.h"
#endif

namespace specops {
namespace {

constexpr Isa kAllIsas[] = {Isa::kPortable,
                            Isa::kAvx2,
                            Isa::kAvx512,
                            Isa::kAvx512Bf16,
                            Isa::kAmx,
                            Isa::kNeon,
                            Isa::kNeonBf16};

void set_threads(int count) {
  if (count < 1 || count > kMaxThreads) {
    throw std::invalid_argument("set_num_threads: num_threads must be at least 1 and at most " +
                                std::to_string(kMaxThreads) + ", got " + std::to_string(count));
  }
  pybind11::gil_scoped_release release;
  set_num_threads(count);
}

pybind11::list supported_isas() {
  pybind11::list names;
  for (Isa isa : kAllIsas) {
    if (isa_supported(isa)) names.append(isa_name(isa));
  }
  return names;
}

void choose_isa(const std::string& name) {
  for (Isa isa : kAllIsas) {
    if (name == isa_name(isa) && isa_supported(isa)) return set_isa(isa);
  }
  throw std::invalid_argument("set_isa: isa must be one of " +
                              std::string(pybind11::str(supported_isas())) + ", got '" + name +
                              "'");
}

}  // namespace

PYBIND11_MODULE(SPECOPS_MODULE, m) {
  m.def("set_num_threads", &set_threads);
  m.def("num_threads", &num_threads);
  m.def("supported_isas", &supported_isas);
  m.def("set_isa", &choose_isa);
  m.attr("source_digest") = source_digest();
  m.attr("compiler") = compiler();
  m.def("active_isa", [] { return isa_name(active_isa()); });
  m.def("set_kernel_overlap", [](bool overlap) { kernels_overlap = overlap; });
  m.def("kernel_overlap", [] { return kernels_overlap.load(); });
  register_errors(m);
  register_batching(m);
  register_attention(m);
  register_dense(m);
  register_sampling(m);
  register_suffix_tree(m);
#if defined(SPECOPS_SIMT)
  register_simt(m);
#endif
}

}  // namespace specops
