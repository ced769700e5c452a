// SPDX-License-Identifier: Apache-2.0
// The children of the root, by token; there may be one for each token of the vocabulary. If a table
// is too small, a larger one is allocated, and every change moves a few slots to it, so that no
// change takes long.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "suffix_tree/child_table.h"

namespace specops {

class RootTable {
 public:
  RootTable() : current_(allocate(kSmallestBits)) {}
  ~RootTable() {
    free(current_);
    free(old_);
  }
  RootTable(const RootTable&) = delete;
  RootTable& operator=(const RootTable&) = delete;

  void clear() {
    leave_old();
    size_ = 0;
    if (current_.bits > kClearedBits) {
      free(current_);
      current_ = allocate(kSmallestBits);
    } else {
      std::memset(current_.slots, 0, num_bytes(current_));
    }
  }

  int32_t find(int32_t token) const {
    const Slot* const slot = find_slot(token);
    return slot == nullptr ? kNone : slot->child;
  }

  void prefetch(int32_t token) const {
    __builtin_prefetch(&current_.slots[first_index(current_, token)]);
  }

  // Replaces the child at a token, which must be present.
  void replace(int32_t token, int32_t child) { const_cast<Slot*>(find_slot(token))->child = child; }

  // Inserts a child at a token, which must be absent.
  void insert(int32_t token, int32_t child) {
    if (old_.slots == nullptr && (size_ + 1) * 4 > capacity(current_) * 3) {
      move_to(current_.bits + 1);
    }
    put(token, child);
    ++size_;
    move_some();
  }

  // Erases the child at a token, which must be present.
  void erase(int32_t token) {
    --size_;
    Slot* const slot = const_cast<Slot*>(find_slot(token));
    if (slot < current_.slots || slot >= current_.slots + capacity(current_)) {
      slot->key = kErased;  // keeps the entries after it reachable
    } else {
      // Moves up the entries that collisions had placed after the erased one.
      const int64_t mask = capacity(current_) - 1;
      int64_t hole = slot - current_.slots;
      for (int64_t i = (hole + 1) & mask; current_.slots[i].key != 0; i = (i + 1) & mask) {
        const int64_t wanted =
            first_index(current_, static_cast<int32_t>(current_.slots[i].key - 1));
        if (((i - wanted) & mask) >= ((i - hole) & mask)) {
          current_.slots[hole] = current_.slots[i];
          hole = i;
        }
      }
      current_.slots[hole].key = 0;
    }
    if (old_.slots == nullptr && current_.bits > kClearedBits && size_ * 8 < capacity(current_)) {
      move_to(current_.bits - 1);
    }
    move_some();
  }

  template <typename Function>
  void for_each(Function&& function) const {
    for (int64_t i = 0; i < capacity(current_); ++i) {
      if (current_.slots[i].key != 0) {
        function(static_cast<int32_t>(current_.slots[i].key - 1), current_.slots[i].child);
      }
    }
    for (int64_t i = num_left_; old_.slots != nullptr && i < capacity(old_); ++i) {
      if (old_.slots[i].key != 0 && old_.slots[i].key != kErased) {
        function(static_cast<int32_t>(old_.slots[i].key - 1), old_.slots[i].child);
      }
    }
  }

  int64_t size() const { return size_; }
  int64_t num_bytes() const {
    return static_cast<int64_t>(num_bytes(current_) + (old_.slots ? num_bytes(old_) : 0));
  }

 private:
  struct Slot {
    uint32_t key;  // token + 1; 0: empty
    int32_t child;
  };
  struct Table {
    Slot* slots = nullptr;
    int bits = 0;
  };

  static constexpr uint32_t kErased = 0xFFFFFFFFu;
  static constexpr int kSmallestBits = 4;
  static constexpr int kClearedBits = 11;  // a larger table is freed rather than cleared
  static constexpr int kMapBits = 13;      // a larger table is mapped: zeroed for free
  static constexpr int64_t kMoveAtOnce = 8;

  static int64_t capacity(const Table& table) { return int64_t{1} << table.bits; }
  static size_t num_bytes(const Table& table) { return sizeof(Slot) << table.bits; }
  static int64_t first_index(const Table& table, int32_t token) {
    return (static_cast<uint32_t>(token) * 0x9E3779B1u) >> (32 - table.bits);
  }

  static Table allocate(int bits) {
    Table table{nullptr, bits};
    void* data;
    if (bits < kMapBits) {
      data = std::calloc(1, num_bytes(table));
    } else {
      data = mmap(
          nullptr, num_bytes(table), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      data = data == MAP_FAILED ? nullptr : data;
    }
    if (data == nullptr) {
      throw std::bad_alloc();
    }
    table.slots = static_cast<Slot*>(data);
    return table;
  }

  static void free(const Table& table) {
    if (table.bits < kMapBits) {
      std::free(table.slots);
    } else {
      munmap(table.slots, num_bytes(table));
    }
  }

  static const Slot* find_slot(const Table& table, int32_t token) {
    const uint32_t key = static_cast<uint32_t>(token) + 1;
    const int64_t mask = capacity(table) - 1;
    for (int64_t i = first_index(table, token);; i = (i + 1) & mask) {
      if (table.slots[i].key == key) {
        return &table.slots[i];
      }
      if (table.slots[i].key == 0) {
        return nullptr;
      }
    }
  }

  const Slot* find_slot(int32_t token) const {
    const Slot* slot = find_slot(current_, token);
    if (slot == nullptr && old_.slots != nullptr) {
      slot = find_slot(old_, token);
      // Slots that were already moved are ignored, whatever they contain.
      slot = slot != nullptr && slot - old_.slots >= num_left_ ? slot : nullptr;
    }
    return slot;
  }

  void put(int32_t token, int32_t child) {
    const int64_t mask = capacity(current_) - 1;
    int64_t i = first_index(current_, token);
    while (current_.slots[i].key != 0) {
      i = (i + 1) & mask;
    }
    current_.slots[i] = {static_cast<uint32_t>(token) + 1, child};
  }

  void move_to(int bits) {
    const Table next = allocate(bits);
    old_ = std::exchange(current_, next);
    num_left_ = 0;
  }

  void move_some() {
    if (old_.slots == nullptr) {
      return;
    }
    for (int64_t i = 0; i < kMoveAtOnce; ++i, ++num_left_) {
      const Slot& slot = old_.slots[num_left_];
      if (slot.key != 0 && slot.key != kErased) {
        put(static_cast<int32_t>(slot.key - 1), slot.child);
      }
    }
    if (num_left_ == capacity(old_)) {
      leave_old();
    }
  }

  void leave_old() {
    if (old_.slots != nullptr) {
      free(old_);
      old_ = Table{};
    }
    num_left_ = 0;
  }

  Table current_;
  Table old_;             // the table being moved, if any
  int64_t num_left_ = 0;  // slots of old_ already moved
  int64_t size_ = 0;
};

}  // namespace specops
