// SPDX-License-Identifier: Apache-2.0
// Element types of tensor arguments, and their scalar conversions. Plain C++ and CUDA.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/host_device.h"

namespace specops {

enum class DType : int8_t {
  kFloat32,
  kFloat16,
  kBFloat16,
  kFloat8E4M3,
  kInt8,
  kInt32,
  kInt64,
  kUInt8,
  kBool,
  kOther
};

inline const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat8E4M3:
      return "float8_e4m3fn";
    case DType::kInt8:
      return "int8";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kUInt8:
      return "uint8";
    case DType::kBool:
      return "bool";
    default:
      return "another dtype";
  }
}

inline int64_t dtype_bytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kInt64:
      return 8;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    default:
      return 1;
  }
}

// Storage types that hold 16-bit patterns. Conversions are explicit, so that no operator rounds
// implicitly.
struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

SPECOPS_HOST_DEVICE float to_float(float x) { return x; }

SPECOPS_HOST_DEVICE float to_float(bfloat16 x) {
  uint32_t word = static_cast<uint32_t>(x.bits) << 16;
  float out;
  std::memcpy(&out, &word, 4);
  return out;
}

SPECOPS_HOST_DEVICE float to_float(float16 x) {
  uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  uint32_t exponent = (x.bits >> 10) & 0x1fu;
  uint32_t mantissa = x.bits & 0x3ffu;
  uint32_t word;
  if (exponent == 0x1fu) {
    word = sign | 0x7f800000u | (mantissa << 13);
  } else if (exponent != 0) {
    word = sign | ((exponent + 112u) << 23) | (mantissa << 13);
  } else if (mantissa == 0) {
    word = sign;
  } else {
    // subnormal: normalize the mantissa
    exponent = 113;
    while ((mantissa & 0x400u) == 0) {
      mantissa <<= 1;
      --exponent;
    }
    word = sign | (exponent << 23) | ((mantissa & 0x3ffu) << 13);
  }
  float out;
  std::memcpy(&out, &word, 4);
  return out;
}

SPECOPS_HOST_DEVICE bfloat16 round_to(float x, bfloat16) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  if ((word & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((word >> 16) | 0x40u)};
  word += 0x7fffu + ((word >> 16) & 1u);  // round to nearest, ties to even
  return {static_cast<uint16_t>(word >> 16)};
}

SPECOPS_HOST_DEVICE float16 round_to(float x, float16) {
  uint32_t word;
  std::memcpy(&word, &x, 4);
  uint16_t sign = static_cast<uint16_t>((word >> 16) & 0x8000u);
  word &= 0x7fffffffu;
  if (word > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (word >= 0x47800000u) return {static_cast<uint16_t>(sign | 0x7c00u)};
  if (word < 0x38800000u) {
    // The result is subnormal: adding 0.5 leaves the rounded mantissa in the low bits.
    float magnitude;
    std::memcpy(&magnitude, &word, 4);
    magnitude += 0.5f;
    std::memcpy(&word, &magnitude, 4);
    return {static_cast<uint16_t>(sign | static_cast<uint16_t>(word - 0x3f000000u))};
  }
  uint32_t odd = (word >> 13) & 1u;
  word += 0xc8000fffu + odd;  // rebias the exponent and round to nearest, ties to even
  return {static_cast<uint16_t>(sign | static_cast<uint16_t>(word >> 13))};
}

// Rounds to nearest, ties to even; NaN stays NaN.
template <typename T>
SPECOPS_HOST_DEVICE T from_float(float x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else {
    return round_to(x, T{});
  }
}

}  // namespace specops
