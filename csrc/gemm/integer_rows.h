// SPDX-License-Identifier: Apache-2.0
// Rounding of rows to integers, for products with quantized weights. The inputs of a row are
// divided into groups; each group has integers and one scale.
//
// 16 bits: groups of 128 inputs. The scale is the power of two that puts the largest input of the
// group into [2^14, 2^15), so scaling itself does not round. bfloat16 inputs of at least 1/128 of
// the largest are exact, float16 inputs of at least 1/16. Other inputs are off by at most half a
// scale, 2^-15 of the largest. Integers are rounded to nearest, ties to even, and clamped to 16
// bits (which affects only float32). Inputs below 2^-126 count as zeros.
//
// 8 bits: groups of 32 inputs. Let peak be the largest magnitude of the group. The integers are x *
// (127 / peak), rounded to nearest, ties to even, and the scale is peak / 127. Each division and
// product is rounded to float32. A group whose peak is below 2^-100 counts as zeros.
//
// Both formats: a group with an infinity or a NaN has a NaN scale and zeros as integers.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace specops {

constexpr int kIntegerGroup = 128;  // inputs per group, for 16-bit integers
constexpr int kInt8Group = 32;      // inputs per group, for 8-bit integers
constexpr float kLeastInt8Peak = 0x1p-100f;

SPECOPS_HOST_DEVICE int64_t integer_groups(int64_t num_inputs) {
  return (num_inputs + kIntegerGroup - 1) / kIntegerGroup;
}

// A group's scale and the inverse of the scale, as bits of floats.
struct GroupScale {
  uint32_t scale;
  uint32_t inverse;
  bool is_finite;
};

// Returns the scale of a group. `peak` has the bits of its largest magnitude.
SPECOPS_HOST_DEVICE GroupScale group_scale(uint32_t peak) {
  uint32_t exponent = peak >> 23;
  if (exponent == 255) return {0x7fc00000u, 0, false};
  if (exponent < 16) exponent = 16;  // otherwise the scale or its inverse would not be normal
  return {(exponent - 14) << 23, (268 - exponent) << 23, true};
}

}  // namespace specops
