// SPDX-License-Identifier: Apache-2.0
// An array that grows without long pauses. A small array is reallocated. A large one is mapped with
// spare address space, of which only the pages in use cost memory.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>

namespace specops {

template <typename T>
class GrowArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  GrowArray() = default;
  ~GrowArray() {
    if (reserved_ > 0) {
      munmap(data_, static_cast<size_t>(reserved_));
    } else {
      std::free(data_);
    }
  }
  GrowArray(const GrowArray&) = delete;
  GrowArray& operator=(const GrowArray&) = delete;

  T& operator[](int64_t index) { return data_[index]; }
  const T& operator[](int64_t index) const { return data_[index]; }
  T* data() { return data_; }
  const T* data() const { return data_; }
  int64_t size() const { return size_; }

  // Resizes the array; new elements are not initialized.
  void resize(int64_t size) {
    if (size > capacity_) {
      grow(size);
    }
    size_ = size;
    if (size > touched_) {
      touched_ = size;
    }
  }
  void push_back(const T& value) {
    resize(size_ + 1);
    data_[size_ - 1] = value;
  }
  void clear() { size_ = 0; }

  int64_t num_bytes() const {
    if (reserved_ == 0) {
      return capacity_ * static_cast<int64_t>(sizeof(T));
    }
    return round_up(touched_ * static_cast<int64_t>(sizeof(T)), kPageBytes);
  }

 private:
  static constexpr int64_t kPageBytes = 4096;
  static constexpr int64_t kMapBytes = 64 * 1024;  // arrays of at least this size are mapped
  // Smallest address space to reserve: reserving is free, but moving a mapping is not.
  static constexpr int64_t kReserveBytes = 256 * 1024 * 1024;
  static constexpr int64_t kSpare = 16;  // bytes reserved per byte in use

  static int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

  void grow(int64_t size) {
    constexpr int64_t item_bytes = static_cast<int64_t>(sizeof(T));
    const int64_t wanted = size * item_bytes;
    if (wanted < kMapBytes) {
      int64_t capacity = capacity_ < 8 ? 8 : capacity_ + capacity_ / 2;
      capacity = capacity < size ? size : capacity;
      void* data = std::realloc(data_, static_cast<size_t>(capacity * item_bytes));
      if (data == nullptr) {
        throw std::bad_alloc();
      }
      data_ = static_cast<T*>(data);
      capacity_ = capacity;
      return;
    }
    // If the system refuses, reserve less.
    const int64_t most = wanted * kSpare < kReserveBytes ? kReserveBytes : wanted * kSpare;
    for (int64_t reserve = most; reserve >= wanted; reserve /= 2) {
      if (map(round_up(reserve, kPageBytes))) {
        return;
      }
    }
    throw std::bad_alloc();
  }

  // Grows the mapping. Only Linux can move pages; on other systems the bytes in use are copied.
  void* remap(int64_t num_bytes) {
#ifdef __linux__
    return mremap(
        data_, static_cast<size_t>(reserved_), static_cast<size_t>(num_bytes), MREMAP_MAYMOVE);
#else
    void* data = reserve(num_bytes);
    if (data != MAP_FAILED) {
      std::memcpy(data, data_, static_cast<size_t>(size_) * sizeof(T));
      munmap(data_, static_cast<size_t>(reserved_));
      touched_ = size_;
    }
    return data;
#endif
  }

  static void* reserve(int64_t num_bytes) {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    return mmap(nullptr, static_cast<size_t>(num_bytes), PROT_READ | PROT_WRITE, kFlags, -1, 0);
  }

  bool map(int64_t num_bytes) {
    void* data = reserved_ > 0 ? remap(num_bytes) : reserve(num_bytes);
    if (data == MAP_FAILED) {
      return false;
    }
    if (reserved_ == 0) {
      for (int64_t i = 0; i < size_; ++i) {
        static_cast<T*>(data)[i] = data_[i];
      }
      std::free(data_);
      touched_ = size_;
    }
    data_ = static_cast<T*>(data);
    reserved_ = num_bytes;
    capacity_ = num_bytes / static_cast<int64_t>(sizeof(T));
    return true;
  }

  T* data_ = nullptr;
  int64_t size_ = 0;
  int64_t capacity_ = 0;
  int64_t touched_ = 0;   // largest number of bytes ever used
  int64_t reserved_ = 0;  // mapped bytes; 0: data_ is from malloc
};

}  // namespace specops
