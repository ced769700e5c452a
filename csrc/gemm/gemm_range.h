// SPDX-License-Identifier: Apache-2.0
// What one thread computes of a product, on cpu: what linear and moe_linear are made of. It is compiled
// once for both, of every kind of weight.
#pragma once

#include "gemm/gemm.h"

namespace specops {

// Columns are panels of int8 and int4 weights, and blocks of the others.
struct GemmRange {
  int64_t row_begin;
  int64_t row_end;
  int64_t begin;
  int64_t end;
  int64_t next;      // column at which the thread probably goes on; their number: nowhere
  uint64_t product;  // from next_product, the same for all ranges of a product
};

// The set whose products of float32 serve this one: products of bf16 add nothing to them.
#if defined(SPECOPS_ISA_avx512_bf16)
#define SPECOPS_FLOAT_ISA avx512
#elif defined(SPECOPS_ISA_neon_bf16)
#define SPECOPS_FLOAT_ISA neon
#else
#define SPECOPS_FLOAT_ISA SPECOPS_ISA
#endif

namespace SPECOPS_FLOAT_ISA {

// out of these rows and columns, of rows of float32 and plain or fp8 weights.
void gemm_range_f32(const GemmParams& params, const GemmRange& range);

}  // namespace SPECOPS_FLOAT_ISA

namespace SPECOPS_ISA {

// A number that no other product has.
uint64_t next_product();

// out of these rows and columns: of any kind of weight, of rows of bf16 and plain or fp8 weights, and of
// int8 or int4 weights. Each has a file of its own, so that none keeps the compiler for long.
void gemm_range(const GemmParams& params, const GemmRange& range);
void gemm_range_bf16(const GemmParams& params, const GemmRange& range);
void gemm_range_integers(const GemmParams& params, const GemmRange& range);

}  // namespace SPECOPS_ISA
}  // namespace specops
