// SPDX-License-Identifier: Apache-2.0
#include "gemm/range_cpu.h"

namespace specops::SPECOPS_ISA {

void gemm_range_bf16(const GemmParams& params, const GemmRange& range) {
  range_of_rows<bfloat16>(params, range);
}

}  // namespace specops::SPECOPS_ISA
