// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace specops {
void register_suffix_tree(pybind11::module_& m);
void register_suffix_cache(pybind11::module_& m);  // called by register_suffix_tree
}  // namespace specops
