// SPDX-License-Identifier: Apache-2.0
// Size of the SMs that device code is compiled for.
#pragma once

namespace specops {

// True if an SM has at least 164 KiB of shared memory; the other SMs have 100 KiB.
#if defined(__CUDA_ARCH__) && \
    (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ == 1200)
constexpr bool kHasLargeSms = false;
#else
constexpr bool kHasLargeSms = true;
#endif

}  // namespace specops
