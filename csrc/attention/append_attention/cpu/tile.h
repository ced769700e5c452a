// SPDX-License-Identifier: Apache-2.0
// Arithmetic of one tile of rows at one leaf of KV in append_attention on the CPU: scores, their
// weights, and the weighted sums of V.
#pragma once

#include <cstring>
#include <type_traits>

#include "attention/append_attention/cpu/block.h"
#include "attention/append_attention/cpu/widen.h"

namespace specops::SPECOPS_ISA {
namespace {

constexpr int kPackedTile = 13;   // fewest rows for which packing K and V of a leaf pays off
constexpr int kPackedScores = 6;  // fewest rows for which packing K pays off

// Computes q . k for kRows rows and one token as 16 lanes over head_dim, each a chain of additions
// from zero.
template <int kRows, int D>
inline void lane_dots(const bfloat16* const* q, const bfloat16* k, F32x16* acc) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) acc[r] = zero();
#pragma GCC unroll 8
  for (int i = 0; i < D; i += 32) {
    BF16x32 x = load_pairs(k + i);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) acc[r] = dot_pairs(acc[r], load_pairs(q[r] + i), x);
  }
}
// Computes the same for queries that widen_query widened, in the order of dot_pairs.
template <int kRows, int D>
inline void lane_dots(const float* const* q, const bfloat16* k, F32x16* acc) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) acc[r] = zero();
#pragma GCC unroll 8
  for (int i = 0; i < D; i += 32) {
    BF16x32 pairs = load_pairs(k + i);
    F32x16 odd = odd_floats(pairs);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) acc[r] = fma(load(q[r] + i + kLanes), odd, acc[r]);
    F32x16 even = even_floats(pairs);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) acc[r] = fma(load(q[r] + i), even, acc[r]);
  }
}
template <int kRows, int D, typename Q, typename T>
inline void lane_dots(const Q* const* q, const T* k, F32x16* acc) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) acc[r] = zero();
#pragma GCC unroll 16
  for (int i = 0; i < D; i += kLanes) {
    F32x16 x = load(k + i);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) acc[r] = fma(load(q[r] + i), x, acc[r]);
  }
}

// Computes the scores of a block's 16 tokens for kRows rows, into scores[r * kLeafTokens + token].
// The lanes of a token are added in the tree order of reduce_add. To save shuffles, vectors combine
// tokens: with AVX-512 sixteen tokens share each level of the tree, with AVX2 eight, with NEON four
// share the last two levels. Q: T, or float if the queries are widened.
template <typename Q, typename T, int kRows, int D>
SPECOPS_FLATTEN void score_block(
    const Q* const* q, const T* k, int64_t stride, float scale, float* scores) {
#if defined(SPECOPS_AVX512)
  F32x16 halves[2][kRows];
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    F32x16 quads[2][kRows];
#pragma GCC unroll 2
    for (int quad = 0; quad < 2; ++quad) {
      F32x16 pairs[2][kRows];
      const T* first = k + (2 * half + quad) * stride;
#pragma GCC unroll 2
      for (int pair = 0; pair < 2; ++pair) {
        F32x16 a[kRows], b[kRows];
        lane_dots<kRows, D>(q, first + 8 * pair * stride, a);
        lane_dots<kRows, D>(q, first + (8 * pair + 4) * stride, b);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          pairs[pair][r].v = _mm512_add_ps(_mm512_shuffle_f32x4(a[r].v, b[r].v, 0x44),
                                           _mm512_shuffle_f32x4(a[r].v, b[r].v, 0xee));
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        __m512 a = pairs[0][r].v, b = pairs[1][r].v;
        quads[quad][r].v =
            _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      __m512d a = _mm512_castps_pd(quads[0][r].v), b = _mm512_castps_pd(quads[1][r].v);
      halves[half][r].v = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                                        _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    __m512 a = halves[0][r].v, b = halves[1][r].v;
    F32x16 sum{_mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd))};
    store(scores + r * kLeafTokens, mul(sum, set1(scale)));
  }
#elif defined(SPECOPS_AVX2)
  for (int first = 0; first < kPageBlock; first += 8) {
    __m256 halves[8][kRows];  // lanes i and i + 8 of each token
    for (int token = 0; token < 8; ++token) {
      F32x16 acc[kRows];
      lane_dots<kRows, D>(q, k + (first + token) * stride, acc);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) halves[token][r] = _mm256_add_ps(acc[r].lo, acc[r].hi);
    }
    for (int r = 0; r < kRows; ++r) {
      __m256 quads[4];  // lanes i and i + 4, of tokens j and j + 4
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        __m256 a = halves[j][r], b = halves[j + 4][r];
        quads[j] =
            _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
      }
      __m256 pairs[2];  // lanes i and i + 2, of tokens 2 j and 2 j + 1, and four tokens later
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        __m256 a = quads[2 * j], b = quads[2 * j + 1];
        pairs[j] = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
      }
      __m256 sum = _mm256_add_ps(_mm256_shuffle_ps(pairs[0], pairs[1], 0x88),
                                 _mm256_shuffle_ps(pairs[0], pairs[1], 0xdd));
      _mm256_storeu_ps(scores + r * kLeafTokens + first, _mm256_mul_ps(sum, _mm256_set1_ps(scale)));
    }
  }
#elif defined(SPECOPS_NEON)
  for (int first = 0; first < kPageBlock; first += 4) {
    float64x2_t sums[4][kRows];  // lanes i, i + 4, i + 8 and i + 12 of each token
#pragma GCC unroll 1
    for (int token = 0; token < 4; ++token) {
      F32x16 acc[kRows];
      lane_dots<kRows, D>(q, k + (first + token) * stride, acc);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) sums[token][r] = vreinterpretq_f64_f32(quarter_sums(acc[r]));
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      float32x4_t pairs[2];  // lanes i and i + 2, of two tokens each
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        float64x2_t a = sums[2 * j][r], b = sums[2 * j + 1][r];
        pairs[j] = vaddq_f32(vreinterpretq_f32_f64(vzip1q_f64(a, b)),
                             vreinterpretq_f32_f64(vzip2q_f64(a, b)));
      }
      float32x4_t sum = vpaddq_f32(pairs[0], pairs[1]);
      vst1q_f32(scores + r * kLeafTokens + first, vmulq_n_f32(sum, scale));
    }
  }
#else
  for (int token = 0; token < kPageBlock; ++token) {
    F32x16 acc[kRows];
    lane_dots<kRows, D>(q, k + token * stride, acc);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) scores[r * kLeafTokens + token] = row_sum(acc[r]) * scale;
  }
#endif
}

#if defined(SPECOPS_AVX512)
// Rearranges a block of K, which pays off for many rows: afterwards a vector holds the same quarter
// of the lanes of four tokens, so the first two levels of the tree need no shuffles. The additions
// are the same as in score_block.
template <typename T, int D>
SPECOPS_FLATTEN void pack_block(const T* k, int64_t stride, T* packed) {
  constexpr int kWidth = 64 / sizeof(T);
  for (int quad = 0; quad < 4; ++quad) {
    for (int i = 0; i < D; i += kWidth) {
      __m512i x[4], y[4];
      for (int j = 0; j < 4; ++j) x[j] = _mm512_loadu_si512(k + (quad + 4 * j) * stride + i);
      y[0] = _mm512_shuffle_i32x4(x[0], x[1], 0x44);
      y[1] = _mm512_shuffle_i32x4(x[0], x[1], 0xee);
      y[2] = _mm512_shuffle_i32x4(x[2], x[3], 0x44);
      y[3] = _mm512_shuffle_i32x4(x[2], x[3], 0xee);
      x[0] = _mm512_shuffle_i32x4(y[0], y[2], 0x88);
      x[1] = _mm512_shuffle_i32x4(y[0], y[2], 0xdd);
      x[2] = _mm512_shuffle_i32x4(y[1], y[3], 0x88);
      x[3] = _mm512_shuffle_i32x4(y[1], y[3], 0xdd);
      for (int j = 0; j < 4; ++j) _mm512_storeu_si512(packed + (j * 4 + quad) * D + i, x[j]);
    }
  }
}

// Computes the scores' lanes of one quarter from packed keys: acc[quad][r] holds quarter `quarter`
// of the lanes of the tokens quad, quad + 4, quad + 8 and quad + 12.
template <typename T, int kRows, int D>
inline void quarter_dots(const T* const* q, const T* packed, int quarter, F32x16 acc[4][kRows]) {
  constexpr int kWidth = 64 / sizeof(T);
  const T* k = packed + quarter * 4 * D;
#pragma GCC unroll 16
  for (int i = 0; i < D; i += kWidth) {
    typename Element<T>::Vec x[kRows];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      __m128i part =
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(q[r] + i + quarter * (kWidth / 4)));
      __m512i word = _mm512_broadcast_i32x4(part);
      std::memcpy(&x[r], &word, 64);
    }
#pragma GCC unroll 16
    for (int quad = 0; quad < 4; ++quad) {
      typename Element<T>::Vec y;
      __m512i word = _mm512_loadu_si512(k + quad * D + i);
      std::memcpy(&y, &word, 64);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        acc[quad][r] = accumulate(i == 0 ? zero() : acc[quad][r], x[r], y);
      }
    }
  }
}

template <typename T, int kRows, int D>
SPECOPS_FLATTEN void score_packed(const T* const* q, const T* packed, float scale, float* scores) {
  F32x16 quads[4][kRows], other[4][kRows], more[4][kRows];
  quarter_dots<T, kRows, D>(q, packed, 0, quads);
  quarter_dots<T, kRows, D>(q, packed, 2, other);
#pragma GCC unroll 16
  for (int i = 0; i < 4 * kRows; ++i) {
    F32x16& sum = quads[i / kRows][i % kRows];
    sum = add(sum, other[i / kRows][i % kRows]);
  }
  quarter_dots<T, kRows, D>(q, packed, 1, other);
  quarter_dots<T, kRows, D>(q, packed, 3, more);
#pragma GCC unroll 16
  for (int i = 0; i < 4 * kRows; ++i) {
    F32x16& sum = quads[i / kRows][i % kRows];
    sum = add(sum, add(other[i / kRows][i % kRows], more[i / kRows][i % kRows]));
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    __m512 halves[2];
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      __m512d a = _mm512_castps_pd(quads[2 * half][r].v);
      __m512d b = _mm512_castps_pd(quads[2 * half + 1][r].v);
      halves[half] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                                   _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    F32x16 sum{_mm512_add_ps(_mm512_shuffle_ps(halves[0], halves[1], 0x88),
                             _mm512_shuffle_ps(halves[0], halves[1], 0xdd))};
    store(scores + r * kLeafTokens, mul(sum, set1(scale)));
  }
}
#endif

// Returns the address of row r's weight at a step. RowWeights store one row after another, each
// with the tokens of the leaf. LaneWeights (one row per lane) store one step after another, each
// with the rows of the tile.
template <typename T>
struct RowWeights {
  const typename Element<T>::Prob* p;
  const auto* at(int r, int step) const { return p + r * kLeafTokens + step * Element<T>::kStep; }
};
struct LaneWeights {
  const bfloat16* p;
  const bfloat16* at(int r, int step) const { return p + 2 * (step * kMaxTile + r); }
};
// Factors for folding a leaf directly into each row's state: `kept` multiplies the state and
// `taken` the leaf.
struct RowFold {
  const float* kept = nullptr;  // nullptr: do not fold
  const float* taken = nullptr;
};

// Computes o[r] (+)= sum over the steps [begin, end) of p[r] * v, for kRows rows and kParts * 16
// columns from part `part` on. `width`: number of columns of V.
template <typename T, int kRows, int kParts, bool kPacked, typename Weights>
inline void weigh_tile(const Weights& p,
                       const LeafKv<T>& kv,
                       const T* packed_v,
                       int width,
                       int begin,
                       int end,
                       int part,
                       bool fresh,
                       float* const* o,
                       const RowFold& fold_with,
                       LeafPrefetch& prefetch) {
  using Vec = typename Element<T>::Vec;
  constexpr int kStep = Element<T>::kStep;
  F32x16 acc[kRows][kParts];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < kParts; ++i) {
      acc[r][i] = fresh ? zero() : load(o[r] + (part + i) * kLanes);
    }
  }
  for (int step = begin; step < end;) {
    prefetch.issue();
    int block = step * kStep / kPageBlock;
    int stop = (block + 1) * kPageBlock / kStep;
    stop = stop < end ? stop : end;
    const T* v = kPacked ? packed_v + (static_cast<int64_t>(step) * width + part * kLanes) * kStep
                         : kv.v[block] + (step * kStep % kPageBlock) * kv.stride + part * kLanes;
    for (; step < stop; ++step) {
      Vec x[kParts];
      if constexpr (kPacked && kStep == 2) {
#pragma GCC unroll 8
        for (int i = 0; i < kParts; ++i) x[i] = load_pairs(v + 32 * i);
      } else if constexpr (kParts == 1) {
        x[0] = half_columns(v, v + kv.stride);
      } else {
#pragma GCC unroll 4
        for (int i = 0; i < kParts; i += 2) {
          columns(v + i * kLanes, v + i * kLanes + kv.stride, x + i);
        }
      }
      v += kPacked ? width * kStep : kStep * kv.stride;
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        Vec weight = broadcast_step(p.at(r, step));
#pragma GCC unroll 16
        for (int i = 0; i < kParts; ++i) acc[r][i] = accumulate(acc[r][i], weight, x[i]);
      }
    }
  }
  if (fold_with.kept == nullptr) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int i = 0; i < kParts; ++i) store(o[r] + (part + i) * kLanes, acc[r][i]);
    }
    return;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    F32x16 kept = set1(fold_with.kept[r]), taken = set1(fold_with.taken[r]);
#pragma GCC unroll 16
    for (int i = 0; i < kParts; ++i) {
      float* at = o[r] + (part + i) * kLanes;
      store(at, fma(acc[r][i], taken, mul(load(at), kept)));
    }
  }
}

// Computes the same for all columns of V. `width` is a run-time argument, because as a template
// argument it would compile all of these tiles again for every head size.
template <typename T, int kRows, bool kPacked, typename Weights>
inline void weigh(const Weights& p,
                  const LeafKv<T>& kv,
                  const T* packed_v,
                  int width,
                  int begin,
                  int end,
                  bool fresh,
                  float* const* o,
                  const RowFold& fold_with,
                  LeafPrefetch& prefetch) {
#if defined(SPECOPS_AVX512)
  constexpr int kParts = kRows <= 3 ? 8 : kRows <= 6 ? 4 : 2;
#else
  constexpr int kParts = kRows <= 1 ? 4 : kRows <= 2 ? 2 : 1;
#endif
  int all = width / kLanes, part = 0;
  for (; part + kParts <= all; part += kParts) {
    weigh_tile<T, kRows, kParts, kPacked>(
        p, kv, packed_v, width, begin, end, part, fresh, o, fold_with, prefetch);
  }
  // The width is a multiple of 32 columns, so only even numbers of parts remain.
  if constexpr (kParts > 4) {
    for (; part + 4 <= all; part += 4) {
      weigh_tile<T, kRows, 4, kPacked>(
          p, kv, packed_v, width, begin, end, part, fresh, o, fold_with, prefetch);
    }
  }
  if constexpr (kParts > 2) {
    for (; part + 2 <= all; part += 2) {
      weigh_tile<T, kRows, 2, kPacked>(
          p, kv, packed_v, width, begin, end, part, fresh, o, fold_with, prefetch);
    }
  }
}

// Adds one pair of tokens of which the row sees only one. V of the other token is replaced by zero,
// whatever the cache holds there.
template <typename T>
void weigh_half_pair(const typename Element<T>::Prob* p,
                     const LeafKv<T>& kv,
                     int width,
                     int step,
                     int lo,
                     int hi,
                     bool fresh,
                     float* o) {
  using Vec = typename Element<T>::Vec;
  int token = step * Element<T>::kStep;
  const T* v = kv.v[token / kPageBlock] + (token % kPageBlock) * kv.stride;
  Vec weight = broadcast_step(p + token);
  for (int i = 0; i < width; i += 32) {
    Vec x[2];
    columns(v + i, v + i + kv.stride, x);
    for (int j = 0; j < 2; ++j) {
      F32x16 acc = fresh ? zero() : load(o + i + j * kLanes);
      Vec kept = keep_halves(x[j], token >= lo, token + 1 < hi);
      store(o + i + j * kLanes, accumulate(acc, weight, kept));
    }
  }
}

// Computes P V for kRows rows. Steps in which every row sees all tokens run for all rows together;
// the steps before and after them run row by row. Each row has the same additions in the same order
// either way.
template <typename T, int kRows, bool kPacked>
void weigh_rows(const typename Element<T>::Prob* p,
                const LeafKv<T>& kv,
                const T* packed_v,
                int width,
                const int* lo,
                const int* hi,
                float* const* o,
                LeafPrefetch& prefetch) {
  constexpr int kStep = Element<T>::kStep;
  int begin = (lo[kRows - 1] + kStep - 1) / kStep, end = hi[0] / kStep;
  bool together = begin < end;
  if (!together) begin = end = kLeafTokens;
  bool fresh[kRows];
  bool all_fresh = true;
  // Adds the tokens [from, to) to row r: at each end a half pair if needed, and whole steps between
  // them.
  auto alone = [&](int r, int from, int to) {
    if (from >= to) return;
    int first = (from + kStep - 1) / kStep, last = to / kStep;
    const auto* weights = p + r * kLeafTokens;
    if (first * kStep != from) {
      weigh_half_pair<T>(weights, kv, width, first - 1, from, to, fresh[r], o[r]);
      fresh[r] = false;
    }
    if (first < last) {
      weigh<T, 1, kPacked>(
          RowWeights<T>{weights}, kv, packed_v, width, first, last, fresh[r], o + r, {}, prefetch);
      fresh[r] = false;
    }
    if (last * kStep != to && last >= first) {
      weigh_half_pair<T>(weights, kv, width, last, from, to, fresh[r], o[r]);
      fresh[r] = false;
    }
  };
  for (int r = 0; r < kRows; ++r) {
    fresh[r] = true;
    alone(r, lo[r], hi[r] < begin * kStep ? hi[r] : begin * kStep);
    all_fresh = all_fresh && fresh[r];
  }
  if (!together) return;
  for (int r = 0; r < kRows && !all_fresh; ++r) {
    if (fresh[r]) std::memset(o[r], 0, width * sizeof(float));
  }
  weigh<T, kRows, kPacked>(
      RowWeights<T>{p}, kv, packed_v, width, begin, end, all_fresh, o, {}, prefetch);
  for (int r = 0; r < kRows; ++r) {
    fresh[r] = false;
    alone(r, end * kStep, hi[r]);
  }
}

// Computes probabilities relative to the row's maximum m, and their sum l, over the tokens that a
// row sees. If tokens have scales, scores are first multiplied by those of K, and the stored
// probabilities by those of V; l is the sum without the scales of V. Scales of tokens that the row
// does not see may be NaN.
template <typename T, bool kScaled>
SPECOPS_FLATTEN void softmax(const Tile<T>& tile,
                             int first,
                             int last,
                             const float* all_scores,
                             [[maybe_unused]] const float* k_scales,
                             [[maybe_unused]] const float* v_scales,
                             typename Element<T>::Prob* probs,
                             float* m,
                             float* l) {
  for (int row = first; row < last; ++row) {
    uint64_t seen =
        (tile.hi[row] < 64 ? (uint64_t{1} << tile.hi[row]) : 0) - (uint64_t{1} << tile.lo[row]);
    seen &= ~tile.hidden[row];
    const float* scores = all_scores + row * kLeafTokens;
    F32x16 s[kLeafBlocks];
    for (int i = 0; i < kLeafBlocks; ++i) {
      s[i] = load(scores + i * kPageBlock);
      if constexpr (kScaled) s[i] = mul(s[i], load(k_scales + i * kPageBlock));
    }
    if (seen != ~uint64_t{0}) {
      for (int i = 0; i < kLeafBlocks; ++i) s[i] = keep_lanes(s[i], seen >> (16 * i) & 0xffff);
    }
    float top = row_max(max(max(s[0], s[1]), max(s[2], s[3])));
    F32x16 shift = set1(top == -INFINITY ? 0.0f : top);
    for (int i = 0; i < kLeafBlocks; ++i) {
      s[i] = exp(sub(s[i], shift));
      F32x16 weight = s[i];
      if constexpr (kScaled) {
        weight = mul(weight, load(v_scales + i * kPageBlock));
        if (seen != ~uint64_t{0}) weight = keep_lanes(weight, seen >> (16 * i) & 0xffff, 0.0f);
      }
      store_prob(probs + row * kLeafTokens + i * kPageBlock, weight);
    }
    m[row] = top;
    l[row] = row_sum(add(add(s[0], s[1]), add(s[2], s[3])));
  }
}

// Calls fn with the largest compiled tile size of at most `rows`, as an integral constant.
template <int... kSizes>
struct TileSizes {
  template <typename Fn>
  static int pick(int rows, Fn&& fn) {
    int taken = 0;
    (void)((kSizes <= rows ? (fn.template operator()<kSizes>(), taken = kSizes, true) : false) ||
           ...);
    return taken;
  }
};
#if defined(SPECOPS_AVX512)
using ScoreTiles = TileSizes<2, 1>;
template <typename T>
using WeighTiles = std::conditional_t<sizeof(T) == 2 && Element<T>::kStep == 2,
                                      TileSizes<12, 10, 8, 6, 5, 4, 2, 1>,
                                      TileSizes<8, 4, 2, 1>>;
using PackedTiles = TileSizes<12, 6, 4, 2, 1>;
#elif defined(SPECOPS_AVX2) || defined(SPECOPS_NEON)
using ScoreTiles = TileSizes<4, 2, 1>;
template <typename T>
using WeighTiles = TileSizes<4, 2, 1>;
using PackedTiles = TileSizes<4, 2, 1>;
#else
using ScoreTiles = TileSizes<1>;
template <typename T>
using WeighTiles = TileSizes<2, 1>;
using PackedTiles = TileSizes<2, 1>;
#endif

// Returns about how many times reduce_leaf calls prefetch.issue() for `rows` rows.
inline int64_t prefetch_places(int64_t rows) {
  int64_t of_scores = kLeafBlocks * ((rows + 1) / 2);
  int64_t of_values = kLeafBlocks * (rows <= 3 ? 1 : 2) * ((rows + 11) / 12);
  return of_scores + 1 + of_values + 2 * kLeafBlocks;
}

// Packs V of the steps [begin, end), so that the tokens of a step are adjacent.
template <typename T, int D>
inline void pack_values(const LeafKv<T>& kv, int begin, int end, T* packed_v) {
  for (int step = begin; step < end; ++step) {
    int token = step * Element<T>::kStep;
    const T* v = kv.v[token / kPageBlock] + (token % kPageBlock) * kv.stride;
    T* dst = packed_v + static_cast<int64_t>(token) * D;
    if constexpr (Element<T>::kStep == 2) {
      for (int i = 0; i < D; i += 32) {
        BF16x32 x[2];
        columns(v + i, v + i + kv.stride, x);
        std::memcpy(static_cast<void*>(dst + 2 * i), x, 128);
      }
    } else {
      std::memcpy(static_cast<void*>(dst), v, D * sizeof(T));
    }
  }
}

// Reduces one leaf for one tile, from an empty state. m, l: per row; l = 0 if the row sees nothing.
// o[r]: the output before the division by l, written only if l is not 0. kScaled: the leaf is in
// `raw`, its scales are in `own`, and V is widened into the memory of kv.
template <typename T, int D, bool kScaled>
void reduce_leaf(const Tile<T>& tile,
                 const LeafKv<T>& kv,
                 [[maybe_unused]] const RawHead& raw,
                 float scale,
                 float* m,
                 float* l,
                 float* const* o,
                 Scratch<T, D>& own) {
  constexpr int kColumns = kValueDim<D>;
  int first = 0, last = tile.rows;
  for (; first < last && tile.lo[first] >= tile.hi[first]; ++first) l[first] = 0.0f;
  for (; last > first && tile.lo[last - 1] >= tile.hi[last - 1]; --last) l[last - 1] = 0.0f;
  if (first == last) return;
  bool packed = last - first >= kPackedTile;

  [[maybe_unused]] const float* wide_q[kMaxTile];
  if constexpr (kWidensQueries<T>) {
    for (int row = first; row < last; ++row) {
      float* wide = own.wide_q + row * D;
      widen_query<D>(tile.q[row], wide);
      wide_q[row] = wide;
    }
  }

  // Scores are computed block by block, so that a block of K stays in L1 for all rows.
  int first_block = tile.lo[first] / kPageBlock, last_block = (tile.hi[last - 1] - 1) / kPageBlock;
  for (int block = first_block; block <= last_block; ++block) {
    const T* k = kv.k[block];
    if constexpr (kScaled) {
      own.prefetch.issue();
      widen_block<T, D>(raw.k[block], raw, own.wide_k);
      k = own.wide_k;
    }
    float* scores = own.scores + block * kPageBlock;
#if defined(SPECOPS_AVX512)
    if constexpr (!std::is_same_v<T, float16>) {
      if (last - first >= kPackedScores) {
        pack_block<T, D>(k, kv.stride, own.packed_k);
        own.prefetch.issue();
        for (int row = first; row < last;) {
          own.prefetch.issue();
          row += ScoreTiles::pick(last - row, [&]<int kRows>() {
            score_packed<T, kRows, D>(
                tile.q + row, own.packed_k, scale, scores + row * kLeafTokens);
          });
        }
        continue;
      }
    }
#endif
    for (int row = first; row < last;) {
      own.prefetch.issue();
      row += ScoreTiles::pick(last - row, [&]<int kRows>() {
        float* at = scores + row * kLeafTokens;
        if constexpr (kWidensQueries<T>) {
          score_block<float, T, kRows, D>(wide_q + row, k, kv.stride, scale, at);
        } else {
          score_block<T, T, kRows, D>(tile.q + row, k, kv.stride, scale, at);
        }
      });
    }
  }

  own.prefetch.issue();
  softmax<T, kScaled>(tile, first, last, own.scores, own.k_scales, own.v_scales, own.probs, m, l);

  if constexpr (kScaled) {
    for (int block = first_block; block <= last_block; ++block) {
      own.prefetch.issue();
      widen_block<T, D>(raw.v[block], raw, own.wide_v + block * kPageBlock * D);
    }
  }
  if (packed) {
    // A last pair with one visible token is read in place.
    pack_values<T, kColumns>(kv,
                             tile.lo[first] / Element<T>::kStep,
                             tile.hi[last - 1] / Element<T>::kStep,
                             own.packed_v);
  }
  for (int row = first; row < last;) {
    const auto* probs = own.probs + row * kLeafTokens;
    if (packed) {
      row += PackedTiles::pick(last - row, [&]<int kRows>() {
        weigh_rows<T, kRows, true>(
            probs, kv, own.packed_v, kColumns, tile.lo + row, tile.hi + row, o + row, own.prefetch);
      });
    } else {
      row += WeighTiles<T>::pick(last - row, [&]<int kRows>() {
        weigh_rows<T, kRows, false>(
            probs, kv, nullptr, kColumns, tile.lo + row, tile.hi + row, o + row, own.prefetch);
      });
    }
  }
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
