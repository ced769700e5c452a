// SPDX-License-Identifier: Apache-2.0
// Python module specops_suffix._C: the suffix cache without the ops.
#include "suffix_tree/ops.h"

namespace specops {

PYBIND11_MODULE(_C, m) { register_suffix_cache(m); }

}  // namespace specops
