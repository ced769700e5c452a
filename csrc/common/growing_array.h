// SPDX-License-Identifier: Apache-2.0
// Memory that a thread reuses across calls, grown as needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace specops::SPECOPS_ISA {
namespace {

template <typename T>
struct GrowingArray {
  T* data = nullptr;
  int64_t capacity = 0;

  ~GrowingArray() { std::free(data); }

  // Returns memory for `size` elements. The contents are lost if the memory has to grow.
  T* reserve(int64_t size) {
    if (size > capacity) {
      std::free(data);
      size_t num_bytes = (size * sizeof(T) + 63) / 64 * 64;
      data = static_cast<T*>(std::aligned_alloc(64, num_bytes));
      capacity = size;
    }
    return data;
  }
};

}  // namespace
}  // namespace specops::SPECOPS_ISA
