// SPDX-License-Identifier: Apache-2.0
// What common/device.cuh includes in the place of the CUDA toolkit, so that g++ compiles the kernel
// files as they are and runs them on CPU tensors. For tests only. docs/simt.md says how it works.
#pragma once

#include "simt/builtins.h"
#include "simt/machine.h"
#include "simt/types.h"
