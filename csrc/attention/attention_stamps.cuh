// SPDX-License-Identifier: Apache-2.0
// The stamps of the kernel of append_attention on CUDA that keeps time.
#pragma once

#include "attention/append_attention.h"
#include "attention/attention_block.cuh"
#include "common/device.cuh"
#include "common/stamps.cuh"

namespace specops {

using AttentionStamps = Stamps<AttentionPhase, kAttentionPhases>;
static_assert(AttentionStamps::kWords == kAttentionStampWords && sizeof(AttentionStamps) <= 32);

template <typename Block>
__device__ __forceinline__ AttentionStamps& stamps_of(const Block& block) {
  return *reinterpret_cast<AttentionStamps*>(block.smem + Block::Shape::kStamps);
}

template <typename Block>
__device__ __forceinline__ void begin_stamps(const Block& block) {
  if constexpr (Block::kStamped) stamps_of(block).begin(block.params.stamps);
}

// What has passed since the last stamp was the phase's.
template <typename Block>
__device__ __forceinline__ void stamp(const Block& block, AttentionPhase phase) {
  if constexpr (Block::kStamped) stamps_of(block).mark(phase);
}

template <typename Block>
__device__ __forceinline__ void end_stamps(const Block& block) {
  if constexpr (Block::kStamped) {
    stamp(block, AttentionPhase::kUnit);
    stamps_of(block).end(block.params.stamps);
  }
}

}  // namespace specops
