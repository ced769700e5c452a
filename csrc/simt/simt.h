// SPDX-License-Identifier: Apache-2.0
// Replacement for the CUDA toolkit, included by common/device.cuh: g++ compiles the unchanged
// kernel files with it, and they run on CPU tensors. For tests only. See docs/simt.md.
#pragma once

#include "simt/builtins.h"
#include "simt/machine.h"
#include "simt/types.h"
