// SPDX-License-Identifier: Apache-2.0
// What a thread needs to work on a row. It grows to the largest row the thread has met, and one row
// at a time has it. Included by *_cpu.cpp files only; everything has internal linkage.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "sampling/select_cpu.h"

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

struct LeafStats {
  float max;   // of the leaf's logits
  float raw;   // sum of e^(logit - max)
  float warm;  // sum of e^((logit - max) / temperature)
};

struct Scratch {
  Array<LeafStats> stats;
  Array<LeafStats> untouched_stats;  // of the caller's row, where processors changed a copy
  Array<double> masses;              // of the kept tokens of each leaf
  Array<float> sums;                 // [num_leaves, kThresholds]
  Array<int32_t> segments;           // [num_leaves + 1], where a leaf's tokens begin in the list
  Array<char> row;                   // the copy that processors change
  Candidates candidates;             // a list of the few that matter
  Candidates all;                    // room for a whole row, made when a filter asks for it

  void reserve(int64_t num_leaves) {
    stats.reserve(num_leaves);
    untouched_stats.reserve(num_leaves);
    masses.reserve(num_leaves);
    sums.reserve(num_leaves * kThresholds);
    segments.reserve(num_leaves + 1);
    candidates.reserve(kMaxCandidates);
  }
};
thread_local Scratch tls_scratch;

}  // namespace
}  // namespace specops::SPECOPS_ISA
