// SPDX-License-Identifier: Apache-2.0
// Prefetching the next leaf of an 8-bit cache while the arithmetic of append_attention runs on the
// CPU.
#pragma once

#include <cstdint>

#include "attention/append_attention/cpu/plan.h"

namespace specops::SPECOPS_ISA {
namespace {

// Cache lines of a leaf's blocks of K and V.
struct LeafLines {
  static constexpr int64_t kLine = 64;
  const char* blocks[2 * kLeafTokens / kPageBlock];  // first byte of each block
  int num_blocks = 0;
  int pieces = 0;               // per block
  int64_t step = 0, bytes = 0;  // bytes from one piece to the next; bytes per piece
};

// Progress of the prefetch, which takes a line of each block in turn. Prefetching all lines at once
// would fill the miss buffers and stall the arithmetic.
class LeafPrefetch {
 public:
  // Starts prefetching the leaf at token `base`, spread over `places` calls of issue().
  void begin(const LeafLines& lines, int64_t base, int64_t places) {
    lines_ = lines;
    base_ = base;
    block_ = 0;
    at_ = piece_ = 0;
    left_ = lines.num_blocks * lines.pieces * lines.bytes / LeafLines::kLine;
    lines_a_place_ = (left_ + places - 1) / places;
  }
  // Cancels the prefetch.
  void clear() {
    left_ = 0;
    base_ = -1;
  }
  bool is_of(int64_t base) const { return base_ == base; }

  // Prefetches the next lines. Called throughout the arithmetic of a leaf, at about as many places
  // as prefetch_places returns.
  void issue() {
    if (left_ == 0) return;
    int64_t count = left_ < lines_a_place_ ? left_ : lines_a_place_;
    left_ -= count;
    take(count, [](const char* line) { __builtin_prefetch(line); });
  }

  // Loads the lines that are not prefetched yet, and waits for them.
  void load_rest() {
    take(left_, [](const char* line) { (void)*static_cast<const volatile char*>(line); });
    left_ = 0;
  }

 private:
  // Calls fn for the next `count` lines, taking a line of each block in turn.
  template <typename Fn>
  void take(int64_t count, Fn&& fn) {
    for (; count > 0; --count) {
      fn(lines_.blocks[block_] + piece_ + at_);
      if (++block_ < lines_.num_blocks) continue;
      block_ = 0;
      at_ += LeafLines::kLine;
      if (at_ < lines_.bytes) continue;
      at_ = 0;
      piece_ += lines_.step;
    }
  }

  LeafLines lines_;
  int64_t base_ = -1;  // first token of the leaf
  int64_t left_ = 0, lines_a_place_ = 0;
  // Position of the next line: block, start of the piece in the block, offset in the piece.
  int block_ = 0;
  int64_t piece_ = 0, at_ = 0;
};

}  // namespace
}  // namespace specops::SPECOPS_ISA
