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

namespace SPECOPS_ISA {

// A number that no other product has.
uint64_t next_product();

// out of these rows and columns.
void gemm_range(const GemmParams& params, const GemmRange& range);

}  // namespace SPECOPS_ISA
}  // namespace specops
