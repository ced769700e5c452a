// SPDX-License-Identifier: Apache-2.0
// Rows as integer weights meet them: groups of inputs, each of integers and a scale.
//
// Of 16 bits: groups of 128 inputs. The scale is the power of two by which the largest input of the group lies in [2^14, 2^15). So it
// costs no rounding: of bfloat16, inputs of at least 1/128 of the largest are exact, of float16 1/16.
// Others are off by at most half a scale, 2^-15 of the largest. Integers are rounded to nearest, ties
// to even, and kept within 16 bits (which only a float32 can meet).
// Inputs below 2^-126 count as zeros.
//
// Of 8 bits: groups of 32. With peak the largest magnitude of the group, integers are
// x * (127 / peak), rounded to nearest, ties to even, and the scale is peak / 127: each division and
// product is rounded to float32. A group whose peak is below 2^-100 counts as zeros.
//
// Either: a group with an infinity or a NaN has NaN for its scale, and zeros.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace specops {

constexpr int kIntegerGroup = 128;  // of 16 bits
constexpr int kInt8Group = 32;      // of 8 bits
constexpr float kLeastInt8Peak = 0x1p-100f;

SPECOPS_HOST_DEVICE int64_t integer_groups(int64_t num_inputs) {
  return (num_inputs + kIntegerGroup - 1) / kIntegerGroup;
}

// As bits of floats.
struct GroupScale {
  uint32_t scale;
  uint32_t inverse;
  bool is_finite;
};

// Of a group, by the bits of its largest magnitude.
SPECOPS_HOST_DEVICE GroupScale group_scale(uint32_t peak) {
  uint32_t exponent = peak >> 23;
  if (exponent == 255) return {0x7fc00000u, 0, false};
  if (exponent < 16) exponent = 16;  // or the scale or its inverse were no normal number
  return {(exponent - 14) << 23, (268 - exponent) << 23, true};
}

}  // namespace specops
