// SPDX-License-Identifier: Apache-2.0
// What append_attention on CUDA writes: rows of out and lse, states for a later fold, and zeros
// where nothing is seen.
#pragma once

#include "attention/attention_block.cuh"
#include "attention/attention_bytes.cuh"
#include "attention/attention_fold.cuh"
#include "common/device.cuh"

namespace specops {

constexpr float kLn2 = 0.6931471805599453f;

template <typename T>
__device__ __forceinline__ void store_pair(T* out, float x, float y) {
  if constexpr (sizeof(T) == 2) {
    *reinterpret_cast<uint32_t*>(out) = ptx::pack2<T>(x, y);
  } else {
    *reinterpret_cast<float2*>(out) = make_float2(x, y);
  }
}

template <typename T>
__device__ __forceinline__ void store_one(T* out, float x) {
  if constexpr (sizeof(T) == 2) {
    *reinterpret_cast<uint16_t*>(out) = static_cast<uint16_t>(ptx::pack2<T>(x, 0.0f));
  } else {
    *out = x;
  }
}

template <typename Block>
__device__ __forceinline__ void write_lse(const Block& block, int64_t item, float m, float l) {
  if (block.params.lse == nullptr) return;
  block.params.lse[item] = l == 0.0f ? -INFINITY : __fmul_rn(__fadd_rn(m, log2f(l)), kLn2);
}

// The thread's share `o` of a row, to the row at `out`: `map` is what becomes of a value.
template <typename Block, typename Out, typename Map>
__device__ __forceinline__ void store_share(Out* out,
                                            const float (&o)[Block::kOutTiles][4],
                                            int half,
                                            Map map) {
  unsigned thread = thread_index();
  int lane = thread % kWarpSize, warp = thread / kWarpSize;
#pragma unroll
  for (int n = 0; n < Block::kOutTiles; ++n) {
    float x = map(o[n][2 * half]), y = map(o[n][2 * half + 1]);
    if constexpr (Block::Shape::kScaled) {
      store_one(out + column_of_byte<Block>(warp, lane, n, 0), x);
      store_one(out + column_of_byte<Block>(warp, lane, n, 1), y);
    } else {
      store_pair(out + (warp * Block::kOutTiles + n) * 8 + 2 * (lane % 4), x, y);
    }
  }
}

// What outputs are multiplied with at the end. The sink of the row's head, if there is one, joins its
// sums first, after all tokens; one of -inf changes nothing.
template <typename Block>
__device__ __forceinline__ float finish_sums(const Block& block, int row, float& m, float& l) {
  if (block.params.sinks == nullptr) return inverse(l);
  int head = block.unit.head * block.group() + (block.unit.first_row + row) % block.group();
  Fold fold = fold_sums(m, l, __fdiv_rn(block.params.sinks[head], kLn2), 1.0f);
  m = fold.m;
  l = fold.l;
  return __fmul_rn(fold.a_scale, inverse(l));
}

template <typename Block>
__device__ __forceinline__ void write_rows(const Block& block,
                                           int tile,
                                           const Outputs<Block>& sum) {
  using T = typename Block::Element;
  Unit& unit = block.unit;
  const float2* sums = block.chunk_sums(block.leaf_of(tile) + 1);
  float* state = unit.state;
  if (unit.leaf_stride != 0) {
    state += (block.leaf_of(tile) - unit.begin / Block::kLeaf) * unit.leaf_stride;
  }
  unsigned thread = thread_index();
  int lane = thread % kWarpSize, warp = thread / kWarpSize;
#pragma unroll
  for (int i = 0; i < Block::kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int row = 16 * i + lane / 4 + 8 * half;
      if (row >= unit.rows) continue;
      float m = sums[row].x, l = sums[row].y;
      bool writes_sums = warp == 0 && lane % 4 == 0;
      if (state != nullptr) {
        int place = unit.state_row + row;
        store_share<Block>(
            state + place * Block::kValueDim, sum.o[i], half, [](float x) { return x; });
        if (writes_sums) {
          reinterpret_cast<float2*>(state + unit.state_rows * Block::kValueDim)[place] =
              make_float2(m, l);
        }
        continue;
      }
      int64_t item = block.item_of(row);
      T* out = static_cast<T*>(block.params.out) + item * Block::kValueDim;
      float scale = finish_sums(block, row, m, l);
      store_share<Block>(out, sum.o[i], half, [scale](float x) { return finished(x, scale); });
      if (writes_sums) write_lse(block, item, m, l);
    }
  }
}

template <typename Block>
__device__ __forceinline__ void write_part(const Block& block,
                                           int row,
                                           int quad,
                                           const StatePart& total) {
  using T = typename Block::Element;
  int64_t item = block.item_of(row);
  float m = total.m, l = total.l;
  float scale = finish_sums(block, row, m, l);
  T* out = static_cast<T*>(block.params.out) + item * Block::kValueDim + 4 * quad;
  store_pair(out, finished(total.o.x, scale), finished(total.o.y, scale));
  store_pair(out + 2, finished(total.o.z, scale), finished(total.o.w, scale));
  if (quad == 0) write_lse(block, item, m, l);
}

// A request that contradicts itself: zeros and -inf.
template <typename Block>
__device__ __forceinline__ void write_zeros(const Block& block) {
  using T = typename Block::Element;
#pragma unroll 1
  for (int i = threadIdx.x; i < block.unit.rows * (Block::kValueDim / 2); i += kAttentionThreads) {
    int64_t item = block.item_of(i / (Block::kValueDim / 2));
    int column = i % (Block::kValueDim / 2) * 2;
    store_pair(static_cast<T*>(block.params.out) + item * Block::kValueDim + column, 0.0f, 0.0f);
    if (column == 0) write_lse(block, item, 0.0f, 0.0f);
  }
}

// Rows that belong to no request.
template <typename Block>
__device__ __forceinline__ void zero_padding(const Block& block) {
  using T = typename Block::Element;
  int64_t used = block.turns.row_end;
  int64_t first = used * block.params.num_qo_heads * (Block::kValueDim / 2);
  int64_t last = block.params.rows * block.params.num_qo_heads * (Block::kValueDim / 2);
  int64_t step = int64_t{gridDim.x} * kAttentionThreads;
#pragma unroll 1
  for (int64_t i = first + int64_t{blockIdx.x} * kAttentionThreads + threadIdx.x; i < last;
       i += step) {
    store_pair(static_cast<T*>(block.params.out) + 2 * i, 0.0f, 0.0f);
    if (i % (Block::kValueDim / 2) == 0) write_lse(block, i / (Block::kValueDim / 2), 0.0f, 0.0f);
  }
}

}  // namespace specops
