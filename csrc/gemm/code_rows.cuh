// SPDX-License-Identifier: Apache-2.0
// Rows of x as operand B of mma for quantized weights: rounded as in integer_rows.h and stored in
// shared memory. A thread handles one step (32 inputs) of a row.
#pragma once

#include "common/chunk.cuh"
#include "gemm/codes.cuh"
#include "gemm/gemm.h"
#include "gemm/integer_rows.h"

namespace specops {

// 32 inputs in their memory format; 16-bit types use half of the vectors.
struct RawInputs {
  uint4 vectors[8];
};

template <typename T>
__device__ inline void load_row(RawInputs& raw, const T* row, int first, int last, bool aligned) {
  constexpr int kVectors = 32 / kChunk<T>;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    int at = first + i * kChunk<T>;
    raw.vectors[i] = make_uint4(0, 0, 0, 0);
    if (row != nullptr && at < last) raw.vectors[i] = load_chunk(row + at, last - at, aligned);
  }
}

// Loads inputs in the order of the weight's columns (input_order). An index outside x is reported
// as an error and gives zero.
template <typename T>
__device__ inline void gather_row(
    RawInputs& raw, const T* row, int first, const WeightParams& weight, ErrorFlag error) {
  constexpr int kWord = 4 / static_cast<int>(sizeof(T));
  auto* words = reinterpret_cast<uint32_t*>(raw.vectors);
  int num_inputs = static_cast<int>(weight.num_inputs);
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    if (i % kWord == 0) words[i / kWord] = 0;
    if (row == nullptr || first + i >= num_inputs) continue;
    int input = weight.input_order[first + i];
    if (input < 0 || input >= num_inputs) {
      report_error(error, kLinearInputOrder);
      continue;
    }
    if constexpr (sizeof(T) == 4) {
      words[i] = __float_as_uint(row[input]);
    } else {
      words[i / 2] |= uint32_t{row[input].bits} << (16 * (i % 2));
    }
  }
}

// Loads 32 inputs of a row of dtype params.dtype; zeros if `row` is nullptr.
__device__ inline void load_raw(RawInputs& raw,
                                const GemmParams& params,
                                const void* row,
                                int first,
                                bool aligned,
                                ErrorFlag error) {
  auto load = [&](const auto* own) {
    if (params.weight.input_order != nullptr) {
      gather_row(raw, own, first, params.weight, error);
    } else {
      load_row(raw, own, first, static_cast<int>(params.weight.num_inputs), aligned);
    }
  };
  if (params.dtype == DType::kFloat32) return load(static_cast<const float*>(row));
  load(static_cast<const bfloat16*>(row));  // float16 too: only bits are copied
}

template <typename T>
__device__ inline void unpack_raw(float (&values)[32], const RawInputs& raw) {
#pragma unroll
  for (int i = 0; i < 32 / kChunk<T>; ++i) {
    float chunk[kChunk<T>];
    unpack_chunk<T>(chunk, raw.vectors[i]);
#pragma unroll
    for (int j = 0; j < kChunk<T>; ++j) values[i * kChunk<T> + j] = chunk[j];
  }
}

__device__ inline void unpack_raw(float (&values)[32], const RawInputs& raw, DType dtype) {
  if (dtype == DType::kFloat32) return unpack_raw<float>(values, raw);
  if (dtype == DType::kFloat16) return unpack_raw<float16>(values, raw);
  unpack_raw<bfloat16>(values, raw);
}

// Number formats of rows. Each input is stored as kPlanes numbers in separate planes, and rows are
// kRowBytes apart.

// 16-bit integers in two planes: signed high bytes and unsigned low bytes.
struct Int16Numbers {
  static constexpr bool kIsFloat = false;
  static constexpr int kPlanes = 2;
  static constexpr int kRowBytes =
      144;  // 16 more than a stage, so that rows begin in different banks
};

struct Int8Numbers {
  static constexpr bool kIsFloat = false;
  static constexpr int kPlanes = 1;
  static constexpr int kRowBytes = 144;
};

// 16-bit floats are used as they are; a float32 is split into three bfloat16 whose sum it is.
template <typename T>
struct FloatNumbers {
  static constexpr bool kIsFloat = true;
  static constexpr int kPlanes = sizeof(T) == 4 ? 3 : 1;
  static constexpr int kRowBytes = 320;  // 64 more than a stage
  using Element = std::conditional_t<sizeof(T) == 4, bfloat16, T>;
};

// Rounded rows of one stage in shared memory, with their scales and sums.
template <typename Numbers, int kRows>
struct StageRows {
  static constexpr int kPlaneBytes = kRows * Numbers::kRowBytes;
  // The integers are summed per half step, which is the smallest piece.
  static constexpr int kBytes =
      Numbers::kPlanes * kPlaneBytes + (Numbers::kIsFloat ? 0 : 3 * kCodeSteps * kRows * 4);

  unsigned char* base;

  __device__ unsigned char* row(int plane, int row) const {
    return base + plane * kPlaneBytes + row * Numbers::kRowBytes;
  }
  // Returns the scales of a step: [rows].
  __device__ float* scales(int step) const {
    return reinterpret_cast<float*>(base + Numbers::kPlanes * kPlaneBytes) + step * kRows;
  }
  // Returns the sums of the integers of a half step: [rows].
  __device__ int* sums(int half_step) const {
    return reinterpret_cast<int*>(scales(kCodeSteps)) + half_step * kRows;
  }

  // Returns a lane's operand B of a step, for integers: inputs 8 * t to 8 * t + 7 of the row.
  __device__ uint2 operand(int plane, int row_of, int t, int step) const {
    return *reinterpret_cast<const uint2*>(row(plane, row_of) + 32 * t + 8 * step);
  }
  // Returns a lane's operand B of a step, for floats; x and y belong to the first half of the step.
  __device__ uint4 float_operand(int plane, int row_of, int t, int step) const {
    return *reinterpret_cast<const uint4*>(row(plane, row_of) + 64 * step + 16 * t);
  }
};

// A float near 1.5 * 2^23 has no fractional digits. Adding it therefore rounds to an integer, which
// is in the low bits of the sum.
constexpr float kWholeFloat = 12582912.0f;
constexpr uint32_t kWholeBits = 0x4b400000u;

// Returns byte `kByte` of each of four words.
template <int kByte>
__device__ inline uint32_t gather_bytes(const uint32_t* words) {
  constexpr uint32_t kPick = 0x0040u + 0x0011u * kByte;
  uint32_t low = __byte_perm(words[0], words[1], kPick);
  uint32_t high = __byte_perm(words[2], words[3], kPick);
  return __byte_perm(low, high, 0x5410);
}

// Destination of one step of a rounded row in shared memory.
template <typename NumbersOf, int kRows>
struct StageStep {
  using Numbers = NumbersOf;
  const StageRows<Numbers, kRows>& rows;
  int row, step;

  // Stores the integers of a plane that lane t of the operand reads.
  __device__ void store_numbers(int plane, int t, uint2 numbers) const {
    *reinterpret_cast<uint2*>(rows.row(plane, row) + 32 * t + 8 * step) = numbers;
  }
  __device__ void store_scale(float scale) const { rows.scales(step)[row] = scale; }
  // Stores the sums of the integers of both half steps.
  __device__ void store_sums(int low, int high) const {
    rows.sums(2 * step)[row] = low;
    rows.sums(2 * step + 1)[row] = high;
  }
};

// Rounds one step of a row and stores it in `to`: a StageStep or a RoundedStep. Must be called by
// whole warps, whose lanes hold consecutive steps of a row.
template <typename Step>
__device__ inline void store_integers(const Step& to, const float (&values)[32], bool sums) {
  constexpr bool kIsWide = Step::Numbers::kPlanes == 2;
  float peak = 0.0f;
#pragma unroll
  for (int i = 0; i < 32; ++i) peak = ptx::max_nan(peak, fabsf(values[i]));
  float scale, inverse;
  if constexpr (kIsWide) {
    // With 16-bit integers, the four steps of a stage form a group.
    peak = ptx::max_nan(peak, __shfl_xor_sync(kFullMask, peak, 1));
    peak = ptx::max_nan(peak, __shfl_xor_sync(kFullMask, peak, 2));
    GroupScale group = group_scale(__float_as_uint(peak));
    scale = __uint_as_float(group.scale);
    inverse = __uint_as_float(group.inverse);
  } else {
    bool counts = peak >= kLeastInt8Peak;
    scale = counts ? __fdiv_rn(peak, 127.0f) : 0.0f;
    inverse = counts ? __fdiv_rn(127.0f, peak) : 0.0f;
    if (__float_as_uint(peak) >= 0x7f800000u) scale = __uint_as_float(0x7fc00000u);
  }
  // If a group contains an infinity or NaN, its scale is NaN, so the values of the integers do not
  // matter.
  uint32_t codes[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    codes[i] = __float_as_uint(__fadd_rn(__fmul_rn(values[i], inverse), kWholeFloat));
    if constexpr (kIsWide) codes[i] = min(codes[i], kWholeBits + 32767u);
  }
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const uint32_t* own = codes + 8 * t;
    if constexpr (kIsWide) {
      to.store_numbers(0, t, make_uint2(gather_bytes<1>(own), gather_bytes<1>(own + 4)));
    }
    uint2 low = make_uint2(gather_bytes<0>(own), gather_bytes<0>(own + 4));
    to.store_numbers(Step::Numbers::kPlanes - 1, t, low);
  }
  to.store_scale(scale);
  if (!sums) return;
  int halves[2] = {};
#pragma unroll
  for (int i = 0; i < 32; ++i) halves[i / 16] += static_cast<int>(codes[i] - kWholeBits);
  to.store_sums(halves[0], halves[1]);
}

template <typename T, int kRows>
__device__ inline void store_floats(const StageRows<FloatNumbers<T>, kRows>& to,
                                    int row,
                                    int step,
                                    const RawInputs& raw) {
  if constexpr (sizeof(T) == 2) {
    auto* out = reinterpret_cast<uint4*>(to.row(0, row) + 64 * step);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = raw.vectors[i];
  } else {
    float values[32];
    unpack_raw<float>(values, raw);
#pragma unroll
    for (int plane = 0; plane < 3; ++plane) {
      auto* out = reinterpret_cast<uint32_t*>(to.row(plane, row) + 64 * step);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        uint32_t halves[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& value = values[2 * i + j];
          // Truncated instead of rounded, so that the remainder is exact. The remainder of an
          // infinity or NaN is zero.
          bool is_finite = fabsf(value) < __uint_as_float(0x7f800000u);
          uint32_t top = __float_as_uint(value) & 0xffff0000u;
          if (!is_finite) top = ptx::pack2<bfloat16>(value, 0.0f) << 16;
          value = is_finite ? __fsub_rn(value, __uint_as_float(top)) : 0.0f;
          halves[j] = top >> 16;
        }
        out[i] = halves[0] | halves[1] << 16;
      }
    }
  }
}

}  // namespace specops
