// SPDX-License-Identifier: Apache-2.0
// Elements of 8-bit KV caches. Each (token, head) has head_dim elements and one float32 scale that
// multiplies them all. Compiles as plain C++ and as CUDA.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/host_device.h"

namespace specops {

// Two's complement int8; -128 is never written.
struct KvInt8 {
  static constexpr float kLargest = 127.0f;
  int8_t bits;
};

// float8_e4m3fn: one sign bit, four exponent bits, three mantissa bits. The two NaN patterns are
// never written; to_float reads them as 480 and -480.
struct KvE4M3 {
  static constexpr float kLargest = 448.0f;
  uint8_t bits;
};

// True if a cache of such elements has scales.
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

// Returns the bits of |x|. Their integer order is the order of the values, with NaN above infinity.
SPECOPS_HOST_DEVICE uint32_t magnitude_bits(float x) { return bits_of(x) & 0x7fffffffu; }

SPECOPS_HOST_DEVICE float to_float(KvInt8 x) { return static_cast<float>(x.bits); }

SPECOPS_HOST_DEVICE float to_float(KvE4M3 x) {
  uint32_t magnitude = x.bits & 0x7fu;
  float subnormal = static_cast<float>(magnitude) * 0x1p-9f;
  float value = magnitude < 8 ? subnormal : float_of((magnitude << 20) + (120u << 23));
  return float_of(bits_of(value) | static_cast<uint32_t>(x.bits & 0x80u) << 24);
}

// Rounds to nearest, ties to even. Requires |x| < 127.5.
SPECOPS_HOST_DEVICE KvInt8 round_to(float x, KvInt8) {
  // The sum is so large that its last mantissa bit counts ones, so its low bits are the rounded
  // value.
  return {static_cast<int8_t>(static_cast<uint8_t>(bits_of(x + 0x1.8p23f)))};
}

// Rounds to nearest, ties to even; saturates at 448.
SPECOPS_HOST_DEVICE KvE4M3 round_to(float x, KvE4M3) {
  uint32_t word = magnitude_bits(x);
  // Below 2^-6 the spacing is 2^-9, which is the last mantissa bit of 2^14.
  uint32_t subnormal = bits_of(float_of(word) + 0x1p14f) - (141u << 23);
  uint32_t normal = ((word + 0x7ffffu + (word >> 20 & 1u)) >> 20) - (120u << 3);
  uint32_t magnitude = word < 121u << 23 ? subnormal : normal;
  magnitude = magnitude < 0x7eu ? magnitude : 0x7eu;
  return {static_cast<uint8_t>((bits_of(x) >> 24 & 0x80u) | magnitude)};
}

// Returns the scale that maps the value with these magnitude bits, the largest of a head, to the
// largest element. The scale is 0 if it would not be a normal float (all elements are then 0), and
// NaN if any value is NaN or infinite, so that the result cannot pass for a valid one.
template <typename Element>
SPECOPS_HOST_DEVICE float scale_of(uint32_t largest) {
  if (largest >= 0x7f800000u) return float_of(0x7fc00000u);
  float scale = float_of(largest) / Element::kLargest;
  return scale < 0x1p-126f ? 0.0f : scale;
}

// Returns x / scale, rounded; 0 if the scale is 0 or NaN.
template <typename Element>
SPECOPS_HOST_DEVICE Element quantized(float x, float scale) {
  float share = scale > 0.0f ? x / scale : 0.0f;
  return round_to(share, Element{});
}

}  // namespace specops
