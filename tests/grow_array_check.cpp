// SPDX-License-Identifier: Apache-2.0
// A GrowArray keeps its contents from malloc to mapped memory and beyond its reservation.
// test_suffix_programs.py compiles this for Linux and for systems that cannot move pages.
#include <cstdint>
#include <cstdio>
#include <initializer_list>

#include "suffix_tree/grow_array.h"

int main() {
  specops::GrowArray<int64_t> array;
  int64_t size = 0;
  for (int64_t next : {int64_t{100}, int64_t{10'000}, int64_t{40'000'000}, int64_t{700'000'000}}) {
    array.resize(next);
    for (int64_t i = 0; i < size; ++i) {
      if (array[i] == 3 * i + 1) continue;
      std::printf("of %lld items the %lldth is lost\n", (long long)next, (long long)i);
      return 1;
    }
    // Check the first and the last items of large arrays only, so that few pages are in use.
    size = next < 10'000 ? next : 10'000;
    for (int64_t i = 0; i < size; ++i) array[i] = 3 * i + 1;
    array[next - 1] = -1;
    array.resize(size);
    array[size - 1] = 3 * (size - 1) + 1;
  }
  std::printf("%lld bytes\n", (long long)array.num_bytes());
}
