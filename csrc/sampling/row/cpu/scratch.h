// SPDX-License-Identifier: Apache-2.0
// Scratch memory of a thread, which processes one row at a time. It grows to the largest row that
// the thread has processed.
#pragma once

#include <cstdint>

#include "common/growing_array.h"
#include "sampling/row/cpu/leaf.h"
#include "sampling/row/cpu/token_list.h"

namespace specops::SPECOPS_ISA {
namespace {

constexpr int kThresholds = 4;  // number of masses computed in one pass over a row

struct Scratch {
  GrowingArray<LeafStats> stats;
  GrowingArray<LeafStats> untouched_stats;  // of the caller's row, if processors change a copy
  GrowingArray<double> masses;              // mass of the kept tokens of each leaf
  GrowingArray<float> sums;                 // [num_leaves, kThresholds]
  GrowingArray<int32_t> segments;           // [num_leaves + 1], first list entry of each leaf
  GrowingArray<char> row;                   // the copy of the row that processors change
  TokenList list;                           // the few tokens between the thresholds of a selection
  TokenList all;  // capacity for a whole row, allocated when a filter needs it

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
