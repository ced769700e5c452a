// SPDX-License-Identifier: Apache-2.0
// Selection of the CUDA kernel for a call of append_attention, for queries of type T and caches of
// type `Cache`.
#pragma once

#include <stdexcept>
#include <type_traits>

#include "attention/append_attention/append_attention.cuh"
#include "attention/append_attention/cuda/form.h"

namespace specops {
namespace {

// Returns the kernel for tiles of kTiles * 16 rows and caches of elements `Cache`.
template <typename T, typename Cache, int kHeadDim, int kTiles>
auto* kernel_of([[maybe_unused]] const AppendAttentionParams& params) {
  if constexpr (kIsScaled<Cache>) {
    return append_8bit_attention_kernel<T, Cache, kHeadDim, kTiles>;
  } else {
    if constexpr (std::is_same_v<T, bfloat16> && kHeadDim == 128) {
      if (params.stamps != nullptr) return append_attention_stamped_kernel<T, kHeadDim, kTiles>;
    }
    return append_attention_kernel<T, kHeadDim, kTiles>;
  }
}

// Returns the form with the smallest tiles that hold `rows` packed rows; if none does, the form
// with the largest tiles of at most `most_rows` rows.
template <typename T, typename Cache, int kHeadDim, int kTiles = 1>
AttentionForm form_of(const AppendAttentionParams& params, int64_t rows, int64_t most_rows) {
  if constexpr (kTiles < kMostRowTiles<T, kHeadDim>) {
    if (rows > 16 * kTiles && most_rows > 16 * kTiles) {
      constexpr int kNext = kNextRowTiles<kHeadDim, kTiles>;
      return form_of<T, Cache, kHeadDim, kNext>(params, rows, most_rows);
    }
  }
  using Shape = AttentionShape<T, kHeadDim, kTiles, Cache>;
  static_assert(Shape::kBlocksPerSm <= (kTiles <= 2 ? kMostBlocksPerSm : kBlocksOfHighTiles));
  return {kernel_of<T, Cache, kHeadDim, kTiles>(params),
          Shape::kThreads,
          Shape::kRows,
          Shape::kBlocksPerSm,
          Shape::kSharedBytes,
          Shape::kTotalFloats * static_cast<int>(sizeof(float))};
}

template <typename T, typename Cache = T>
AttentionForm form_for(const AppendAttentionParams& params, int64_t rows, int64_t most_rows) {
  switch (params.head_dim) {
    case 64:
      return form_of<T, Cache, 64>(params, rows, most_rows);
    case 96:
      return form_of<T, Cache, 96>(params, rows, most_rows);
    case 128:
      return form_of<T, Cache, 128>(params, rows, most_rows);
    case 512:
      return form_of<T, Cache, 512>(params, rows, most_rows);
    case kLatentKeyDim:
      if constexpr (sizeof(Cache) == 2) {
        return form_of<T, Cache, kLatentKeyDim>(params, rows, most_rows);
      }
      throw std::invalid_argument("append_attention: latents must be bfloat16 or float16 on cuda");
    default:
      return form_of<T, Cache, 256>(params, rows, most_rows);
  }
}

}  // namespace
}  // namespace specops
