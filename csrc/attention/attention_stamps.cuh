// SPDX-License-Identifier: Apache-2.0
// How the stamped kernel of append_attention on CUDA keeps time: thread 0 of a block notes where a
// phase ends. In the kernel that everybody runs nothing of it is compiled.
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

template <typename Block>
__device__ __forceinline__ int64_t* stamps_of(const Block& block) {
  return block.params.stamps + int64_t{blockIdx.x} * kAttentionStampWords;
}

template <typename Block>
__device__ __forceinline__ void begin_stamps(const Block& block) {
  if constexpr (Block::kStamped) {
    if (threadIdx.x != 0) return;
    int64_t* stamps = stamps_of(block);
    for (int i = 0; i < kAttentionPhases; ++i) stamps[kStampCycles + i] = 0;
    stamps[kStampBegin] = ptx::global_timer();
    stamps[kStampLast] = ptx::clock();
  }
}

// What has passed since the last stamp was the phase's.
template <typename Block>
__device__ __forceinline__ void stamp(const Block& block, AttentionPhase phase) {
  if constexpr (Block::kStamped) {
    if (threadIdx.x != 0) return;
    int64_t* stamps = stamps_of(block);
    int64_t now = ptx::clock();
    stamps[kStampCycles + static_cast<int>(phase)] += now - stamps[kStampLast];
    stamps[kStampLast] = now;
  }
}

template <typename Block>
__device__ __forceinline__ void end_stamps(const Block& block) {
  if constexpr (Block::kStamped) {
    stamp(block, AttentionPhase::kUnit);
    if (threadIdx.x == 0) stamps_of(block)[kStampEnd] = ptx::global_timer();
  }
}

}  // namespace specops
