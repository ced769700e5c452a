// SPDX-License-Identifier: Apache-2.0
// Python module specops._C: runtime settings, CUDA kernel error reporting and the ops of each
// family.
#include <pybind11/pybind11.h>

#include "attention/ops.h"
#include "batching/ops.h"
#include "common/ops.h"
#include "dense/ops.h"
#include "linear_attention/ops.h"
#include "moe/ops.h"
#include "sampling/ops.h"
#include "suffix_tree/ops.h"
#if defined(SPECOPS_SIMT)
#include "simt/ops.h"
#endif

namespace specops {

PYBIND11_MODULE(SPECOPS_MODULE, m) {
  register_runtime(m);
  register_batching(m);
  register_attention(m);
  register_dense(m);
  register_linear_attention(m);
  register_moe(m);
  register_sampling(m);
  register_suffix_tree(m);
#if defined(SPECOPS_SIMT)
  register_simt(m);
#endif
}

}  // namespace specops
