// SPDX-License-Identifier: Apache-2.0
// Replacement for the CUDA toolkit, included by common/device.cuh, with which g++ compiles the
// kernel files unchanged and runs them on CPU tensors. For tests only. See docs/simt.md.
#pragma once

#include "simt/builtins.h"
#include "simt/machine.h"
#include "simt/types.h"
