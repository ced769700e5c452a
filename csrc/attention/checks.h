// SPDX-License-Identifier: Apache-2.0
// Argument checks that the ops of the attention family share.
#pragma once

#include "common/tensor_view.h"

namespace specops {
namespace {

constexpr auto kFloats = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

// Ops with at least this many elements of work take more than about 50 us, so they release the GIL.
constexpr int64_t kGilElements = int64_t{1} << 18;

template <typename Fn>
void launch(int64_t elements, Fn&& fn) {
  if (elements < kGilElements) return fn();
  pybind11::gil_scoped_release release;
  fn();
}

// Checks that CUDA kernels can load `view` in 16-byte vectors: base pointer and row stride.
[[maybe_unused]] void check_aligned(const Checker& check,
                                    const char* name,
                                    const TensorView& view) {
  check.on_16_bytes(name, view);
  if (view.ndim() < 2 || view.size(0) < 2) return;
  int64_t row_bytes = view.stride(0) * dtype_bytes(view.dtype());
  if (row_bytes % 16 == 0) return;
  check.fail(name, "made of rows that lie 16 bytes apart", std::to_string(row_bytes) + " bytes");
}

}  // namespace
}  // namespace specops
