// SPDX-License-Identifier: Apache-2.0
// Quantized weights as operand A of mma. A step is 16 outputs of a tile by 32 inputs. Lane 4 * g +
// t has the inputs 8 * t to 8 * t + 7 of the outputs g and g + 8 of the tile, in the layout of
// weight.h. Per stage of 128 inputs, the lane has kVectors vectors of 16 bytes, which vector_at(i)
// returns. begin() is called once, before the first step is loaded.
#pragma once

#include "common/device.cuh"
#include "gemm/weight.h"

namespace specops {

constexpr int kCodeSteps = 4;  // per stage

struct Int8Codes {
  static constexpr int kVectors = 4;
  static constexpr int kShift = 0;  // the operands are 2^kShift times the values

  __device__ void begin(const WeightParams&) {}

  template <typename VectorAt>
  __device__ void load(uint32_t (&a)[4], const VectorAt& vector_at, int step) const {
    uint4 v = vector_at(step);
    a[0] = v.x;
    a[1] = v.y;
    a[2] = v.z;
    a[3] = v.w;
  }
};

// Returns the two words of a step, one for each output.
template <typename VectorAt>
__device__ inline uint2 load_int4(const VectorAt& vector_at, int step) {
  uint4 v = vector_at(step / 2);
  return step % 2 == 0 ? make_uint2(v.x, v.y) : make_uint2(v.z, v.w);
}

// int4 values without a table: the stored number with its high bit flipped is value - 8 as a signed
// half byte, and is used as the high half of a byte.
struct Int4Codes {
  static constexpr int kVectors = 2;
  static constexpr int kShift = 4;

  __device__ void begin(const WeightParams&) {}

  template <typename VectorAt>
  __device__ void load(uint32_t (&a)[4], const VectorAt& vector_at, int step) const {
    constexpr uint32_t kHigh = 0xf0f0f0f0u;
    uint2 words = load_int4(vector_at, step);
    a[0] = words.x << 4 & kHigh;
    a[1] = words.y << 4 & kHigh;
    a[2] = words.x & kHigh;
    a[3] = words.y & kHigh;
  }
};

struct Int4Table {
  static constexpr int kVectors = 2;
  static constexpr int kShift = 0;
  uint32_t values[4] = {};  // the 16 values that stored numbers stand for, one per byte

  __device__ void begin(const WeightParams& weight) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      auto value = static_cast<uint8_t>(weight.code_values[i ^ 8]);
      values[i / 4] |= uint32_t{value} << (8 * (i % 4));
    }
  }

  // Looks up the values of the four lowest half bytes: once in the first eight values, once in the
  // last eight, then selects.
  __device__ uint32_t look_up(uint32_t halves) const {
    uint32_t at = halves & 0x7777u;
    uint32_t low = __byte_perm(values[0], values[1], at);
    uint32_t high = __byte_perm(values[2], values[3], at);
    return __byte_perm(low, high, (halves >> 1 & 0x4444u) | 0x3210u);
  }

  template <typename VectorAt>
  __device__ void load(uint32_t (&a)[4], const VectorAt& vector_at, int step) const {
    uint2 words = load_int4(vector_at, step);
    const uint32_t both[2] = {words.x, words.y};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t low = look_up(both[i]), high = look_up(both[i] >> 16);
      a[i] = __byte_perm(low, high, 0x6420);
      a[2 + i] = __byte_perm(low, high, 0x7531);
    }
  }
};

// float8_e4m3fn weights, widened to pairs of 16-bit floats for mma.m16n8k16. A step is two such
// instructions.
struct Fp8Codes {
  static constexpr int kVectors = 4;

  __device__ void begin(const WeightParams&) {}

  template <typename VectorAt>
  __device__ void load(uint32_t (&a)[4], const VectorAt& vector_at, int step) const {
    uint4 v = vector_at(step);
    a[0] = v.x;
    a[1] = v.y;
    a[2] = v.z;
    a[3] = v.w;
  }
};

// Widens two fp8 values in the low bytes of the halves of a word. Moving the exponent and mantissa
// bits into place gives 2^-120 times the value in bfloat16, which is multiplied by 2^120 right
// away, or 2^-8 times the value in float16, which fp8_factor corrects at the end. Adding -0
// preserves the sign of a zero.
template <typename T>
__device__ inline uint32_t widen_fp8(uint32_t two) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    constexpr uint32_t kUnit = 0x7b807b80u, kMinusZero = 0x80008000u;
    uint32_t bits = (two & 0x007f007fu) << 4 | (two & 0x00800080u) << 8;
    return ptx::fma_bf16x2(bits, kUnit, kMinusZero);
  } else {
    return (two & 0x007f007fu) << 7 | (two & 0x00800080u) << 8;
  }
}

template <typename T>
constexpr float fp8_factor = std::is_same_v<T, bfloat16> ? 1.0f : 256.0f;

// Returns half `half` of a step as operand A, from the four words that Fp8Codes loaded.
template <typename T>
__device__ inline void widen_half(uint32_t (&a)[4], const uint32_t (&codes)[4], int half) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t word = codes[2 * half + i];
    a[i] = widen_fp8<T>(__byte_perm(word, 0, 0x4140));
    a[2 + i] = widen_fp8<T>(__byte_perm(word, 0, 0x4342));
  }
}

}  // namespace specops
