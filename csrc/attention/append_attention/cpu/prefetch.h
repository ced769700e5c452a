// SPDX-License-Identifier: Apache-2.0
// What the arithmetic of append_attention on the CPU asks memory for while it runs: the leaf of an
// 8-bit cache that comes next.
#pragma once

#include <cstdint>

#include "attention/append_attention/cpu/plan.h"

namespace specops::SPECOPS_ISA {
namespace {

// The lines of a leaf's blocks of K and V.
struct LeafLines {
  static constexpr int64_t kLine = 64;
  const char* blocks[2 * kLeafTokens / kPageBlock];  // where each begins
  int num_blocks = 0;
  int pieces = 0;               // of a block
  int64_t step = 0, bytes = 0;  // from a piece to the next; of a piece
};

// How far they have been asked for, a line of every block in turn. Asked for all at once they would
// fill the miss buffers, and the arithmetic would wait for them.
class LeafPrefetch {
 public:
  // The leaf that begins at token `base` is to be asked for at `places` places.
  void begin(const LeafLines& lines, int64_t base, int64_t places) {
    lines_ = lines;
    base_ = base;
    block_ = 0;
    at_ = piece_ = 0;
    left_ = lines.num_blocks * lines.pieces * lines.bytes / LeafLines::kLine;
    lines_a_place_ = (left_ + places - 1) / places;
  }
  // Nothing is to be asked for.
  void clear() {
    left_ = 0;
    base_ = -1;
  }
  bool is_of(int64_t base) const { return base_ == base; }

  // The next lines. Called all over the arithmetic of a leaf, at about the places that
  // prefetch_places counts.
  void issue() {
    if (left_ == 0) return;
    int64_t count = left_ < lines_a_place_ ? left_ : lines_a_place_;
    left_ -= count;
    take(count, [](const char* line) { __builtin_prefetch(line); });
  }

  // Waits for the lines that are not asked for yet.
  void load_rest() {
    take(left_, [](const char* line) { (void)*static_cast<const volatile char*>(line); });
    left_ = 0;
  }

 private:
  // So many lines, of one block after the other.
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
  int64_t base_ = -1;  // the leaf's first token
  int64_t left_ = 0, lines_a_place_ = 0;
  // What comes next: the block, where its piece begins, where in this the line does.
  int block_ = 0;
  int64_t piece_ = 0, at_ = 0;
};

}  // namespace
}  // namespace specops::SPECOPS_ISA
