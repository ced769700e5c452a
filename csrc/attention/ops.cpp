// SPDX-License-Identifier: Apache-2.0
// Argument checks and registration of the attention family.
#include "attention/ops.h"

#include "common/tensor_view.h"

namespace specops {

void register_attention(pybind11::module_& m) { (void)m; }

}  // namespace specops
