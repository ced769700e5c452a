// SPDX-License-Identifier: Apache-2.0
#include "attention/append_attention/cpu/run.h"

namespace specops::SPECOPS_ISA {

void append_attention_f16_cpu(const AppendAttentionParams& params) { run_dtype<float16>(params); }

}  // namespace specops::SPECOPS_ISA
