// SPDX-License-Identifier: Apache-2.0
// Prefetch of the next leaf of an 8-bit cache while append_attention computes on the CPU.
#pragma once

#include <cstdint>

#include "attention/append_attention/cpu/plan.h"

namespace specops::SPECOPS_ISA {
namespace {

// The cache lines that a leaf's blocks of K and V occupy.
struct LeafLines {
  static constexpr int64_t kLine = 64;
  const char* blocks[2 * kLeafTokens / kPageBlock];  // first byte of each block
  int num_blocks = 0;
  int pieces = 0;               // pieces per block
  int64_t step = 0, bytes = 0;  // bytes from one piece to the next; bytes per piece
};

// Progress of a prefetch. It takes one line of each block in turn, a few lines at a time:
// prefetching all lines at once would fill the miss buffers and stall the arithmetic.
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

  // Prefetches the next lines. The arithmetic of a leaf calls this about prefetch_places() times.
  void issue() {
    if (left_ == 0) return;
    int64_t count = left_ < lines_a_place_ ? left_ : lines_a_place_;
    left_ -= count;
    take(count, [](const char* line) { __builtin_prefetch(line); });
  }

  // Loads the lines that have not been prefetched, and waits for them.
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
  // Position of the next line: block, start of the current piece in the block, offset in that
  // piece.
  int block_ = 0;
  int64_t piece_ = 0, at_ = 0;
};

}  // namespace
}  // namespace specops::SPECOPS_ISA
