// SPDX-License-Identifier: Apache-2.0
// What a thread needs to work on a row. It grows to the largest row the thread has met, and one row
// at a time has it.
#pragma once

#include <cstdint>

#include "common/growing_array.h"
#include "sampling/row/cpu/leaf.h"
#include "sampling/row/cpu/token_list.h"

namespace specops::SPECOPS_ISA {
namespace {

constexpr int kThresholds = 4;  // masses taken in one pass over a row

struct Scratch {
  GrowingArray<LeafStats> stats;
  GrowingArray<LeafStats> untouched_stats;  // of the caller's row, where processors changed a copy
  GrowingArray<double> masses;              // of the kept tokens of each leaf
  GrowingArray<float> sums;                 // [num_leaves, kThresholds]
  GrowingArray<int32_t> segments;  // [num_leaves + 1], where a leaf's tokens begin in the list
  GrowingArray<char> row;          // the copy that processors change
  TokenList list;                  // a list of the few that matter
  TokenList all;                   // room for a whole row, made when a filter asks for it

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
