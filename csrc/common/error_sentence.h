// SPDX-License-Identifier: Apache-2.0
// Error codes and faults in words. Not for kernel files.
#pragma once

#include <cstdint>
#include <string>

#include "common/error_flag.h"

namespace specops {

// "op: argument must be ..., got something else"; empty for kNone or a number that is no code.
std::string error_sentence(int32_t code);

// The same of one value: "op: argument[2] must be ..., got 7".
std::string error_sentence(const Fault& fault);

}  // namespace specops
