// SPDX-License-Identifier: Apache-2.0
// How the stamped kernel of append_attention on CUDA keeps time: thread 0 of a block notes where a
// phase ends, in shared memory, since whoever waits for an answer of global memory comes late to the
// next barrier. In the kernel that everybody runs nothing of it is compiled.
#pragma once

#include "attention/append_attention.h"
#include "attention/attention_block.cuh"
#include "common/device.cuh"

namespace specops {

// Words of a block's stamps; AttentionPhase says the rest.
constexpr int kStampBegin = 0, kStampEnd = 1;  // ns, by the clock of the whole device
constexpr int kStampCycles = 2;                // of each phase, by the clock of the SM
constexpr int kStampLast = kStampCycles + kAttentionPhases;  // where the phase before ended
static_assert(kStampLast + 1 == kAttentionStampWords);

// A block's stamps while it runs.
struct Stamps {
  uint32_t last;  // where the phase before ended
  uint32_t cycles[kAttentionPhases];
};
static_assert(sizeof(Stamps) <= 32);

template <typename Block>
__device__ __forceinline__ Stamps& stamps_of(const Block& block) {
  return *reinterpret_cast<Stamps*>(block.smem + Block::Shape::kStamps);
}
template <typename Block>
__device__ __forceinline__ int64_t* kept_stamps(const Block& block) {
  return block.params.stamps + int64_t{blockIdx.x} * kAttentionStampWords;
}

template <typename Block>
__device__ __forceinline__ void begin_stamps(const Block& block) {
  if constexpr (Block::kStamped) {
    if (threadIdx.x != 0) return;
    Stamps& stamps = stamps_of(block);
    for (uint32_t& cycles : stamps.cycles) cycles = 0;
    kept_stamps(block)[kStampBegin] = ptx::global_timer();
    stamps.last = static_cast<uint32_t>(ptx::clock());
  }
}

// What has passed since the last stamp was the phase's.
template <typename Block>
__device__ __forceinline__ void stamp(const Block& block, AttentionPhase phase) {
  if constexpr (Block::kStamped) {
    if (threadIdx.x != 0) return;
    Stamps& stamps = stamps_of(block);
    uint32_t now = static_cast<uint32_t>(ptx::clock());
    stamps.cycles[static_cast<int>(phase)] += now - stamps.last;
    stamps.last = now;
  }
}

template <typename Block>
__device__ __forceinline__ void end_stamps(const Block& block) {
  if constexpr (Block::kStamped) {
    stamp(block, AttentionPhase::kUnit);
    if (threadIdx.x != 0) return;
    int64_t* kept = kept_stamps(block);
    const Stamps& stamps = stamps_of(block);
    for (int i = 0; i < kAttentionPhases; ++i) kept[kStampCycles + i] = stamps.cycles[i];
    kept[kStampLast] = stamps.last;
    kept[kStampEnd] = ptx::global_timer();
  }
}

}  // namespace specops
