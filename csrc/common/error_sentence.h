// SPDX-License-Identifier: Apache-2.0
// Error codes and faults as sentences. Not for kernel files.
#pragma once

#include <cstdint>
#include <string>

#include "common/error_flag.h"

namespace specops {

// Returns "op: argument must be ..., got something else"; empty for kNone and unknown codes.
std::string error_sentence(int32_t code);

// Returns the same for one value: "op: argument[2] must be ..., got 7".
std::string error_sentence(const Fault& fault);

}  // namespace specops
