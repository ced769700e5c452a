// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace specops {
void register_batching(pybind11::module_& m);
void register_tree_chains(pybind11::module_& m);  // called by register_batching
void register_shared_prefixes(pybind11::module_& m);
}  // namespace specops
