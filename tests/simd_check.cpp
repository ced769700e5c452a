// SPDX-License-Identifier: Apache-2.0
// Prints the bits of every operation of common/simd.h on difficult numbers, one line each.
// test_arm.py compiles this once per instruction set. Lines that begin with "fused" may differ on
// instruction sets without fused multiply-adds.
#include <cinttypes>
#include <cstdio>

#include "common/simd.h"

namespace {

using namespace specops;
using namespace specops::SPECOPS_ISA;

constexpr int kVectors = 12;

uint32_t bits_of(float x) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  return x == x ? word : 0x7fc00000u;  // one NaN for all
}

float float_of(uint32_t word) {
  float x;
  std::memcpy(&x, &word, 4);
  return x;
}

// Signs of zero, infinities, NaN, subnormal numbers, ties and largest numbers of bfloat16 and
// float16; then random bits; then numbers that suit exp() and products.
void fill(float (*x)[kLanes]) {
  const uint32_t words[] = {0x00000000, 0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0xffc12345,
                            0x00000001, 0x80400000, 0x3f808000, 0x3f818000, 0xbf807fff, 0x7f7fffff,
                            0xff7fffff, 0x7f7f8000, 0x3f801000, 0x3f803000, 0x477fefff, 0x477ff000,
                            0xc7800000, 0x33000000, 0x33000001, 0x33800000, 0x387fc000, 0x38800000,
                            0x387fe000, 0x42b17218, 0x42b16666, 0xc2ae999a, 0xc2ae9999, 0xc2aeac50,
                            0x3f800000, 0xbf800000};
  uint64_t state = 1;
  for (int i = 0; i < kVectors * kLanes; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    uint32_t any = static_cast<uint32_t>(state >> 32);
    float mild = (static_cast<float>(any >> 8) * 0x1p-24f - 0.5f) * 20.0f;
    x[i / kLanes][i % kLanes] = i < 32 ? float_of(words[i]) : i < 96 ? float_of(any) : mild;
  }
}

void print(const char* name, const float* x, int count = kLanes) {
  std::printf("%s", name);
  for (int i = 0; i < count; ++i) std::printf(" %08" PRIx32, bits_of(x[i]));
  std::printf("\n");
}

void print(const char* name, F32x16 x) {
  float lanes[kLanes];
  store(lanes, x);
  print(name, lanes);
}

// Stores floats as 16-bit numbers and loads them again, to print the rounding of store() and the
// values of load().
template <typename T>
void rounded(const char* name, const float* x) {
  T half[kLanes];
  store(half, load(x));
  float back[kLanes];
  for (int i = 0; i < kLanes; ++i) back[i] = to_float(half[i]);
  print(name, back);
  for (int i = 0; i < kLanes; ++i) half[i].bits = static_cast<uint16_t>(bits_of(x[i]) >> 5);
  print(name, load(half));
}

void of_two(const float* x, const float* y, const float* z) {
  F32x16 a = load(x), b = load(y), c = load(z);
  print("add", add(a, b));
  print("sub", sub(a, b));
  print("mul", mul(a, b));
  print("div", div(a, b));
  print("max", max(a, b));
  print("min", min(a, b));
  print("fused fma", fma(a, b, c));
  float one = scalar_fma(x[0], y[0], z[0]);
  print("fused scalar_fma", &one, 1);
}

void of_one(const float* x) {
  rounded<bfloat16>("bfloat16", x);
  rounded<float16>("float16", x);
  float sums[] = {reduce_add(load(x)), reduce_max(load(x))};
  print("reduce", sums, 2);
  print("fused exp", exp(load(x)));
  for (int n = 0; n <= kLanes; n += 5) {
    float back[kLanes] = {};
    print("load_partial", load_partial(x, n, 3.0f));
    store_partial(back, load(x), n);
    print("store_partial", back);
  }
}

// Operations on pairs of bfloat16.
void of_pairs(const float* x, const float* y, const float* z) {
  bfloat16 a[2 * kLanes], b[2 * kLanes];
  for (int i = 0; i < 2 * kLanes; ++i) {
    a[i] = from_float<bfloat16>(x[i]);
    b[i] = from_float<bfloat16>(y[i]);
  }
  print("even_floats", even_floats(load_pairs(a)));
  print("odd_floats", odd_floats(load_pairs(a)));
  print("even of broadcast_pair", even_floats(broadcast_pair(a + 4)));
  print("odd of broadcast_pair", odd_floats(broadcast_pair(a + 4)));
  print("pairs dot_pairs", dot_pairs(load(z), load_pairs(a), load_pairs(b)));
}

}  // namespace

int main() {
  float x[kVectors][kLanes];
  fill(x);
  for (int i = 0; i < kVectors; ++i) {
    of_one(x[i]);
    for (int j = 0; j < kVectors; ++j) of_two(x[i], x[j], x[(i + j) % kVectors]);
  }
  for (int i = 6; i < 9; ++i) of_pairs(x[i], x[i + 1], x[i + 2]);
  print("set1", set1(1.5f));
  print("zero", zero());
}
