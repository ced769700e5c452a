// SPDX-License-Identifier: Apache-2.0
// The decay of a head's state from row to row, in both ops with one state per head.
#pragma once

#include <cmath>

#include "common/host_device.h"

namespace specops {

constexpr int kStateDimStep = 16;         // both dimensions of a state must be multiples of it
constexpr float kSoftplusLinear = 20.0f;  // above it, softplus(x) is x

SPECOPS_HOST_DEVICE float softplus(float x) { return x > kSoftplusLinear ? x : log1pf(expf(x)); }

// Returns the factor by which a row lets the state decay: exp(-exp(a_log) * step).
SPECOPS_HOST_DEVICE float decay_of(float a_log, float step) { return expf(-(expf(a_log) * step)); }

}  // namespace specops
