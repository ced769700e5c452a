// SPDX-License-Identifier: Apache-2.0
// Gated activations: activation(gate) * up, where gate and up are outputs of a weight or halves of
// a row.
//
// All activations have the form gate / (1 + e^-t) * up.
// - silu: t is the gate.
// - gelu_tanh: gate * (1 + tanh(z)) / 2 with z = sqrt(2 / pi) * (gate + 0.044715 * gate^3). Here t
//   is 2 * z, which gives the same value, because (1 + tanh(z)) / 2 = 1 / (1 + e^(-2 z)), but
//   avoids the cancellation in 1 + tanh(z).
// - swiglu_oai (gpt-oss): the gate is clamped to at most 7 and the up to -7 .. 7 (NaN stays NaN), 1
//   is added to the up, and t is 1.702 * gate.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace specops {

enum class Activation : int32_t { kNone, kSilu, kGeluTanh, kSwigluOai };

SPECOPS_HOST_DEVICE constexpr bool is_gated(Activation activation) {
  return activation != Activation::kNone;
}

// Coefficients of gelu_tanh's t = gate * (kGeluLinear + kGeluCubic * gate^2).
constexpr float kGeluLinear = 1.5957691216f;   // 2 * sqrt(2 / pi)
constexpr float kGeluCubic = 0.071354816273f;  // 0.044715 * kGeluLinear

constexpr float kSwigluLimit = 7.0f;
constexpr float kSwigluAlpha = 1.702f;

}  // namespace specops
