// SPDX-License-Identifier: Apache-2.0
// Argument checks and registration of the sampling family.
#include "sampling/ops.h"

#include "common/tensor_view.h"

namespace specops {

void register_sampling(pybind11::module_& m) { (void)m; }

}  // namespace specops
