// SPDX-License-Identifier: Apache-2.0
#include "gemm/range_cpu.h"

namespace specops::SPECOPS_ISA {

void gemm_range_f32(const GemmParams& params, const GemmRange& range) {
  range_of_rows<float>(params, range);
}

}  // namespace specops::SPECOPS_ISA
