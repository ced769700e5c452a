// SPDX-License-Identifier: Apache-2.0
#include "gemm/integer_tile_cpu.h"

namespace specops::SPECOPS_ISA {

void gemm_range_integers(const GemmParams& params, const GemmRange& range) {
  with_codes(params.weight, [&]<typename Codes>() { integer_range<Codes>(params, range); });
}

}  // namespace specops::SPECOPS_ISA
