// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

namespace specops {
void register_linear_attention(pybind11::module_& m);
}
