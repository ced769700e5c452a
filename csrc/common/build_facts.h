// SPDX-License-Identifier: Apache-2.0
// Source digest and compiler of this build. Two builds that report the same digest and compiler
// compute the same bits.
#pragma once

namespace specops {

const char* source_digest();  // digest of all files in csrc that the ops are built from
const char* compiler();       // name and version

}  // namespace specops
