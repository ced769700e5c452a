// SPDX-License-Identifier: Apache-2.0
// What the arithmetic of append_attention on the CPU asks memory for while it runs: the leaf of an
// 8-bit cache that comes next.
#pragma once

#include <cstdint>

#include "attention/attention_plan_cpu.h"

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
    piece_ = 0;
    at_ = 0;
    int64_t rounds = lines.pieces * lines.bytes / LeafLines::kLine;
    rounds_a_place_ = static_cast<int>((rounds + places - 1) / places);
  }
  // Nothing is to be asked for.
  void clear() {
    lines_.pieces = piece_ = 0;
    base_ = -1;
  }
  bool is_of(int64_t base) const { return base_ == base; }

  // The next lines. Called all over the arithmetic of a leaf, at about the places that
  // prefetch_places counts.
  void issue() {
    for (int i = 0; i < rounds_a_place_ && piece_ < lines_.pieces; ++i) {
      take([](const char* line) { __builtin_prefetch(line); });
    }
  }

  // Waits for the lines that are not asked for yet.
  void load_rest() {
    while (piece_ < lines_.pieces) {
      take([](const char* line) { (void)*static_cast<const volatile char*>(line); });
    }
  }

 private:
  // One line of every block.
  template <typename Fn>
  void take(Fn&& fn) {
    for (int block = 0; block < lines_.num_blocks; ++block) {
      fn(lines_.blocks[block] + piece_ * lines_.step + at_);
    }
    at_ += LeafLines::kLine;
    if (at_ < lines_.bytes) return;
    at_ = 0;
    ++piece_;
  }

  LeafLines lines_;
  int64_t base_ = -1;  // the leaf's first token
  int rounds_a_place_ = 0;
  int piece_ = 0;  // what comes next
  int64_t at_ = 0;
};

}  // namespace
}  // namespace specops::SPECOPS_ISA
