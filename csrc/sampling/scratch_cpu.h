// SPDX-License-Identifier: Apache-2.0
// What a thread needs to work on a row. It grows to the largest row the thread has met, and one row
// at a time has it.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "sampling/leaf_cpu.h"
#include "sampling/token_list_cpu.h"

namespace specops::SPECOPS_ISA {
namespace {

template <typename T>
struct Array {
  T* data = nullptr;
  int64_t capacity = 0;

  ~Array() { std::free(data); }

  // Forgets what it holds where it has to grow.
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

constexpr int kThresholds = 4;  // masses taken in one pass over a row

struct Scratch {
  Array<LeafStats> stats;
  Array<LeafStats> untouched_stats;  // of the caller's row, where processors changed a copy
  Array<double> masses;              // of the kept tokens of each leaf
  Array<float> sums;                 // [num_leaves, kThresholds]
  Array<int32_t> segments;           // [num_leaves + 1], where a leaf's tokens begin in the list
  Array<char> row;                   // the copy that processors change
  TokenList list;                    // a list of the few that matter
  TokenList all;                     // room for a whole row, made when a filter asks for it

  void reserve(int64_t num_leaves) {
    stats.reserve(num_leaves);
    untouched_stats.reserve(num_leaves);
    masses.reserve(num_leaves);
    sums.reserve(num_leaves * kThresholds);
    segments.reserve(num_leaves + 1);
    list.reserve(kListCapacity);
  }
};
thread_local Scratch tls_scratch;

}  // namespace
}  // namespace specops::SPECOPS_ISA
