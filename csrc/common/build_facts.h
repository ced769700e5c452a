// SPDX-License-Identifier: Apache-2.0
// What was compiled, and by what: two builds that say the same compute the same bits.
#pragma once

namespace specops {

const char* source_digest();  // of everything in csrc that ops are made of
const char* compiler();       // its name and version

}  // namespace specops
