// SPDX-License-Identifier: Apache-2.0
// Argument checks and registration of the batching family.
#include "batching/ops.h"

#include "common/tensor_view.h"

namespace specops {

void register_batching(pybind11::module_& m) { (void)m; }

}  // namespace specops
