// SPDX-License-Identifier: Apache-2.0
// The states of append_attention on CUDA (maximum of the scores, sum of weights, weighted sum of V)
// and how two of them combine.
#pragma once

#include "common/device.cuh"

namespace specops {

// How two states combine: b after a. The weights of an empty one are zeros, its outputs too, and
// the other's scale is 1.
struct Fold {
  float m, l, a_scale, b_scale;
};

__device__ __forceinline__ Fold fold_sums(float a_m, float a_l, float b_m, float b_l) {
  Fold fold;
  fold.m = fmaxf(a_m, b_m);
  float origin = fold.m == -INFINITY ? 0.0f : fold.m;
  fold.a_scale = ptx::exp2_approx(__fsub_rn(a_m, origin));
  fold.b_scale = ptx::exp2_approx(__fsub_rn(b_m, origin));
  fold.l = __fmaf_rn(b_l, fold.b_scale, __fmul_rn(a_l, fold.a_scale));
  return fold;
}

__device__ __forceinline__ float fold_value(const Fold& fold, float a, float b) {
  return __fmaf_rn(b, fold.b_scale, __fmul_rn(a, fold.a_scale));
}

// The end of it. Adding zero makes one zero of two: a fold with an empty state may turn -0 into 0.
__device__ __forceinline__ float finished(float o, float scale) {
  return __fmaf_rn(o, scale, 0.0f);
}
__device__ __forceinline__ float inverse(float l) { return l == 0.0f ? 0.0f : __fdiv_rn(1.0f, l); }

// The share of one lane in outputs of a tile of rows, in the fragment layout of mma: o[i][n][2 *
// half + e] belongs to row 16 * i + lane / 4 + 8 * half and column (warp * kOutTiles + n) * 8 + 2 *
// (lane % 4) + e.
template <typename Block>
struct Outputs {
  float o[Block::kRowTiles][Block::kOutTiles][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < Block::kRowTiles; ++i) {
#pragma unroll
      for (int n = 0; n < Block::kOutTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[i][n][e] = 0.0f;
      }
    }
  }
};

// Four columns of a row's state.
struct StatePart {
  float m = -INFINITY, l = 0.0f;
  float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

  __device__ __forceinline__ void append(float2 sums, float4 x) {
    Fold fold = fold_sums(m, l, sums.x, sums.y);
    m = fold.m;
    l = fold.l;
    o.x = fold_value(fold, o.x, x.x);
    o.y = fold_value(fold, o.y, x.y);
    o.z = fold_value(fold, o.z, x.z);
    o.w = fold_value(fold, o.w, x.w);
  }
  // Row `row` of a state of `rows` rows.
  template <int kHeadDim>
  __device__ __forceinline__ void append_state(const float* state, int rows, int row, int quad) {
    append(reinterpret_cast<const float2*>(state + rows * kHeadDim)[row],
           reinterpret_cast<const float4*>(state)[row * (kHeadDim / 4) + quad]);
  }
};

}  // namespace specops
