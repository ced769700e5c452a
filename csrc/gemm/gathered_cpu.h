// SPDX-License-Identifier: Apache-2.0
// Addresses of input rows.
#pragma once

#include "gemm/gemm.h"

namespace specops::SPECOPS_ISA {
namespace {

template <typename T>
const T* row_at(const GemmParams& params, int64_t row) {
  if (params.row_indices != nullptr) row = params.row_indices[row];
  return static_cast<const T*>(params.x) + row * params.x_stride;
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
