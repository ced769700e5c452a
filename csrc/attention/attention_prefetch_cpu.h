// SPDX-License-Identifier: Apache-2.0
// What the arithmetic of append_attention on the CPU asks memory for while it runs: the leaf that
// comes next.
#pragma once

#include <cstdint>

namespace specops::SPECOPS_ISA {
namespace {

// The lines of a leaf's blocks of K and V.
struct LeafLines {
  static constexpr int64_t kLine = 64;
  const char* blocks[2 * kLeafTokens / kPageBlock];  // where each begins
  int num_blocks = 0;
  int pieces = 1;               // of a block
  int64_t step = 0, bytes = 0;  // from a piece to the next; of a piece
};

// How far they have been asked for, in the order in which they lie in memory. A core reads as fast as
// memory gives only while many lines are under way; asked for all at once they would fill its miss
// buffers, and the arithmetic would wait for them.
class LeafPrefetch {
 public:
  // The leaf that begins at token `base` is to be asked for at `places` places.
  void begin(const LeafLines& lines, int64_t base, int64_t places) {
    lines_ = lines;
    base_ = base;
    block_ = piece_ = 0;
    at_ = 0;
    int64_t bytes = lines.num_blocks * lines.pieces * lines.bytes;
    bytes_a_place_ = (bytes / LeafLines::kLine + places - 1) / places * LeafLines::kLine;
  }
  void clear() {
    lines_.num_blocks = block_ = 0;
    base_ = -1;
  }
  bool is_of(int64_t base) const { return base_ == base; }

  // The next lines. Called all over the arithmetic of a leaf, at about the places that
  // prefetch_places counts.
  void issue() {
    for (int64_t left = bytes_a_place_; left > 0 && block_ < lines_.num_blocks;) {
      left -= take(left, [](const char* line) { __builtin_prefetch(line); });
    }
  }

  // Waits for the lines that are not asked for yet.
  void load_rest() {
    while (block_ < lines_.num_blocks) {
      take(lines_.bytes, [](const char* line) { (void)*static_cast<const volatile char*>(line); });
    }
  }

 private:
  // Up to `limit` bytes of the piece at hand; returns how many.
  template <typename Fn>
  int64_t take(int64_t limit, Fn&& fn) {
    const char* from = lines_.blocks[block_] + piece_ * lines_.step;
    int64_t begin = at_, end = at_ + limit < lines_.bytes ? at_ + limit : lines_.bytes;
    for (; at_ < end; at_ += LeafLines::kLine) fn(from + at_);
    int64_t taken = at_ - begin;
    if (at_ >= lines_.bytes) {
      at_ = 0;
      if (++piece_ == lines_.pieces) {
        piece_ = 0;
        ++block_;
      }
    }
    return taken;
  }

  LeafLines lines_;
  int64_t base_ = -1;  // the leaf's first token
  int64_t bytes_a_place_ = 0;
  int block_ = 0, piece_ = 0;  // what comes next
  int64_t at_ = 0;             // within the piece
};

}  // namespace
}  // namespace specops::SPECOPS_ISA
