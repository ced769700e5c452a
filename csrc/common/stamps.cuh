// SPDX-License-Identifier: Apache-2.0
// How a kernel that is built for it keeps time: thread 0 of a block notes where a phase ends, in
// shared memory, since whoever waits for an answer of global memory comes late to the next barrier. In
// the kernels that everybody runs nothing of it is compiled.
#pragma once

#include "common/device.cuh"

namespace specops {

// A block's stamps while it runs, in its shared memory. What is left of them in global memory, kWords:
// begin and end in ns by one clock for all blocks, cycles of the SM in each phase, and the low half
// of its clock at the end.
template <typename Phase, int kPhases>
struct Stamps {
  static constexpr int64_t kWords = 3 + kPhases;
  static constexpr int kBegin = 0, kEnd = 1, kCycles = 2, kLast = kCycles + kPhases;

  uint32_t last;  // where the phase before ended
  uint32_t cycles[kPhases];

  __device__ __forceinline__ static int64_t* kept(int64_t* stamps) {
    return stamps + int64_t{blockIdx.x} * kWords;
  }

  __device__ __forceinline__ void begin(int64_t* stamps) {
    if (threadIdx.x != 0) return;
    for (uint32_t& spent : cycles) spent = 0;
    kept(stamps)[kBegin] = ptx::global_timer();
    last = static_cast<uint32_t>(ptx::clock());
  }

  // What has passed since the last mark was the phase's.
  __device__ __forceinline__ void mark(Phase phase) {
    if (threadIdx.x != 0) return;
    uint32_t now = static_cast<uint32_t>(ptx::clock());
    cycles[static_cast<int>(phase)] += now - last;
    last = now;
  }

  __device__ __forceinline__ void end(int64_t* stamps) {
    if (threadIdx.x != 0) return;
    int64_t* words = kept(stamps);
    for (int i = 0; i < kPhases; ++i) words[kCycles + i] = cycles[i];
    words[kLast] = last;
    words[kEnd] = ptx::global_timer();
  }
};

}  // namespace specops
