// SPDX-License-Identifier: Apache-2.0
// Gated activations: activation(gate) * up, of a weight's outputs or of a row's two halves.
//
// Both are gate / (1 + e^-t) * up. t is the gate for silu. For gelu_tanh, which is
// gate * (1 + tanh(z)) / 2 with z = sqrt(2 / pi) * (gate + 0.044715 * gate^3), it is 2 * z: the same
// number, since (1 + tanh(z)) / 2 = 1 / (1 + e^(-2 z)), without the cancellation of 1 + tanh(z).
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace specops {

enum class Activation : int32_t { kNone, kSilu, kGeluTanh };

SPECOPS_HOST_DEVICE constexpr bool is_gated(Activation activation) {
  return activation != Activation::kNone;
}

// Of t as gate * (kGeluLinear + kGeluCubic * gate^2).
constexpr float kGeluLinear = 1.5957691216f;   // 2 * sqrt(2 / pi)
constexpr float kGeluCubic = 0.071354816273f;  // 0.044715 times that

}  // namespace specops
