// SPDX-License-Identifier: Apache-2.0
// Gated activations: activation(gate) * up, of a weight's outputs or of a row's two halves.
//
// All are gate / (1 + e^-t) * up. t is the gate for silu. For gelu_tanh, which is
// gate * (1 + tanh(z)) / 2 with z = sqrt(2 / pi) * (gate + 0.044715 * gate^3), it is 2 * z: the same
// number, since (1 + tanh(z)) / 2 = 1 / (1 + e^(-2 z)), without the cancellation of 1 + tanh(z).
// swiglu_oai is gpt-oss's: gates are at most 7 and ups from -7 to 7, which stay NaN if they are; 1 is
// added to the up, and t is 1.702 * gate.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace specops {

enum class Activation : int32_t { kNone, kSilu, kGeluTanh, kSwigluOai };

SPECOPS_HOST_DEVICE constexpr bool is_gated(Activation activation) {
  return activation != Activation::kNone;
}

// Of t as gate * (kGeluLinear + kGeluCubic * gate^2).
constexpr float kGeluLinear = 1.5957691216f;   // 2 * sqrt(2 / pi)
constexpr float kGeluCubic = 0.071354816273f;  // 0.044715 times that

constexpr float kSwigluLimit = 7.0f;
constexpr float kSwigluAlpha = 1.702f;

}  // namespace specops
