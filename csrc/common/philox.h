// SPDX-License-Identifier: Apache-2.0
// Philox4x32-10, and the uniform random number of each sampling decision. The number is a function
// of the request's seed and the absolute position of the chosen token, never of the slot, the step
// or the batch. Plain C++ and CUDA.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace specops {

// Kind of decision that a uniform is used for. Different purposes have disjoint random streams.
enum class Purpose : uint32_t { kDraft = 0, kAccept = 1, kResidual = 2, kTarget = 3 };

struct PhiloxBlock {
  uint32_t word[4];
};

// Returns the four random words of a counter. Source: Salmon et al. 2011, "Parallel random numbers:
// as easy as 1, 2, 3".
SPECOPS_HOST_DEVICE PhiloxBlock philox4x32(uint64_t seed, PhiloxBlock counter) {
  uint32_t key0 = static_cast<uint32_t>(seed);
  uint32_t key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    uint64_t product0 = uint64_t{0xD2511F53u} * counter.word[0];
    uint64_t product1 = uint64_t{0xCD9E8D57u} * counter.word[2];
    counter = {{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0,
                static_cast<uint32_t>(product1),
                static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1,
                static_cast<uint32_t>(product0)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// Key of the uniform of one decision of one request.
struct UniformKey {
  uint64_t seed;
  uint32_t position;      // absolute position of the token being chosen
  uint32_t choice_index;  // index of the completion, if a prompt has n completions
  uint32_t sub_index = 0;
  uint32_t anchor = 0;
};

// Returns a uniform in [0, 1) with 24 bits: exact in fp32, and never 1.
SPECOPS_HOST_DEVICE float philox_uniform(const UniformKey& key, Purpose purpose) {
  uint32_t stream = static_cast<uint32_t>(purpose) | key.sub_index << 8;
  PhiloxBlock block = philox4x32(key.seed, {{key.position, stream, key.choice_index, key.anchor}});
  return static_cast<float>(block.word[0] >> 8) * 0x1p-24f;
}

}  // namespace specops
