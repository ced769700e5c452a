// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "common/parallel.h"
#include "common/simd.h"
#include "linear_attention/causal_conv1d.h"

namespace specops::SPECOPS_ISA {
namespace {

constexpr int64_t kPiece = 64;  // channels per item

// Computes the channels [first, last) of all rows of a request.
template <typename T>
void run_piece(const CausalConv1dParams& params, SlotRange range, int64_t first, int64_t last) {
  int64_t channels = params.channels, window = params.of.window, taps = params.taps;
  auto* out = static_cast<T*>(params.out);
  if (range.slot < 0) {
    for (int64_t row = range.first; row < range.end; ++row) {
      std::memset(static_cast<void*>(out + row * channels + first), 0, (last - first) * sizeof(T));
    }
    return;
  }
  const auto* x = static_cast<const T*>(params.x);
  const auto* weight = static_cast<const T*>(params.weight);
  const auto* bias = static_cast<const T*>(params.bias);
  T* kept = static_cast<T*>(params.states) + range.slot * window * channels;
  int64_t count = range.end - range.first;
  auto row_of = [&](int64_t i) { return x + (range.first + i) * params.x_stride; };
  for (int64_t col = first; col < last; col += kLanes) {
    int n = static_cast<int>(last - col < kLanes ? last - col : kLanes);
    F32x16 before = bias == nullptr ? zero() : load_partial(bias + col, n);
    for (int64_t i = 0; i < count; ++i) {
      F32x16 sum = before;
      for (int64_t tap = 0; tap < taps; ++tap) {
        int64_t back = i - (taps - 1 - tap), position = range.begin + back;
        if (position < 0) continue;
        const T* from = back >= 0 ? row_of(back) : kept + position % window * channels;
        F32x16 factor = load_partial(weight + tap * channels + col, n);
        sum = fma(factor, load_partial(from + col, n), sum);
      }
      F32x16 value = div(sum, add(set1(1.0f), exp(sub(zero(), sum))));
      store_partial(out + (range.first + i) * channels + col, value, n);
    }
  }
  // Stored at the end, when the old values are no longer needed.
  for (int64_t i = count > window ? count - window : 0; i < count; ++i) {
    std::memcpy(static_cast<void*>(kept + (range.begin + i) % window * channels + first),
                row_of(i) + first,
                (last - first) * sizeof(T));
  }
}

// Computes out = silu(bias + sum over taps of weight[tap] * x at the tap's distance before the row),
// and stores x in the slot.
// Cost:    `taps` products per element, each x and out moved once; memory-bound.
// Assumes: slots, lengths and rows checked by ops.cpp; no slot appears twice.
// Order:   a chain over the taps from the oldest position on, from the bias or zero, in fp32;
//          positions before the text are skipped. Rounded once.
// Source:  Gu and Dao 2023 (Mamba).
// Threads: one item per 64 channels of a request, so that the same thread reads a slot and replaces
//          it.
template <typename T>
void run(const CausalConv1dParams& params) {
  int64_t pieces = (params.channels + kPiece - 1) / kPiece;
  // A chunk should be worth waking a thread for: about 4096 elements.
  int64_t rows = params.of.rows / (params.of.batch + 1) + 1;
  parallel_for((params.of.batch + 1) * pieces, 64 / rows, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      int64_t first = item % pieces * kPiece;
      int64_t last = first + kPiece < params.channels ? first + kPiece : params.channels;
      run_piece<T>(params, range_of(params.of, item / pieces), first, last);
    }
  });
}

}  // namespace

void causal_conv1d_cpu(const CausalConv1dParams& params) {
  switch (params.dtype) {
    case DType::kBFloat16:
      return run<bfloat16>(params);
    case DType::kFloat16:
      return run<float16>(params);
    default:
      return run<float>(params);
  }
}

}  // namespace specops::SPECOPS_ISA
