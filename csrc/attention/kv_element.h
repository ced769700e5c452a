// SPDX-License-Identifier: Apache-2.0
// The elements of 8-bit KV caches: a head of a token is head_dim of them and one float32 scale, which
// multiplies them all. Plain C++ and CUDA.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/host_device.h"

namespace specops {

// Two's complement; -128 is never written.
struct KvInt8 {
  static constexpr float kLargest = 127.0f;
  int8_t bits;
};

// A sign, four bits of exponent and three of mantissa: float8_e4m3fn. The two patterns that mean NaN
// elsewhere are never written; here they read as 480 and -480.
struct KvE4M3 {
  static constexpr float kLargest = 448.0f;
  uint8_t bits;
};

// Whether a cache of such elements has scales.
template <typename T>
constexpr bool kIsScaled = false;
template <>
constexpr bool kIsScaled<KvInt8> = true;
template <>
constexpr bool kIsScaled<KvE4M3> = true;

SPECOPS_HOST_DEVICE uint32_t bits_of(float x) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  return word;
}

SPECOPS_HOST_DEVICE float float_of(uint32_t word) {
  float out;
  std::memcpy(&out, &word, 4);
  return out;
}

// The bits of |x|, which are in the order of the values: NaN above infinity above all others.
SPECOPS_HOST_DEVICE uint32_t magnitude_bits(float x) { return bits_of(x) & 0x7fffffffu; }

SPECOPS_HOST_DEVICE float to_float(KvInt8 x) { return static_cast<float>(x.bits); }

SPECOPS_HOST_DEVICE float to_float(KvE4M3 x) {
  uint32_t magnitude = x.bits & 0x7fu;
  float subnormal = static_cast<float>(magnitude) * 0x1p-9f;
  float value = magnitude < 8 ? subnormal : float_of((magnitude << 20) + (120u << 23));
  return float_of(bits_of(value) | static_cast<uint32_t>(x.bits & 0x80u) << 24);
}

// To nearest, ties to even. |x| is below 127.5.
SPECOPS_HOST_DEVICE KvInt8 round_to(float x, KvInt8) {
  // The sum is so large that its last bit counts ones, so the low bits are the rounded number.
  return {static_cast<int8_t>(static_cast<uint8_t>(bits_of(x + 0x1.8p23f)))};
}

// To nearest, ties to even; beyond 448 it is 448.
SPECOPS_HOST_DEVICE KvE4M3 round_to(float x, KvE4M3) {
  uint32_t word = magnitude_bits(x);
  // Below 2^-6 the steps are 2^-9, the last bit of 2^14.
  uint32_t subnormal = bits_of(float_of(word) + 0x1p14f) - (141u << 23);
  uint32_t normal = ((word + 0x7ffffu + (word >> 20 & 1u)) >> 20) - (120u << 3);
  uint32_t magnitude = word < 121u << 23 ? subnormal : normal;
  magnitude = magnitude < 0x7eu ? magnitude : 0x7eu;
  return {static_cast<uint8_t>((bits_of(x) >> 24 & 0x80u) | magnitude)};
}

// The scale of numbers of which the largest has these magnitude bits, so that it becomes the largest
// element: 0 where that is no normal float (all elements are 0 then), NaN where one of the numbers
// is NaN or infinite, so that nobody takes what is left for a result.
template <typename Element>
SPECOPS_HOST_DEVICE float scale_of(uint32_t largest) {
  if (largest >= 0x7f800000u) return float_of(0x7fc00000u);
  float scale = float_of(largest) / Element::kLargest;
  return scale < 0x1p-126f ? 0.0f : scale;
}

// x / scale, rounded; 0 where the scale is 0 or NaN.
template <typename Element>
SPECOPS_HOST_DEVICE Element quantized(float x, float scale) {
  float share = scale > 0.0f ? x / scale : 0.0f;
  return round_to(share, Element{});
}

}  // namespace specops
