// SPDX-License-Identifier: Apache-2.0
// One leaf of KV for many rows in append_attention on the CPU, with one row per vector lane. Lanes
// are never added to each other, K is read in place, and softmax processes sixteen rows at once.
// The additions of each row are the same as in cpu/tile.h.
#pragma once

#include <type_traits>

#include "attention/append_attention/cpu/fold.h"
#include "attention/append_attention/cpu/tile.h"

namespace specops::SPECOPS_ISA {
namespace {

// kHasLanes is true if this instruction set compiles the path with one row per lane. kLaneRows is
// the smallest tile that uses it; with fewer rows, too many lanes would compute nothing.
template <typename T>
constexpr bool kHasLanes = false;
#if defined(SPECOPS_ISA_avx512_bf16)
template <>
constexpr bool kHasLanes<bfloat16> = true;
#endif
constexpr int kLaneRows = 24;

// Queries of a unit with one row per lane. For each head and each pair of columns, there is a
// vector of rows; these vectors are `stride` words apart.
struct LaneQueries {
  const uint32_t* words = nullptr;  // nullptr if not available
  int64_t stride = 0;

  // Returns whether `rows` rows of a leaf use the path with one row per lane.
  bool are_for(const LeafView& view, int rows) const {
    return words != nullptr && view.whole && rows >= kLaneRows;
  }
};

// Returns about how many times fold_lanes calls prefetch.issue() for `rows` rows.
template <int D>
int64_t lane_places(int64_t rows) {
  int64_t of_scores = kLeafTokens * ((rows + 2 * kLanes - 1) / (2 * kLanes));
  int64_t of_values = kLeafBlocks * kValueDim<D> / (2 * kLanes) * ((rows + 11) / 12);
  return of_scores + of_values;
}

#if defined(SPECOPS_ISA_avx512_bf16)

// Transposes 16 x 16 words: to[i * stride + row] = from[row][i]. Only the first `rows` rows of
// `from` exist.
SPECOPS_FLATTEN void turn_words(const bfloat16* const* from,
                                int rows,
                                uint32_t* to,
                                int64_t stride) {
  __m512i x[16], y[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) x[i] = i < rows ? _mm512_loadu_si512(from[i]) : __m512i{};
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + 2 + j]);
      x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + 2 + j]);
    }
  }
  // Quarter q of x[4 j + i] now holds word 4 q + i of the rows 4 j to 4 j + 3.
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    __m512i a = _mm512_shuffle_i32x4(x[i], x[4 + i], 0x88);
    __m512i b = _mm512_shuffle_i32x4(x[i], x[4 + i], 0xdd);
    __m512i c = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0x88);
    __m512i d = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0xdd);
    _mm512_storeu_si512(to + i * stride, _mm512_shuffle_i32x4(a, c, 0x88));
    _mm512_storeu_si512(to + (8 + i) * stride, _mm512_shuffle_i32x4(a, c, 0xdd));
    _mm512_storeu_si512(to + (4 + i) * stride, _mm512_shuffle_i32x4(b, d, 0x88));
    _mm512_storeu_si512(to + (12 + i) * stride, _mm512_shuffle_i32x4(b, d, 0xdd));
  }
}

// Computes lane `lane` of the dot products of lane_dots, for kTokens tokens and kVecs * 16 rows.
template <int kTokens, int kVecs, int D>
inline void sum_lane(const uint32_t* q,
                     int64_t q_stride,
                     const bfloat16* k,
                     int64_t stride,
                     int lane,
                     F32x16 (*sums)[kVecs]) {
#pragma GCC unroll 32
  for (int i = 0; i < D / 2; i += kLanes) {
    BF16x32 x[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) x[v] = load_pairs(q + (i + lane) * q_stride + v * kLanes);
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) {
      BF16x32 y = broadcast_pair(k + t * stride + 2 * (i + lane));
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        sums[t][v] = dot_pairs(i == 0 ? zero() : sums[t][v], x[v], y);
      }
    }
  }
}

template <int kTokens, int kVecs>
inline void add_sums(F32x16 (*a)[kVecs], const F32x16 (*b)[kVecs]) {
#pragma GCC unroll 4
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) a[t][v] = add(a[t][v], b[t][v]);
  }
}

// Computes the scores of kTokens tokens for kVecs * 16 rows; the scores of a token start at scores
// + token * kMaxTile. The 16 partial sums are added in the tree order of reduce_add, four at a time
// in registers: lanes 0, 4, 8, 12 first, then the four from lane 2, from lane 1 and from lane 3.
template <int kTokens, int kVecs, int D>
SPECOPS_FLATTEN void score_lanes(const uint32_t* q,
                                 int64_t q_stride,
                                 const bfloat16* k,
                                 int64_t stride,
                                 float scale,
                                 float* scores,
                                 LeafPrefetch& prefetch) {
  alignas(64) float parts[3][kTokens * kVecs * kLanes];
  for (int part = 0; part < 4; ++part) {
    int lane = part / 2 + part % 2 * 2;
    prefetch.issue();
    F32x16 a[kTokens][kVecs], b[kTokens][kVecs], c[kTokens][kVecs];
    sum_lane<kTokens, kVecs, D>(q, q_stride, k, stride, lane, a);
    sum_lane<kTokens, kVecs, D>(q, q_stride, k, stride, lane + 8, b);
    add_sums<kTokens, kVecs>(a, b);
    sum_lane<kTokens, kVecs, D>(q, q_stride, k, stride, lane + 4, b);
    sum_lane<kTokens, kVecs, D>(q, q_stride, k, stride, lane + 12, c);
    add_sums<kTokens, kVecs>(b, c);
    add_sums<kTokens, kVecs>(a, b);
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        int at = (t * kVecs + v) * kLanes;
        if (part < 3) {
          store(parts[part] + at, a[t][v]);
        } else {
          F32x16 even = add(load(parts[0] + at), load(parts[1] + at));
          F32x16 sum = add(even, add(load(parts[2] + at), a[t][v]));
          store(scores + t * kMaxTile + v * kLanes, mul(sum, set1(scale)));
        }
      }
    }
  }
}

// Combines the 64 vectors of a leaf's tokens in the order in which softmax() in cpu/tile.h combines
// the lanes of a row: first the tokens that are a block apart, then a tree over the sixteen
// results.
template <int kBegin, int kStride, typename Load, typename Join>
__attribute__((always_inline)) inline F32x16 join_tokens(Load&& load_token, Join&& join) {
  if constexpr (kStride == kPageBlock) {
    return join(join(load_token(kBegin), load_token(kBegin + kPageBlock)),
                join(load_token(kBegin + 2 * kPageBlock), load_token(kBegin + 3 * kPageBlock)));
  } else {
    F32x16 a = join_tokens<kBegin, 2 * kStride>(load_token, join);
    return join(a, join_tokens<kBegin + kStride, 2 * kStride>(load_token, join));
  }
}

// Computes the weights of sixteen rows relative to their maxima m, and the sums l of the weights;
// overwrites the scores. probs has, per row, one word with the weights of two tokens; the words of
// a row are kMaxTile apart. Scales are applied as in softmax() of cpu/tile.h.
template <bool kScaled>
SPECOPS_FLATTEN void softmax_lanes(float* scores,
                                   [[maybe_unused]] const float* k_scales,
                                   [[maybe_unused]] const float* v_scales,
                                   uint32_t* probs,
                                   float* m,
                                   float* l) {
  alignas(64) static constexpr int16_t kPairs[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                     21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                     11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  if constexpr (kScaled) {
    for (int t = 0; t < kLeafTokens; ++t) {
      store(scores + t * kMaxTile, mul(load(scores + t * kMaxTile), set1(k_scales[t])));
    }
  }
  auto load_token = [&](int t) { return load(scores + t * kMaxTile); };
  F32x16 top = join_tokens<0, 1>(load_token, [](F32x16 a, F32x16 b) { return max(a, b); });
  store(m, top);
  F32x16 shift = top;
  __mmask16 none = _mm512_cmp_ps_mask(top.v, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ);
  shift.v = _mm512_mask_mov_ps(shift.v, none, _mm512_setzero_ps());
#pragma GCC unroll 2
  for (int t = 0; t < kLeafTokens; t += 2) {
    F32x16 a = exp(sub(load_token(t), shift)), b = exp(sub(load_token(t + 1), shift));
    store(scores + t * kMaxTile, a);
    store(scores + (t + 1) * kMaxTile, b);
    if constexpr (kScaled) {
      a = mul(a, set1(v_scales[t]));
      b = mul(b, set1(v_scales[t + 1]));
    }
    __m512i words = (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v);
    words = _mm512_permutexvar_epi16(_mm512_load_si512(kPairs), words);
    _mm512_storeu_si512(probs + t / 2 * kMaxTile, words);
  }
  store(l, join_tokens<0, 1>(load_token, [](F32x16 a, F32x16 b) { return add(a, b); }));
}

// Computes the scores of a tile's rows for the sixteen tokens of a block.
template <int D>
void score_lane_block(const uint32_t* q,
                      int64_t q_stride,
                      int rows,
                      const bfloat16* k,
                      int64_t stride,
                      float scale,
                      float* scores,
                      LeafPrefetch& prefetch) {
  for (int t = 0; t < kPageBlock; t += 4) {
    int row = 0;
    for (; row + kLanes < rows; row += 2 * kLanes) {
      score_lanes<4, 2, D>(
          q + row, q_stride, k + t * stride, stride, scale, scores + t * kMaxTile + row, prefetch);
    }
    if (row < rows) {
      score_lanes<4, 1, D>(
          q + row, q_stride, k + t * stride, stride, scale, scores + t * kMaxTile + row, prefetch);
    }
  }
}

// Transposes the queries of a unit's rows. Returns an empty result if the unit has too few rows.
template <typename T, int D>
LaneQueries turn_queries(const UnitRows<T>& rows,
                         int64_t num_heads,
                         int64_t group,
                         uint32_t* words) {
  int64_t stride = (rows.count + kLanes - 1) / kLanes * kLanes;
  // Lanes after the last row of a tile may read the words that follow it.
  if (rows.count < kLaneRows || num_heads * stride * D / 2 + kLanes > kLaneWords) return {};
  for (int64_t head = 0; head < num_heads; ++head) {
    for (int row = 0; row < rows.count; row += kLanes) {
      int count = rows.count - row < kLanes ? rows.count - row : kLanes;
      for (int64_t i = 0; i < D / 2; i += kLanes) {
        const T* from[kLanes];
        for (int j = 0; j < count; ++j) {
          from[j] = rows.first_q[row + j] + head * group * D + 2 * i;
        }
        turn_words(from, count, words + (head * D / 2 + i) * stride + row, stride);
      }
    }
  }
  return {words, stride};
}

// Folds (m2, l2) into (m, l). Returns the factors by which the caller must multiply o (in `kept`)
// and o2 (in `taken`). Neither state may be empty.
SPECOPS_FLATTEN void fold_sums(
    float* m, float* l, const float* m2, const float* l2, int rows, float* kept, float* taken) {
  for (int first = 0; first < rows; first += kLanes) {
    int n = rows - first < kLanes ? rows - first : kLanes;
    float a[kLanes], b[kLanes], top[kLanes];
    F32x16 la = load_partial(l + first, n), lb = load_partial(l2 + first, n);
    store(a, load_partial(m + first, n));
    store(b, load_partial(m2 + first, n));
    for (int i = 0; i < n; ++i) {
      top[i] = a[i] > b[i] ? a[i] : b[i];
      if (top[i] == -INFINITY) top[i] = 0.0f;
    }
    for (int i = n; i < kLanes; ++i) top[i] = 0.0f;
    F32x16 fa = exp(sub(load(a), load(top))), fb = exp(sub(load(b), load(top)));
    store_partial(l + first, fma(lb, fb, mul(la, fa)), n);
    store_partial(m + first, load(top), n);
    store_partial(kept + first, fa, n);
    store_partial(taken + first, fb, n);
  }
}

using LaneTiles = TileSizes<12, 8, 4, 2, 1>;

// Folds one leaf into the states (m, l, o) of a tile, all of whose rows see the whole leaf. q:
// queries of the current head, from the tile's first row on.
template <typename T, int D, bool kScaled>
void fold_lanes(const uint32_t* q,
                int64_t q_stride,
                int rows,
                const LeafKv<T>& kv,
                [[maybe_unused]] const RawHead& raw,
                float scale,
                float* m,
                float* l,
                float* o,
                Scratch<T, D>& own) {
  constexpr int kColumns = kValueDim<D>;
  constexpr int kSteps = kLeafTokens / Element<T>::kStep;
  for (int block = 0; block < kLeafBlocks; ++block) {
    const T* k = kv.k[block];
    if constexpr (kScaled) {
      own.prefetch.issue();
      widen_block<T, D>(raw.k[block], raw, own.wide_k);
      k = own.wide_k;
    }
    float* scores = own.scores + block * kPageBlock * kMaxTile;
    score_lane_block<D>(q, q_stride, rows, k, kv.stride, scale, scores, own.prefetch);
  }
  auto* words = reinterpret_cast<uint32_t*>(own.probs);
  for (int row = 0; row < rows; row += kLanes) {
    own.prefetch.issue();
    softmax_lanes<kScaled>(own.scores + row,
                           own.k_scales,
                           own.v_scales,
                           words + row,
                           own.leaf_m + row,
                           own.leaf_l + row);
  }
  if constexpr (kScaled) {
    for (int block = 0; block < kLeafBlocks; ++block) {
      own.prefetch.issue();
      widen_block<T, D>(raw.v[block], raw, own.wide_v + block * kPageBlock * D);
    }
  }
  // Weighted sums of V are folded into o directly from registers, unless a state is empty.
  bool at_once = true;
  for (int row = 0; row < rows; ++row) {
    at_once = at_once && l[row] != 0.0f && own.leaf_l[row] != 0.0f;
  }
  float kept[kMaxTile], taken[kMaxTile];
  float* dst[kMaxTile];
  if (at_once) fold_sums(m, l, own.leaf_m, own.leaf_l, rows, kept, taken);
  for (int row = 0; row < rows; ++row) {
    dst[row] = (l[row] == 0.0f || at_once ? o : own.leaf_o) + row * kColumns;
  }
  pack_values<T, kColumns>(kv, 0, kSteps, own.packed_v);
  for (int row = 0; row < rows;) {
    row += LaneTiles::pick(rows - row, [&]<int kRows>() {
      RowFold folded{at_once ? kept + row : nullptr, taken + row};
      LaneWeights weights{own.probs + 2 * row};
      weigh<T, kRows, true>(
          weights, kv, own.packed_v, kColumns, 0, kSteps, true, dst + row, folded, own.prefetch);
    });
  }
  if (!at_once) fold(m, l, o, own.leaf_m, own.leaf_l, dst, rows, kColumns);
}

#endif

}  // namespace
}  // namespace specops::SPECOPS_ISA
