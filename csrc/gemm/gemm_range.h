// SPDX-License-Identifier: Apache-2.0
// The part of a product that one CPU thread computes, used by linear and moe_linear. It is compiled
// once for both, for each kind of weight.
#pragma once

#include "gemm/gemm.h"

namespace specops {

// Columns are panels for int8 and int4 weights, and blocks for others.
struct GemmRange {
  int64_t row_begin;
  int64_t row_end;
  int64_t begin;
  int64_t end;
  int64_t next;      // column at which the thread probably continues; number of columns: none
  uint64_t product;  // from next_product; the same for all ranges of a product
};

// Instruction set whose float32 products this one uses: bf16 products add nothing to them.
#if defined(SPECOPS_ISA_avx512_bf16)
#define SPECOPS_FLOAT_ISA avx512
#elif defined(SPECOPS_ISA_neon_bf16)
#define SPECOPS_FLOAT_ISA neon
#else
#define SPECOPS_FLOAT_ISA SPECOPS_ISA
#endif

// Instruction set whose integer products this one uses, where the CPU has them: a variant of one
// file, of the same layout.
#if defined(SPECOPS_ISA_avx2)
#define SPECOPS_INTEGER_ISA avx2_vnni
#elif defined(SPECOPS_ISA_avx512) || defined(SPECOPS_ISA_avx512_bf16)
#define SPECOPS_INTEGER_ISA avx512_vnni
#endif

#if defined(SPECOPS_INTEGER_ISA)
namespace SPECOPS_INTEGER_ISA {

// Computes the range of out, for int8 or int4 weights.
void gemm_range_integers(const GemmParams& params, const GemmRange& range);

}  // namespace SPECOPS_INTEGER_ISA
#endif

namespace SPECOPS_FLOAT_ISA {

// Computes the range of out, for float32 rows and plain or fp8 weights.
void gemm_range_f32(const GemmParams& params, const GemmRange& range);

}  // namespace SPECOPS_FLOAT_ISA

namespace SPECOPS_ISA {

// Returns a process-wide unique id for a product.
uint64_t next_product();

// Compute the range of out: for any weight; for bf16 rows and plain or fp8 weights; for int8 or
// int4 weights. Each has its own file, so that none compiles for long.
void gemm_range(const GemmParams& params, const GemmRange& range);
void gemm_range_bf16(const GemmParams& params, const GemmRange& range);
void gemm_range_integers(const GemmParams& params, const GemmRange& range);

}  // namespace SPECOPS_ISA
}  // namespace specops
