// SPDX-License-Identifier: Apache-2.0
#include "common/isa.h"
#include "gemm/gemm_range.h"
#include "gemm/integer_rows_cpu.h"

namespace specops::SPECOPS_ISA {

namespace {

// Calls the variant with dot products of 8-bit integers if the CPU has them: avx2, avx512 and neon do
// not include them.
void integers(const GemmParams& params, const GemmRange& range) {
#if defined(SPECOPS_ISA_avx512_bf16)
  avx512_vnni::gemm_range_integers(params, range);
#elif defined(SPECOPS_ISA_avx512)
  if (has_vnni(Isa::kAvx512)) return avx512_vnni::gemm_range_integers(params, range);
  gemm_range_integers(params, range);
#elif defined(SPECOPS_ISA_avx2)
  if (has_vnni(Isa::kAvx2)) return avx2_vnni::gemm_range_integers(params, range);
  gemm_range_integers(params, range);
#elif defined(SPECOPS_ISA_neon)
  if (has_vnni(Isa::kNeon)) return neon_dot::gemm_range_integers(params, range);
  gemm_range_integers(params, range);
#else
  gemm_range_integers(params, range);
#endif
}

}  // namespace

uint64_t next_product() { return next_call(); }

// Computes out[row, n] = bias[n] + sum_k x[row, k] * weight[n, k]; if gated, activation(gate) * up.
// Cost:    the weights of the columns once from memory; those of a panel from the cache for every
//          row tile but the first.
// Assumes: weights packed by pack_weight.
// Order:   that of the tiles; ranges and tiles are only a schedule.
// Source:  -
// Threads: none here.
void gemm_range(const GemmParams& params, const GemmRange& range) {
  if (is_in_panels(params.weight.kind)) return integers(params, range);
  if (params.dtype == DType::kBFloat16) return gemm_range_bf16(params, range);
  SPECOPS_FLOAT_ISA::gemm_range_f32(params, range);
}

}  // namespace specops::SPECOPS_ISA
