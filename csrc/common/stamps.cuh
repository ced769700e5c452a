// SPDX-License-Identifier: Apache-2.0
// Recording of phase times in kernels that are built for it. Thread 0 of a block stores the end of
// each phase in shared memory, because a write to global memory would delay it at the next barrier.
// Production kernels compile none of this.
#pragma once

#include "common/device.cuh"

namespace specops {

// Time stamps of a running block, in its shared memory. At the end, kWords words are written to
// global memory: begin and end in ns on a clock common to all blocks, SM cycles of each phase, and
// the low half of the SM's clock at the end.
template <typename Phase, int kPhases>
struct Stamps {
  static constexpr int64_t kWords = 3 + kPhases;
  static constexpr int kBegin = 0, kEnd = 1, kCycles = 2, kLast = kCycles + kPhases;

  uint32_t last;  // end of the previous phase
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

  // Attributes the time since the last mark to `phase`.
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
