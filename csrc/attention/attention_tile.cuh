// SPDX-License-Identifier: Apache-2.0
// The arithmetic of one tile of KV in append_attention on CUDA: scores, their weights, and the sums
// of V under these.
#pragma once

#include <type_traits>

#include "attention/attention_block.cuh"
#include "attention/attention_bytes.cuh"
#include "attention/attention_fold.cuh"
#include "attention/attention_loads.cuh"
#include "attention/attention_mask.cuh"
#include "common/device.cuh"

namespace specops {

constexpr float kLog2E = 1.4426950408889634f;

// s = scaled scores of the warp's tokens, -inf where a row does not see the token; each row's
// maximum over them goes to shared memory. token_scale: what load_scale found, of 8-bit caches.
template <typename Block>
__device__ __forceinline__ void score(const Block& block,
                                      int tile,
                                      float token_scale,
                                      float (&s)[Block::kRowTiles][Block::kScoreTiles][4]) {
  using Shape = typename Block::Shape;
  using T = typename Block::Element;
  unsigned thread = thread_index();
  int lane = thread % kWarpSize, warp = thread / kWarpSize;
  const unsigned char* queries = block.smem + Shape::kQueries;
  const unsigned char* keys = block.k_slot(tile);
#pragma unroll
  for (int i = 0; i < Block::kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < Block::kScoreTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[i][n][e] = 0.0f;
    }
  }
  int first = warp * (8 * Block::kScoreTiles);  // token of the warp in the tile
  if constexpr (Shape::kScaled) {
    multiply_byte_keys(block, keys, s);
  } else if constexpr (sizeof(T) == 2) {
    // B: lanes 0-7 the first 8 tokens at vector 2 k, 8-15 at 2 k + 1, 16-31 the next 8 tokens.
    int token = first + lane % 8 + (Block::kScoreTiles == 2 ? lane / 16 * 8 : 0);
    LanePlace<Shape::kVectors> b_place(token, lane / 8 % 2);
    // A: lanes 0-15 the rows at vector 2 k, 16-31 at 2 k + 1.
    LanePlace<Shape::kQueryVectors> a_place(lane % 16, lane / 16);
#pragma unroll
    for (int k = 0; k < Block::kHeadDim / 16; ++k) {
      uint32_t b[Block::kScoreTiles][2];
      if constexpr (Block::kScoreTiles == 2) {
        uint32_t r[4];
        ptx::ldmatrix_x4(r, keys + b_place.after(2 * k));
        b[0][0] = r[0];
        b[0][1] = r[1];
        b[1][0] = r[2];
        b[1][1] = r[3];
      } else {
        ptx::ldmatrix_x2(b[0], keys + b_place.after(2 * k));
      }
#pragma unroll
      for (int i = 0; i < Block::kRowTiles; ++i) {
        uint32_t a[4];
        ptx::ldmatrix_x4(a, queries + i * 16 * Shape::kQueryBytes + a_place.after(2 * k));
#pragma unroll
        for (int n = 0; n < Block::kScoreTiles; ++n) ptx::mma_m16n8k16<T>(s[i][n], a, b[n]);
      }
    }
  } else {
    auto at = [](const unsigned char* base, int row, int vector) {
      return *reinterpret_cast<const float4*>(base + place_of<Shape::kVectors>(row, vector));
    };
    auto dot = [](float sum, float4 a, float4 b) {
      sum = __fmaf_rn(a.x, b.x, sum);
      sum = __fmaf_rn(a.y, b.y, sum);
      sum = __fmaf_rn(a.z, b.z, sum);
      return __fmaf_rn(a.w, b.w, sum);
    };
#pragma unroll 1
    for (int vector = 0; vector < Shape::kVectors; ++vector) {
      float4 b[Block::kScoreTiles][2];
#pragma unroll
      for (int n = 0; n < Block::kScoreTiles; ++n) {
        b[n][0] = at(keys, first + 8 * n + 2 * (lane % 4), vector);
        b[n][1] = at(keys, first + 8 * n + 2 * (lane % 4) + 1, vector);
      }
#pragma unroll
      for (int i = 0; i < Block::kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float4 a = at(queries, 16 * i + lane / 4 + 8 * half, vector);
#pragma unroll
          for (int n = 0; n < Block::kScoreTiles; ++n) {
            s[i][n][2 * half] = dot(s[i][n][2 * half], a, b[n][0]);
            s[i][n][2 * half + 1] = dot(s[i][n][2 * half + 1], a, b[n][1]);
          }
        }
      }
    }
  }
  float scale = __fmul_rn(block.params.sm_scale, kLog2E);
#pragma unroll
  for (int n = 0; n < Block::kScoreTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float factor = scale;
      if constexpr (Shape::kScaled)
        factor = __fmul_rn(scale, scale_of_token<Block>(token_scale, 0, n, e));
#pragma unroll
      for (int i = 0; i < Block::kRowTiles; ++i) {
        s[i][n][e] = __fmul_rn(s[i][n][e], factor);
        s[i][n][2 + e] = __fmul_rn(s[i][n][2 + e], factor);
      }
    }
  }
  if (block.partly_seen(tile)) {
    const int2* rows = reinterpret_cast<const int2*>(block.smem + Shape::kSeen);
#pragma unroll
    for (int i = 0; i < Block::kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int row = 16 * i + lane / 4 + 8 * half;
        int2 seen = rows[row];
#pragma unroll
        for (int n = 0; n < Block::kScoreTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            int token = tile * Block::kTile + first + 8 * n + 2 * (lane % 4) + e;
            bool hidden = token < seen.x || token >= seen.y || is_masked(block, row, token);
            if (hidden) s[i][n][2 * half + e] = -INFINITY;
          }
        }
      }
    }
  }
  float* maxima = reinterpret_cast<float*>(block.smem + Shape::kMaxima);
#pragma unroll
  for (int i = 0; i < Block::kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int row = 16 * i + lane / 4 + 8 * half;
      float top = fmaxf(s[i][0][2 * half], s[i][0][2 * half + 1]);
      if (Block::kScoreTiles == 2) {
        constexpr int kLast = Block::kScoreTiles - 1;
        top = fmaxf(top, fmaxf(s[i][kLast][2 * half], s[i][kLast][2 * half + 1]));
      }
      top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 2));
      if (lane % 4 == 0) maxima[row * kAttentionWarps + warp] = top;
    }
  }
}

// Weights of the tile's tokens under the running maximum, to shared memory; rescales the state.
template <typename Block>
__device__ __forceinline__ void weigh(const Block& block,
                                      int tile,
                                      float token_scale,
                                      float (&s)[Block::kRowTiles][Block::kScoreTiles][4],
                                      Outputs<Block>& leaf) {
  using Shape = typename Block::Shape;
  using T = typename Block::Element;
  constexpr int kPerVector = 16 / sizeof(T);
  bool begins = tile * Block::kTile % Block::kLeaf == 0;
  unsigned thread = thread_index_in_loop<Block>();
  int lane = thread % kWarpSize, warp = thread / kWarpSize;
  // A lane has every eighth row; all of them are turned alike in shared memory.
  const float4* maxima = reinterpret_cast<const float4*>(block.smem + Shape::kMaxima) + lane / 4;
  const float* before = block.running(tile - 1) + lane / 4;
  float* after = block.running(tile) + lane / 4;
  float* shares = block.lane_sums() + thread;
  unsigned char* probs[Block::kScoreTiles];
#pragma unroll
  for (int n = 0; n < Block::kScoreTiles; ++n) {
    int element = warp * (8 * Block::kScoreTiles) + 8 * n + 2 * (lane % 4);
    probs[n] = block.smem + Shape::kProbs +
               place_of<Shape::kProbVectors>(lane / 4, element / kPerVector) +
               element % kPerVector * sizeof(T);
  }
  [[maybe_unused]] float scales[Block::kScoreTiles][2];
  if constexpr (Shape::kScaled) {
#pragma unroll
    for (int n = 0; n < Block::kScoreTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) scales[n][e] = scale_of_token<Block>(token_scale, 1, n, e);
    }
  }
  bool writes = thread < kWarpSize && lane % 4 == 0;
  // What is read of other warps comes first, so that these loads overlap; for 64 rows of 8-bit
  // caches in two rounds, since registers are short.
  constexpr int kRounds = Shape::kScaled && Block::kRowTiles == 4 ? 2 : 1;
  constexpr int kAtOnce = 2 * Block::kRowTiles / kRounds;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    float old[kAtOnce], top[kAtOnce], share[kAtOnce];
#pragma unroll
    for (int at = 0; at < kAtOnce; ++at) {
      int r = round * kAtOnce + at;
      float4 tops = maxima[8 * r];
      old[at] = begins ? -INFINITY : before[8 * r];
      share[at] = begins ? 0.0f : shares[r * kAttentionThreads];
      top[at] = fmaxf(old[at], fmaxf(fmaxf(tops.x, tops.y), fmaxf(tops.z, tops.w)));
    }
#pragma unroll
    for (int at = 0; at < kAtOnce; ++at) {
      int r = round * kAtOnce + at, i = r / 2, half = r % 2;
      if (writes) after[8 * r] = top[at];
      float origin = top[at] == -INFINITY ? 0.0f : top[at];
      float rescale = ptx::exp2_approx(__fsub_rn(old[at], origin));
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < Block::kScoreTiles; ++n) {
        float p0 = ptx::exp2_approx(__fsub_rn(s[i][n][2 * half], origin));
        float p1 = ptx::exp2_approx(__fsub_rn(s[i][n][2 * half + 1], origin));
        sum = __fadd_rn(sum, __fadd_rn(p0, p1));
        if constexpr (Shape::kScaled) {
          // A scale may be NaN, and a token that the row does not see has a weight of zero.
          p0 = p0 == 0.0f ? 0.0f : __fmul_rn(p0, scales[n][0]);
          p1 = p1 == 0.0f ? 0.0f : __fmul_rn(p1, scales[n][1]);
        }
        unsigned char* place = probs[n] + 8 * r * Shape::kProbVectors * 16;
        if constexpr (sizeof(T) == 2) {
          *reinterpret_cast<uint32_t*>(place) = ptx::pack2<T>(p0, p1);
        } else {
          *reinterpret_cast<float2*>(place) = make_float2(p0, p1);
        }
      }
      shares[r * kAttentionThreads] = begins ? sum : __fmaf_rn(share[at], rescale, sum);
#pragma unroll
      for (int n = 0; n < Block::kOutTiles; ++n) {
        leaf.o[i][n][2 * half] = __fmul_rn(leaf.o[i][n][2 * half], rescale);
        leaf.o[i][n][2 * half + 1] = __fmul_rn(leaf.o[i][n][2 * half + 1], rescale);
      }
    }
  }
}

// leaf.o += P V.
template <typename Block>
__device__ __forceinline__ void accumulate(const Block& block, int tile, Outputs<Block>& leaf) {
  using Shape = typename Block::Shape;
  using T = typename Block::Element;
  unsigned thread = thread_index_in_loop<Block>();
  int lane = thread % kWarpSize, warp = thread / kWarpSize;
  const unsigned char* probs = block.smem + Shape::kProbs;
  const unsigned char* values = block.v_slot(tile);
  if constexpr (Shape::kScaled) {
    add_byte_values(block, values, leaf);
  } else if constexpr (sizeof(T) == 4) {
    const float* p = reinterpret_cast<const float*>(probs);
#pragma unroll 1
    for (int token = 0; token < Block::kTile; ++token) {
      float2 v[Block::kOutTiles];
#pragma unroll
      for (int n = 0; n < Block::kOutTiles; ++n) {
        int column = (warp * Block::kOutTiles + n) * 8 + 2 * (lane % 4);
        int place = place_of<Shape::kVectors>(token, column / 4) / 4 + column % 4;
        v[n] = *reinterpret_cast<const float2*>(reinterpret_cast<const float*>(values) + place);
      }
#pragma unroll
      for (int i = 0; i < Block::kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          int row = 16 * i + lane / 4 + 8 * half;
          float weight = p[place_of<Shape::kProbVectors>(row, token / 4) / 4 + token % 4];
#pragma unroll
          for (int n = 0; n < Block::kOutTiles; ++n) {
            float* o = leaf.o[i][n] + 2 * half;
            o[0] = __fmaf_rn(weight, v[n].x, o[0]);
            o[1] = __fmaf_rn(weight, v[n].y, o[1]);
          }
        }
      }
    }
  } else {
    LanePlace<Shape::kProbVectors> a_place(lane % 16, lane / 16);
    // B: lanes 0-15 the tokens at a column tile, 16-31 at the next. Pairs of column tiles.
    int b_row = opaque_in_loop<Block>(lane % 16 * Shape::kRowBytes);
    int b_turn = twist<Shape::kVectors>(lane % 16);
    int b_vector = opaque_in_loop<Block>(Block::kOutTiles % 2 == 0
                                             ? (warp * Block::kOutTiles + lane / 16) ^ b_turn
                                             : warp * Block::kOutTiles + lane / 16);
#pragma unroll
    for (int k = 0; k < Block::kTile / 16; ++k) {
      uint32_t b[(Block::kOutTiles + 1) / 2][4];
#pragma unroll
      for (int n = 0; n < Block::kOutTiles; n += 2) {
        int vector = Block::kOutTiles % 2 == 0 ? b_vector ^ n : (b_vector + n) ^ b_turn;
        const unsigned char* place = values + k * 16 * Shape::kRowBytes + b_row + vector * 16;
        if (n + 1 < Block::kOutTiles) {
          ptx::ldmatrix_x4_trans(b[n / 2], place);
        } else {
          uint32_t one[2];
          ptx::ldmatrix_x2_trans(one, place);
          b[n / 2][0] = one[0];
          b[n / 2][1] = one[1];
        }
      }
#pragma unroll
      for (int i = 0; i < Block::kRowTiles; ++i) {
        uint32_t a[4];
        ptx::ldmatrix_x4(a, probs + i * 16 * Shape::kProbVectors * 16 + a_place.after(2 * k));
#pragma unroll
        for (int n = 0; n < Block::kOutTiles; ++n) {
          uint32_t column[2] = {b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]};
          ptx::mma_m16n8k16<T>(leaf.o[i][n], a, column);
        }
      }
    }
  }
}

// Whether the thread's own part of a landed tile of V holds an infinity or a NaN.
template <typename Block>
__device__ __forceinline__ bool has_nonfinite(const Block& block, int tile) {
  using Shape = typename Block::Shape;
  using T = typename Block::Element;
  constexpr uint32_t kExponent = sizeof(T) == 4                ? 0x7f800000u
                                 : std::is_same_v<T, bfloat16> ? 0x7f80u
                                                               : 0x7c00u;
  CopyShare<Shape> share(thread_index());
  const unsigned char* own = block.v_slot(tile) + share.place();
  bool found = false;
#pragma unroll 1
  for (int pass = 0; pass < share.kPasses; ++pass) {
#pragma unroll
    for (int step = 0; step < share.kSteps; ++step) {
      uint4 vector =
          *reinterpret_cast<const uint4*>(own + pass * share.more(1, 0) + share.more(0, step));
      const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
      for (uint32_t word : words) {
        found = found || (word & kExponent) == kExponent;
        if constexpr (sizeof(T) == 2) found = found || (word >> 16 & kExponent) == kExponent;
      }
    }
  }
  return found;
}

}  // namespace specops
