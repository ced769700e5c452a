// SPDX-License-Identifier: Apache-2.0
// The part of a product that one CPU thread computes. linear and moe_linear share it, so it is
// compiled only once for each kind of weight.
#pragma once

#include "gemm/gemm.h"

namespace specops {

// Range of rows and columns. A column is a panel for int8 and int4 weights, and a block for other
// weights.
struct GemmRange {
  int64_t row_begin;
  int64_t row_end;
  int64_t begin;
  int64_t end;
  int64_t next;      // column where the thread probably continues; if none, the number of columns
  uint64_t product;  // from next_product(); equal for all ranges of a product
};

// The instruction set whose float32 kernels this one uses: bf16 instructions do not help float32
// products.
#if defined(SPECOPS_ISA_avx512_bf16)
#define SPECOPS_FLOAT_ISA avx512
#elif defined(SPECOPS_ISA_neon_bf16)
#define SPECOPS_FLOAT_ISA neon
#else
#define SPECOPS_FLOAT_ISA SPECOPS_ISA
#endif

// The extension of this instruction set whose integer products are used if the CPU has them. Only
// gemm_range_integers_cpu.cpp is compiled for it. Packed weights have the same layout.
#if defined(SPECOPS_ISA_avx2)
#define SPECOPS_INTEGER_ISA avx2_vnni
#elif defined(SPECOPS_ISA_avx512) || defined(SPECOPS_ISA_avx512_bf16)
#define SPECOPS_INTEGER_ISA avx512_vnni
#elif defined(SPECOPS_ISA_neon)
#define SPECOPS_INTEGER_ISA neon_dot
#endif

#if defined(SPECOPS_INTEGER_ISA)
namespace SPECOPS_INTEGER_ISA {

// Computes the range of out, for int8 or int4 weights.
void gemm_range_integers(const GemmParams& params, const GemmRange& range);

}  // namespace SPECOPS_INTEGER_ISA
#endif

namespace SPECOPS_FLOAT_ISA {

// Computes a range of out, for float32 rows and plain or fp8 weights.
void gemm_range_f32(const GemmParams& params, const GemmRange& range);

}  // namespace SPECOPS_FLOAT_ISA

namespace SPECOPS_ISA {

// Returns an id for a product that is unique in this process.
uint64_t next_product();

// Compute a range of out: gemm_range for any weight, the others for bf16 rows with plain or fp8
// weights and for int8 or int4 weights. Each has a file of its own, so that none takes long to
// compile.
void gemm_range(const GemmParams& params, const GemmRange& range);
void gemm_range_bf16(const GemmParams& params, const GemmRange& range);
void gemm_range_integers(const GemmParams& params, const GemmRange& range);

}  // namespace SPECOPS_ISA
}  // namespace specops
