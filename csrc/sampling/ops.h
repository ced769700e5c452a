// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace specops {

void register_sampling(pybind11::module_& m);

// Each op registers itself in its own file, <op>_ops.cpp.
void register_sample(pybind11::module_& m);
void register_verify(pybind11::module_& m);
void register_top_logprobs(pybind11::module_& m);
void register_commit(pybind11::module_& m);

}  // namespace specops
