// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace specops {

void register_attention(pybind11::module_& m);

// Ops that are defined in their own files, <op>_ops.cpp.
void register_rope_append_latent(pybind11::module_& m);

}  // namespace specops
