// SPDX-License-Identifier: Apache-2.0
// What the arithmetic of append_attention on the CPU asks memory for while it runs: the leaf that
// comes next.
#pragma once

#include <cstdint>

namespace specops::SPECOPS_ISA {
namespace {

// The lines of a leaf's blocks, in the order in which they lie in memory, and how far they have been
// asked for. A core reads as fast as memory gives only while many lines are under way; asked for
// all at once they would fill its miss buffers, and the arithmetic would wait for them.
struct LeafPrefetch {
  static constexpr int64_t kLine = 64;
  const char* blocks[2 * kLeafTokens / kPageBlock];  // where K and V of each begin
  int num_blocks = 0;
  int pieces;           // of a block
  int64_t step, bytes;  // from a piece to the next; of a piece
  int64_t base = -1;    // the leaf's first token
  int lines = 0;        // at a time
  int block = 0, piece = 0;
  int64_t at = 0;  // within the piece

  void clear() {
    num_blocks = block = lines = 0;
    base = -1;
  }

  // The next lines. Called all over the arithmetic of a leaf, at about the places that
  // prefetch_places counts.
  void issue() {
    for (int64_t left = lines * kLine; left > 0 && block < num_blocks;) {
      left -= take(left, [](const char* line) { __builtin_prefetch(line); });
    }
  }

  // Waits for the lines that are not asked for yet.
  void load_rest() {
    while (block < num_blocks) {
      take(bytes, [](const char* line) { (void)*static_cast<const volatile char*>(line); });
    }
  }

 private:
  // Up to `limit` bytes of the piece at hand; returns how many.
  template <typename Fn>
  int64_t take(int64_t limit, Fn&& fn) {
    const char* from = blocks[block] + piece * step;
    int64_t begin = at, end = at + limit < bytes ? at + limit : bytes;
    for (; at < end; at += kLine) fn(from + at);
    int64_t taken = at - begin;
    if (at >= bytes) {
      at = 0;
      if (++piece == pieces) {
        piece = 0;
        ++block;
      }
    }
    return taken;
  }
};

}  // namespace
}  // namespace specops::SPECOPS_ISA
