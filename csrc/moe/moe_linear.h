// SPDX-License-Identifier: Apache-2.0
// moe_linear: multiplies rows with the weights of their experts. All rows of an expert are
// multiplied together.
#pragma once

#include "common/cuda_stream.h"
#include "common/isa.h"
#include "gemm/experts.h"

namespace specops {

SPECOPS_DECLARE_CPU(moe_linear_cpu, ExpertsParams);
SPECOPS_DECLARE_CUDA(moe_linear_cuda, ExpertsParams);

// Variant for quantized weights.
SPECOPS_DECLARE_CUDA(moe_codes_cuda, ExpertsParams);

}  // namespace specops
