// SPDX-License-Identifier: Apache-2.0
// The text of all sequences, in blocks of kBlockTokens tokens; each block belongs to one sequence.
// A position is the index of a block times kBlockTokens plus the offset in the block. The array
// `home` has 4 bytes per position.
//
// The slot after a sequence's last token, if the block has one, holds kEnd.
#pragma once

#include <cstdint>
#include <stdexcept>

#include "suffix_tree/grow_array.h"

namespace specops {

constexpr int32_t kBlockBits = 7;
constexpr int32_t kBlockTokens = 1 << kBlockBits;
constexpr int32_t kEnd = -1;

struct Block {
  // Age of the first position of the block; see TokenBlocks::age.
  int64_t age;
  int32_t owner;  // -1: free
  int32_t next;   // next block of the sequence, or next free block; -1: none
  int32_t prev;
  int32_t unused;
};

class TokenBlocks {
 public:
  // Allocates the block after `prev`; -1: the first block of a sequence.
  int32_t allocate(int32_t owner, int32_t prev, int64_t age) {
    int32_t block = free_block_;
    if (block >= 0) {
      free_block_ = blocks_[block].next;
      --num_free_;
    } else {
      if (blocks_.size() >= kMaxBlocks) {
        throw std::length_error("SuffixTree: more than 2^31 tokens");
      }
      block = static_cast<int32_t>(blocks_.size());
      text_.resize(text_.size() + kBlockTokens);
      home_.resize(home_.size() + kBlockTokens);
      blocks_.push_back(Block{});
    }
    blocks_[block] = Block{age, owner, -1, prev, 0};
    if (prev >= 0) {
      blocks_[prev].next = block;
    }
    return block;
  }

  void free(int32_t block) {
    const int32_t next = blocks_[block].next;
    if (next >= 0) {
      blocks_[next].prev = -1;
    }
    blocks_[block] = Block{0, -1, free_block_, -1, 0};
    free_block_ = block;
    ++num_free_;
  }

  void clear() {
    text_.clear();
    home_.clear();
    blocks_.clear();
    free_block_ = -1;
    num_free_ = 0;
  }

  // Returns the token k positions after `position`; kEnd if the sequence ends there.
  int32_t token(int32_t position, int32_t k) const {
    int32_t offset = (position & (kBlockTokens - 1)) + k;
    if (offset < kBlockTokens) {
      return text_[position + k];
    }
    int32_t block = position >> kBlockBits;
    while (offset >= kBlockTokens) {
      block = blocks_[block].next;
      if (block < 0) {
        return kEnd;
      }
      offset -= kBlockTokens;
    }
    return text_[static_cast<int64_t>(block) * kBlockTokens + offset];
  }

  // Returns whether the text that begins k positions after `position` equals `tokens`.
  bool equals(int32_t position, int32_t k, const int32_t* tokens, int32_t size) const {
    int32_t block = position >> kBlockBits;
    int32_t offset = (position & (kBlockTokens - 1)) + k;
    for (int32_t i = 0; i < size;) {
      while (offset >= kBlockTokens) {
        block = blocks_[block].next;
        if (block < 0) {
          return false;
        }
        offset -= kBlockTokens;
      }
      const int32_t* const text = &text_[static_cast<int64_t>(block) * kBlockTokens];
      for (; i < size && offset < kBlockTokens; ++i, ++offset) {
        if (text[offset] != tokens[i]) {
          return false;
        }
      }
    }
    return true;
  }

  // Copies the text that begins k positions after `position`. It must be long enough.
  void copy(int32_t position, int32_t k, int32_t* tokens, int32_t size) const {
    int32_t block = position >> kBlockBits;
    int32_t offset = (position & (kBlockTokens - 1)) + k;
    for (int32_t i = 0; i < size;) {
      while (offset >= kBlockTokens) {
        block = blocks_[block].next;
        offset -= kBlockTokens;
      }
      const int32_t* const text = &text_[static_cast<int64_t>(block) * kBlockTokens];
      for (; i < size && offset < kBlockTokens; ++i, ++offset) {
        tokens[i] = text[offset];
      }
    }
  }

  // Returns the position k positions after `position`. It must exist.
  int32_t advance(int32_t position, int32_t k) const {
    int32_t block = position >> kBlockBits;
    int32_t offset = (position & (kBlockTokens - 1)) + k;
    while (offset >= kBlockTokens) {
      block = blocks_[block].next;
      offset -= kBlockTokens;
    }
    return block * kBlockTokens + offset;
  }

  // Returns the position after `position`; undefined if the sequence ends there.
  int32_t next(int32_t position) const {
    return (position + 1) % kBlockTokens != 0 ? position + 1
                                              : blocks_[position >> kBlockBits].next * kBlockTokens;
  }

  // Returns a key that orders all positions: by the start of their sequence, then by index in the
  // sequence.
  int64_t age(int32_t position) const {
    return blocks_[position >> kBlockBits].age + (position & (kBlockTokens - 1));
  }
  int32_t index(int32_t position) const {
    return static_cast<int32_t>(age(position) & ((int64_t{1} << kIndexBits) - 1));
  }
  int32_t owner(int32_t position) const { return blocks_[position >> kBlockBits].owner; }

  int64_t num_bytes() const { return text_.num_bytes() + home_.num_bytes() + blocks_.num_bytes(); }
  int64_t num_unused_bytes() const {
    return num_free_ * (kBlockTokens * 8 + static_cast<int64_t>(sizeof(Block)));
  }

  static constexpr int32_t kIndexBits = 31;
  static constexpr int64_t kMaxBlocks = (int64_t{1} << (31 - kBlockBits)) - 1;

  GrowArray<int32_t> text_;
  GrowArray<int32_t> home_;  // see suffix_state.h
  GrowArray<Block> blocks_;
  int32_t free_block_ = -1;
  int64_t num_free_ = 0;
};

}  // namespace specops
