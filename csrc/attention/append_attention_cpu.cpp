// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <type_traits>

#include "attention/append_attention.h"
#include "common/parallel.h"
#include "common/simd.h"

namespace specops::SPECOPS_ISA {
namespace {

// Everything it calls is inlined: the compiler leaves some of these small loops as calls, which
// send their vectors through memory.
#define SPECOPS_FLATTEN __attribute__((noinline, flatten))

constexpr int kLeaf = static_cast<int>(kAttentionLeaf);
constexpr int kBlock = 16;  // tokens that always lie in one page, at one stride
constexpr int kBlocks = kLeaf / kBlock;
constexpr int kMaxTile = static_cast<int>(kAttentionTile);
constexpr int kWholeTile = 60;  // rows of all tiles but the last: whole vectors of rows
constexpr int kMaxHeadDim = 256;
constexpr int kPackedTile = 13;      // from here on a tile repays packing the leaf's K and V
constexpr int kPackedScores = 6;     // from here on it repays packing its K
constexpr int kMaxBundle = 256;      // rows of an item, which tiles share its K and V in L2
constexpr int kStateFloats = 32768;  // output state of one item: 128 KiB
constexpr int kMaxItemRows = kStateFloats / 64;
constexpr int64_t kAheadBytes = 1 << 18;  // K and V of one leaf that an item reads ahead into L2
constexpr int64_t kColdBytes = 1 << 20;   // more KV than this is taken to lie in memory
constexpr int64_t kSmallCost = 30000;     // cycles, below which threads are not woken
constexpr int kBatchSlice = 256;          // requests planned at once, on the stack

// ---- element types ----

// How a cache element enters the products. kUnit tokens form one step of P V; Vec holds kUnit
// elements in each of its 16 lanes.
template <typename T>
struct Element {
  using Prob = float;
  using Vec = F32x16;
  static constexpr int kUnit = 1;
};
template <>
struct Element<bfloat16> {
  using Prob = bfloat16;
  using Vec = BF16x32;
  static constexpr int kUnit = 2;
};

inline F32x16 accumulate(F32x16 acc, BF16x32 a, BF16x32 b) { return dot_pairs(acc, a, b); }
inline F32x16 accumulate(F32x16 acc, F32x16 a, F32x16 b) { return fma(a, b, acc); }
inline BF16x32 broadcast_unit(const bfloat16* p) { return broadcast_pair(p); }
inline F32x16 broadcast_unit(const float* p) { return set1(*p); }

// 32 columns of one unit of V as two vectors. bf16: rows a and b interleaved, in the order of
// columns that the instruction set gives for free; order_columns undoes it.
inline void columns(const float* a, const float*, F32x16 out[2]) {
  out[0] = load(a);
  out[1] = load(a + 16);
}
inline void columns(const float16* a, const float16*, F32x16 out[2]) {
  out[0] = load(a);
  out[1] = load(a + 16);
}
inline void columns(const bfloat16* a, const bfloat16* b, BF16x32 out[2]) {
#if defined(SPECOPS_AVX512)
  __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
  out[0].v = _mm512_unpacklo_epi16(x, y);
  out[1].v = _mm512_unpackhi_epi16(x, y);
#elif defined(SPECOPS_AVX2)
  for (int half = 0; half < 2; ++half) {
    __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a + 16 * half));
    __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + 16 * half));
    out[half].lo = _mm256_unpacklo_epi16(x, y);
    out[half].hi = _mm256_unpackhi_epi16(x, y);
  }
#else
  for (int i = 0; i < 32; ++i) {
    out[i / 16].v[i % 16] = a[i].bits | static_cast<uint32_t>(b[i].bits) << 16;
  }
#endif
}

// Brings accumulators of 32 columns back into the order of the columns.
template <typename T>
inline void order_columns([[maybe_unused]] F32x16* x) {
  if (Element<T>::kUnit == 1) return;
#if defined(SPECOPS_AVX512)
  __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  __m512 a = x[0].v, b = x[1].v;
  x[0].v = _mm512_permutex2var_ps(a, first, b);
  x[1].v = _mm512_permutex2var_ps(a, second, b);
#elif defined(SPECOPS_AVX2)
  for (int i = 0; i < 2; ++i) {
    __m256 a = x[i].lo, b = x[i].hi;
    x[i].lo = _mm256_permute2f128_ps(a, b, 0x20);
    x[i].hi = _mm256_permute2f128_ps(a, b, 0x31);
  }
#endif
}

// Keeps the first (second) element of each pair where `first` (`second`), zero elsewhere.
inline BF16x32 keep_halves(BF16x32 x, bool first, bool second) {
  uint32_t bits = (first ? 0xffffu : 0u) | (second ? 0xffff0000u : 0u);
#if defined(SPECOPS_AVX512)
  return {_mm512_and_si512(x.v, _mm512_set1_epi32(static_cast<int>(bits)))};
#elif defined(SPECOPS_AVX2)
  __m256i mask = _mm256_set1_epi32(static_cast<int>(bits));
  return {_mm256_and_si256(x.lo, mask), _mm256_and_si256(x.hi, mask)};
#else
  for (int i = 0; i < 16; ++i) x.v[i] &= bits;
  return x;
#endif
}
inline F32x16 keep_halves(F32x16 x, bool, bool) { return x; }

// x in the lanes whose bit is set, -inf elsewhere.
inline F32x16 keep_lanes(F32x16 x, uint32_t bits) {
#if defined(SPECOPS_AVX512)
  return {_mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), static_cast<__mmask16>(bits), x.v)};
#else
  float lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < kLanes; ++i) lanes[i] = bits >> i & 1 ? lanes[i] : -INFINITY;
  return load(lanes);
#endif
}

inline void store_prob(float* p, F32x16 x) { store(p, x); }
inline void store_prob(bfloat16* p, F32x16 x) {
#if defined(SPECOPS_ISA_avx512_bf16)
  __m256bh rounded = _mm512_cvtneps_pbh(x.v);
  std::memcpy(static_cast<void*>(p), &rounded, 32);
#else
  store(p, x);
#endif
}

// The tree of reduce_add and the value of reduce_max, without the trip through memory.
inline float row_sum(F32x16 x) {
#if defined(SPECOPS_AVX512)
  __m256 t = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
#elif defined(SPECOPS_AVX2)
  __m256 t = _mm256_add_ps(x.lo, x.hi);
#endif
#if defined(SPECOPS_AVX512) || defined(SPECOPS_AVX2)
  __m128 u = _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
  u = _mm_add_ps(u, _mm_movehl_ps(u, u));
  return _mm_cvtss_f32(_mm_add_ss(u, _mm_movehdup_ps(u)));
#else
  return reduce_add(x);
#endif
}
inline float row_max(F32x16 x) {
#if defined(SPECOPS_AVX512)
  __m256 t = _mm256_max_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
#elif defined(SPECOPS_AVX2)
  __m256 t = _mm256_max_ps(x.lo, x.hi);
#endif
#if defined(SPECOPS_AVX512) || defined(SPECOPS_AVX2)
  __m128 u = _mm_max_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
  u = _mm_max_ps(u, _mm_movehl_ps(u, u));
  return _mm_cvtss_f32(_mm_max_ss(u, _mm_movehdup_ps(u)));
#else
  return reduce_max(x);
#endif
}

// ---- reading ahead ----

// Reads one leaf of K and V into L2, for all heads of the item, before the arithmetic does: pieces
// of one head at the stride of a token never start the hardware's prefetcher, and prefetch
// instructions are dropped when the miss buffers are full. The blocks advance side by side, so that
// the start of a page that lies elsewhere in memory hides behind the other streams.
template <typename T>
void read_leaf(
    const T* const* k, const T* const* v, int64_t piece, int64_t pieces, int64_t stride) {
  const volatile char* streams[2 * kBlocks];
  int count = 0;
  for (int block = 0; block < kBlocks; ++block) {
    if (k[block] == nullptr) continue;
    streams[count++] = reinterpret_cast<const volatile char*>(k[block]);
    streams[count++] = reinterpret_cast<const volatile char*>(v[block]);
  }
  int64_t step = stride * static_cast<int64_t>(sizeof(T));
  int64_t bytes = piece * static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < pieces; ++i) {
    for (int64_t at = i * step; at < i * step + bytes; at += 64) {
      for (int stream = 0; stream < count; ++stream) (void)streams[stream][at];
    }
  }
}

// ---- one leaf ----

// The leaf's tokens: four blocks of 16, each at one token stride. A block nobody sees may be absent.
template <typename T>
struct LeafKv {
  const T* k[kBlocks];
  const T* v[kBlocks];
  int64_t stride;
};

// Rows of one tile at one leaf. Row r sees the tokens [lo[r], hi[r]); both grow with r.
template <typename T>
struct Tile {
  const T* q[kMaxTile];
  int lo[kMaxTile], hi[kMaxTile];
  int rows;
};

template <typename T>
struct Scratch {
  alignas(64) float scores[kMaxTile * kLeaf];
  alignas(64) typename Element<T>::Prob probs[kMaxTile * kLeaf];
  alignas(64) float leaf_o[kMaxTile * kMaxHeadDim];
  alignas(64) float states[2][kStateFloats];
  float leaf_m[kMaxTile], leaf_l[kMaxTile];
  float m[2][kMaxItemRows], l[2][kMaxItemRows];
  alignas(64) T packed_k[kBlock * kMaxHeadDim];
  alignas(64) T packed_v[kLeaf * kMaxHeadDim];
};

// One block per thread, made at its first leaf: thread_local arrays of this size would be zeroed in
// every thread that loads the module.
struct Arena {
  void* memory = nullptr;
  ~Arena() { std::free(memory); }
};
thread_local Arena arena;

template <typename T>
Scratch<T>& scratch() {
  static_assert(sizeof(Scratch<T>) <= sizeof(Scratch<float>));
  if (arena.memory == nullptr) arena.memory = std::aligned_alloc(64, sizeof(Scratch<float>));
  return *static_cast<Scratch<T>*>(arena.memory);
}

// q . k for kRows rows and one token: 16 lanes over head_dim, each a chain from zero.
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
template <int kRows, int D, typename T>
inline void lane_dots(const T* const* q, const T* k, F32x16* acc) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) acc[r] = zero();
#pragma GCC unroll 16
  for (int i = 0; i < D; i += kLanes) {
    F32x16 x = load(k + i);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) acc[r] = fma(load(q[r] + i), x, acc[r]);
  }
}

// Scores of a block's 16 tokens for kRows rows: scores[r * kLeaf + token]. The lanes of a token are
// added in the tree of reduce_add; on AVX-512 sixteen tokens share each level of it.
template <typename T, int kRows, int D>
SPECOPS_FLATTEN void score_block(
    const T* const* q, const T* k, int64_t stride, float scale, float* scores) {
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
    store(scores + r * kLeaf, mul(sum, set1(scale)));
  }
#else
  for (int token = 0; token < kBlock; ++token) {
    F32x16 acc[kRows];
    lane_dots<kRows, D>(q, k + token * stride, acc);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) scores[r * kLeaf + token] = row_sum(acc[r]) * scale;
  }
#endif
}

#if defined(SPECOPS_AVX512)
// Many rows share a block of K better when it is rearranged once: a vector then holds the same
// quarter of the lanes of four tokens, and the first two levels of the tree need no shuffles. The
// additions are those of score_block.
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

// acc[quad][r]: quarter `quarter` of the lanes of the tokens quad, quad + 4, quad + 8, quad + 12.
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
    store(scores + r * kLeaf, mul(sum, set1(scale)));
  }
}
#endif

// o[r] (+)= sum over units [begin, end) of p[r] * v, for kRows rows and kSlabs * 32 columns.
template <typename T, int kRows, int kSlabs, int D, bool kPacked>
inline void weigh_tile(const typename Element<T>::Prob* p,
                       const LeafKv<T>& kv,
                       const T* packed_v,
                       int begin,
                       int end,
                       int slab,
                       bool fresh,
                       float* const* o) {
  using Vec = typename Element<T>::Vec;
  constexpr int kUnit = Element<T>::kUnit;
  F32x16 acc[kRows][2 * kSlabs];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < 2 * kSlabs; ++i) {
      acc[r][i] = fresh ? zero() : load(o[r] + slab * 32 + i * kLanes);
    }
  }
  for (int unit = begin; unit < end;) {
    int block = unit * kUnit / kBlock;
    int stop = (block + 1) * kBlock / kUnit;
    stop = stop < end ? stop : end;
    const T* v = kPacked ? packed_v + (static_cast<int64_t>(unit) * D + slab * 32) * kUnit
                         : kv.v[block] + (unit * kUnit % kBlock) * kv.stride + slab * 32;
    for (; unit < stop; ++unit) {
      Vec x[2 * kSlabs];
#pragma GCC unroll 4
      for (int i = 0; i < kSlabs; ++i) {
        if constexpr (kPacked && kUnit == 2) {
          x[2 * i] = load_pairs(v + 64 * i);
          x[2 * i + 1] = load_pairs(v + 64 * i + 32);
        } else {
          columns(v + 32 * i, v + 32 * i + kv.stride, x + 2 * i);
        }
      }
      v += kPacked ? D * kUnit : kUnit * kv.stride;
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        Vec weight = broadcast_unit(p + r * kLeaf + unit * kUnit);
#pragma GCC unroll 16
        for (int i = 0; i < 2 * kSlabs; ++i) acc[r][i] = accumulate(acc[r][i], weight, x[i]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < 2 * kSlabs; ++i) store(o[r] + slab * 32 + i * kLanes, acc[r][i]);
  }
}

template <typename T, int kRows, int D, bool kPacked>
inline void weigh(const typename Element<T>::Prob* p,
                  const LeafKv<T>& kv,
                  const T* packed_v,
                  int begin,
                  int end,
                  bool fresh,
                  float* const* o) {
#if defined(SPECOPS_AVX512)
  constexpr int kWant = kRows <= 3 ? 4 : kRows <= 6 ? 2 : 1;
#else
  constexpr int kWant = kRows <= 1 ? 2 : 1;
#endif
  constexpr int kAll = D / 32;
  constexpr int kSlabs = kWant < kAll ? kWant : kAll;
  int slab = 0;
  for (; slab + kSlabs <= kAll; slab += kSlabs) {
    weigh_tile<T, kRows, kSlabs, D, kPacked>(p, kv, packed_v, begin, end, slab, fresh, o);
  }
  if constexpr (kAll % kSlabs != 0) {
    weigh_tile<T, kRows, kAll % kSlabs, D, kPacked>(p, kv, packed_v, begin, end, slab, fresh, o);
  }
}

// One pair of which the row sees only one half: the other half is zero, whatever the cache holds.
template <typename T, int D>
void weigh_half_pair(const typename Element<T>::Prob* p,
                     const LeafKv<T>& kv,
                     int unit,
                     int lo,
                     int hi,
                     bool fresh,
                     float* o) {
  using Vec = typename Element<T>::Vec;
  int token = unit * Element<T>::kUnit;
  const T* v = kv.v[token / kBlock] + (token % kBlock) * kv.stride;
  Vec weight = broadcast_unit(p + token);
  for (int i = 0; i < D; i += 32) {
    Vec x[2];
    columns(v + i, v + i + kv.stride, x);
    for (int j = 0; j < 2; ++j) {
      F32x16 acc = fresh ? zero() : load(o + i + j * kLanes);
      Vec kept = keep_halves(x[j], token >= lo, token + 1 < hi);
      store(o + i + j * kLanes, accumulate(acc, weight, kept));
    }
  }
}

// P V of kRows rows. Units that all of them see wholly run together; what remains at either end
// runs row by row. A row's own additions are the same ones in the same order either way.
template <typename T, int kRows, int D, bool kPacked>
void weigh_rows(const typename Element<T>::Prob* p,
                const LeafKv<T>& kv,
                const T* packed_v,
                const int* lo,
                const int* hi,
                float* const* o) {
  constexpr int kUnit = Element<T>::kUnit;
  int begin = (lo[kRows - 1] + kUnit - 1) / kUnit, end = hi[0] / kUnit;
  bool together = begin < end;
  if (!together) begin = end = kLeaf;
  bool fresh[kRows];
  bool all_fresh = true;
  // Row r over the tokens [from, to): a half pair, whole units, a half pair.
  auto alone = [&](int r, int from, int to) {
    if (from >= to) return;
    int first = (from + kUnit - 1) / kUnit, last = to / kUnit;
    const auto* weights = p + r * kLeaf;
    if (first * kUnit != from) {
      weigh_half_pair<T, D>(weights, kv, first - 1, from, to, fresh[r], o[r]);
      fresh[r] = false;
    }
    if (first < last) {
      weigh<T, 1, D, kPacked>(weights, kv, packed_v, first, last, fresh[r], o + r);
      fresh[r] = false;
    }
    if (last * kUnit != to && last >= first) {
      weigh_half_pair<T, D>(weights, kv, last, from, to, fresh[r], o[r]);
      fresh[r] = false;
    }
  };
  for (int r = 0; r < kRows; ++r) {
    fresh[r] = true;
    alone(r, lo[r], hi[r] < begin * kUnit ? hi[r] : begin * kUnit);
    all_fresh = all_fresh && fresh[r];
  }
  if (!together) return;
  for (int r = 0; r < kRows && !all_fresh; ++r) {
    if (fresh[r]) std::memset(o[r], 0, D * sizeof(float));
  }
  weigh<T, kRows, D, kPacked>(p, kv, packed_v, begin, end, all_fresh, o);
  for (int r = 0; r < kRows; ++r) {
    fresh[r] = false;
    alone(r, end * kUnit, hi[r]);
  }
}

// Probabilities, relative to the row's maximum m, and their sum l, over the tokens a row sees.
template <typename T>
SPECOPS_FLATTEN void softmax(const Tile<T>& tile,
                             int first,
                             int last,
                             const float* all_scores,
                             typename Element<T>::Prob* probs,
                             float* m,
                             float* l) {
  for (int row = first; row < last; ++row) {
    uint64_t seen =
        (tile.hi[row] < 64 ? (uint64_t{1} << tile.hi[row]) : 0) - (uint64_t{1} << tile.lo[row]);
    const float* scores = all_scores + row * kLeaf;
    F32x16 s[kBlocks];
    for (int i = 0; i < kBlocks; ++i) s[i] = load(scores + i * kBlock);
    if (seen != ~uint64_t{0}) {
      for (int i = 0; i < kBlocks; ++i) s[i] = keep_lanes(s[i], seen >> (16 * i) & 0xffff);
    }
    float top = row_max(max(max(s[0], s[1]), max(s[2], s[3])));
    F32x16 shift = set1(top == -INFINITY ? 0.0f : top);
    for (int i = 0; i < kBlocks; ++i) {
      s[i] = exp(sub(s[i], shift));
      store_prob(probs + row * kLeaf + i * kBlock, s[i]);
    }
    m[row] = top;
    l[row] = row_sum(add(add(s[0], s[1]), add(s[2], s[3])));
  }
}

// Calls fn with the largest compiled tile not above `rows`, as an integral constant.
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
using WeighTiles = std::conditional_t<sizeof(T) == 2 && Element<T>::kUnit == 2,
                                      TileSizes<12, 10, 8, 6, 5, 4, 2, 1>,
                                      TileSizes<8, 4, 2, 1>>;
using PackedTiles = TileSizes<12, 6, 2, 1>;
#else
using ScoreTiles = TileSizes<1>;
template <typename T>
using WeighTiles = TileSizes<2, 1>;
using PackedTiles = TileSizes<2, 1>;
#endif

// One leaf of one tile from a fresh state. m, l: of every row, l = 0 where the row sees nothing;
// o[r]: the unnormalised output, written where l is not 0.
template <typename T, int D>
void leaf(const Tile<T>& tile,
          const LeafKv<T>& kv,
          float scale,
          float* m,
          float* l,
          float* const* o,
          Scratch<T>& own) {
  int first = 0, last = tile.rows;
  for (; first < last && tile.lo[first] >= tile.hi[first]; ++first) l[first] = 0.0f;
  for (; last > first && tile.lo[last - 1] >= tile.hi[last - 1]; --last) l[last - 1] = 0.0f;
  if (first == last) return;
  bool packed = last - first >= kPackedTile;

  // Scores, block by block, so that a block of K stays in L1 for all rows.
  int first_block = tile.lo[first] / kBlock, last_block = (tile.hi[last - 1] - 1) / kBlock;
  for (int block = first_block; block <= last_block; ++block) {
    const T* k = kv.k[block];
    float* scores = own.scores + block * kBlock;
#if defined(SPECOPS_AVX512)
    if constexpr (!std::is_same_v<T, float16>) {
      if (last - first >= kPackedScores) {
        pack_block<T, D>(k, kv.stride, own.packed_k);
        for (int row = first; row < last;) {
          row += ScoreTiles::pick(last - row, [&]<int kRows>() {
            score_packed<T, kRows, D>(tile.q + row, own.packed_k, scale, scores + row * kLeaf);
          });
        }
        continue;
      }
    }
#endif
    for (int row = first; row < last;) {
      row += ScoreTiles::pick(last - row, [&]<int kRows>() {
        score_block<T, kRows, D>(tile.q + row, k, kv.stride, scale, scores + row * kLeaf);
      });
    }
  }

  softmax(tile, first, last, own.scores, own.probs, m, l);

  // P V.
  if (packed) {
    int units = tile.hi[last - 1] / Element<T>::kUnit;  // the last half pair is read in place
    for (int unit = tile.lo[first] / Element<T>::kUnit; unit < units; ++unit) {
      int token = unit * Element<T>::kUnit;
      const T* v = kv.v[token / kBlock] + (token % kBlock) * kv.stride;
      T* dst = own.packed_v + static_cast<int64_t>(token) * D;
      if constexpr (Element<T>::kUnit == 2) {
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
  for (int row = first; row < last;) {
    const auto* probs = own.probs + row * kLeaf;
    if (packed) {
      row += PackedTiles::pick(last - row, [&]<int kRows>() {
        weigh_rows<T, kRows, D, true>(
            probs, kv, own.packed_v, tile.lo + row, tile.hi + row, o + row);
      });
    } else {
      row += WeighTiles<T>::pick(last - row, [&]<int kRows>() {
        weigh_rows<T, kRows, D, false>(probs, kv, nullptr, tile.lo + row, tile.hi + row, o + row);
      });
    }
  }
}

// ---- states ----

// (m, l, o) of each row, folded with (m2, l2, o2). A state with l = 0 is empty, its o undefined.
// o2[r] may be row r of o itself where that state is empty.
SPECOPS_FLATTEN void fold(float* m,
                          float* l,
                          float* o,
                          const float* m2,
                          const float* l2,
                          float* const* o2,
                          int rows,
                          int width) {
  for (int first = 0; first < rows; first += kLanes) {
    int n = rows - first < kLanes ? rows - first : kLanes;
    F32x16 la = load_partial(l + first, n), lb = load_partial(l2 + first, n);
    F32x16 ma = load_partial(m + first, n), mb = load_partial(m2 + first, n);
    float empty_a[kLanes], empty_b[kLanes], a[kLanes], b[kLanes], top[kLanes], sum[kLanes];
    store(empty_a, la);
    store(empty_b, lb);
    store(a, ma);
    store(b, mb);
    for (int i = 0; i < n; ++i) {
      if (empty_a[i] == 0.0f) a[i] = -INFINITY;
      if (empty_b[i] == 0.0f) b[i] = -INFINITY;
      top[i] = a[i] > b[i] ? a[i] : b[i];
      if (top[i] == -INFINITY) top[i] = 0.0f;
    }
    for (int i = n; i < kLanes; ++i) a[i] = b[i] = top[i] = 0.0f;
    F32x16 fa = exp(sub(load(a), load(top))), fb = exp(sub(load(b), load(top)));
    store(sum, fma(lb, fb, mul(la, fa)));
    store(a, fa);
    store(b, fb);
    for (int i = 0; i < n; ++i) {
      int row = first + i;
      if (empty_b[i] == 0.0f) continue;
      m[row] = top[i];
      l[row] = sum[i];
      float* dst = o + static_cast<int64_t>(row) * width;
      const float* src = o2[row];
      if (src == dst) continue;
      if (empty_a[i] == 0.0f) {
        std::memcpy(dst, src, width * sizeof(float));
        continue;
      }
      F32x16 x = set1(a[i]), y = set1(b[i]);
      for (int j = 0; j < width; j += kLanes) {
        store(dst + j, fma(load(src + j), y, mul(load(dst + j), x)));
      }
    }
  }
}

// ---- one item ----

// A request as planned. Neighbours of one prefix, each with rows for no more than a tile, may form a
// bundle; any other request is a bundle of its own.
struct Request {
  int64_t batch_idx, qo_begin, qo_len, kv_len;
  int64_t tile_rows, tiles;
  int64_t first_leaf, last_leaf;  // of its rows together
  int64_t shared;                 // leading leaves that are those of the bundle's request before
  int64_t partial;                // where its chunk states begin in the workspace, in floats
  int64_t first_item;             // of the bundle; in a bundle, past its items
  // Of the bundle, in its first request.
  int64_t members;  // 0: the request is a later one of a bundle, or has no rows
  int64_t rows;     // (query row, query head of one KV head)
  int64_t bundle_first_leaf, bundle_last_leaf;
  int64_t heads_per_item, head_groups;
  int64_t chunks;  // above 1: each chunk is an item of its own, for the whole bundle
};

constexpr int64_t kChunkLeaves = kAttentionChunk / kAttentionLeaf;

inline int64_t chunks_of(const Request& r) {
  return r.last_leaf / kChunkLeaves - r.first_leaf / kChunkLeaves + 1;
}

// What one thread computes at a time: a tile of one request's rows or all rows of a bundle, some KV
// heads, some chunks.
struct Item {
  const Request* bundle;          // requests with rows, in turn, from here on
  int64_t first_row, num_rows;    // within the request, if it is alone in its bundle
  int64_t first_head, num_heads;  // KV heads
  int64_t first_leaf, last_leaf;  // inclusive
  bool cold;                      // KV is read once, and not expected in this core's cache
  bool partial;                   // the item's one chunk goes to the workspace, not to out
};

// A request's rows in an item.
struct Member {
  const Request* request;
  const int32_t* pages;
  int64_t last_position, last_leaf;
  int64_t first_seen, all_see;  // first position that any row sees, that all rows see
  int first_row, rows;          // (query row, query head of one KV head), in the item
};

// One finished row: o / l, and m + log l.
template <typename T, int D>
void write_row(
    const AppendAttentionParams& params, int64_t out_row, float m, float l, const float* o) {
  F32x16 inverse = set1(1.0f / l);
  T* out = static_cast<T*>(params.out) + out_row * D;
  for (int i = 0; i < D; i += 32) {
    F32x16 x[2] = {load(o + i), load(o + i + kLanes)};
    order_columns<T>(x);
    store(out + i, mul(x[0], inverse));
    store(out + i + kLanes, mul(x[1], inverse));
  }
  if (params.lse != nullptr) params.lse[out_row] = m + std::log(l);
}

// Leaves in order; within a leaf, the heads in turn. Writes the rows of out, or the chunk's states.
// A leaf that members share is computed for all of their rows at once; rows do not see each other,
// so a row's bits are those it has alone.
template <typename T, int D>
void attend(const AppendAttentionParams& params, const Item& item) {
  Scratch<T>& own = scratch<T>();
  int64_t group = params.num_qo_heads / params.num_kv_heads;
  int64_t width = params.num_kv_heads * D;
  int64_t window = params.sliding_window > 0 ? params.sliding_window : INT64_MAX;
  const T* caches[2] = {static_cast<const T*>(params.k_cache) + item.first_head * D,
                        static_cast<const T*>(params.v_cache) + item.first_head * D};

  // The rows of the item.
  Member members[kMaxBundle];
  const T* first_q[kMaxBundle];
  int64_t positions[kMaxBundle], out_rows[kMaxBundle];
  int num_members = 0, rows = 0;
  for (const Request* r = item.bundle; num_members < item.bundle->members; ++r) {
    if (r->qo_len == 0) continue;
    bool whole = item.bundle->members > 1;
    int64_t first_row = whole ? 0 : item.first_row, num_rows = whole ? r->qo_len : item.num_rows;
    int64_t position = r->kv_len - r->qo_len + first_row;
    Member& member = members[num_members++];
    member.request = r;
    member.pages = params.kv_indices + params.kv_indptr[r->batch_idx];
    member.last_position = position + num_rows - 1;
    member.last_leaf = member.last_position / kLeaf;
    member.first_seen = position >= window ? position - window + 1 : 0;
    member.all_see = member.last_position >= window ? member.last_position - window + 1 : 0;
    member.first_row = rows;
    member.rows = static_cast<int>(num_rows * group);
    for (int64_t row = r->qo_begin + first_row; row < r->qo_begin + first_row + num_rows; ++row) {
      for (int64_t i = 0; i < group; ++i, ++rows) {
        int64_t head = item.first_head * group + i;
        first_q[rows] = static_cast<const T*>(params.q) + row * params.q_stride + head * D;
        positions[rows] = position;
        out_rows[rows] = row * params.num_qo_heads + head;
      }
      ++position;
    }
  }
  int64_t item_rows = rows * item.num_heads;
  int chunk = 0, result = 1;  // which of the scratch states is which
  bool has_result = false;
  for (int64_t i = 0; i < item_rows; ++i) own.l[0][i] = own.l[1][i] = 0.0f;

  int page_bits = params.page_size == 16 ? 4 : params.page_size == 32 ? 5 : 6;
  // Where the tokens of a leaf lie; blocks outside what the rows see may have no page.
  auto blocks = [&](const Member& member, int64_t base, const T** k, const T** v) {
    for (int block = 0; block < kBlocks; ++block) {
      int64_t token = base + block * kBlock;
      bool used = token <= member.last_position && token + kBlock > member.first_seen;
      k[block] = v[block] = nullptr;
      if (!used) continue;
      int64_t page = member.pages[token >> page_bits];
      int64_t slot = (page << page_bits) + (token & (params.page_size - 1));
      k[block] = caches[0] + slot * width;
      v[block] = caches[1] + slot * width;
    }
  };

  LeafKv<T> kv, head_kv;
  kv.stride = head_kv.stride = width;
  Tile<T> tile;
  // One leaf of the rows [first, last), which all read it from where this member does.
  auto attend_leaf = [&](const Member& member, int64_t base, int first, int last) {
    blocks(member, base, kv.k, kv.v);
    if (item.cold) {
      bool joined = item.num_heads == params.num_kv_heads;
      read_leaf(kv.k, kv.v, (joined ? kBlock : 1) * item.num_heads * D, joined ? 1 : kBlock, width);
    }
    int tile_rows = last - first <= kMaxTile ? last - first : kWholeTile;
    for (int64_t head = 0; head < item.num_heads; ++head) {
      for (int block = 0; block < kBlocks; ++block) {
        head_kv.k[block] = kv.k[block] == nullptr ? nullptr : kv.k[block] + head * D;
        head_kv.v[block] = kv.v[block] == nullptr ? nullptr : kv.v[block] + head * D;
      }
      for (int begin = first; begin < last; begin += tile_rows) {
        tile.rows = last - begin < tile_rows ? last - begin : tile_rows;
        int64_t at = head * rows + begin;
        float* m = own.m[chunk] + at;
        float* l = own.l[chunk] + at;
        float* o = own.states[chunk] + at * D;
        float* dst[kMaxTile];
        for (int row = 0; row < tile.rows; ++row) {
          int64_t position = positions[begin + row], end = position + 1 - base;
          int64_t seen = position >= window ? position - window + 1 : 0;
          tile.lo[row] = static_cast<int>(seen > base ? seen - base : 0);
          tile.hi[row] = static_cast<int>(end < kLeaf ? end : kLeaf);
          tile.q[row] = first_q[begin + row] + head * group * D;
          dst[row] = (l[row] == 0.0f ? o : own.leaf_o) + row * D;
        }
        leaf<T, D>(tile, head_kv, params.sm_scale, own.leaf_m, own.leaf_l, dst, own);
        fold(m, l, o, own.leaf_m, own.leaf_l, dst, tile.rows, D);
      }
    }
  };

  for (int64_t leaf_idx = item.first_leaf; leaf_idx <= item.last_leaf; ++leaf_idx) {
    int64_t base = leaf_idx * kLeaf;
    for (int at = 0; at < num_members;) {
      const Member& member = members[at++];
      int last = member.first_row + member.rows;
      // A window may begin inside the leaf, and then not every row reads all of it.
      bool all = base >= member.all_see;
      for (; all && at < num_members && members[at].request->shared > leaf_idx; ++at) {
        all = base >= members[at].all_see;
        if (!all) break;
        last += members[at].rows;
      }
      if (leaf_idx > member.last_leaf || base + kLeaf <= member.first_seen) continue;
      attend_leaf(member, base, member.first_row, last);
    }
    bool chunk_ends = (leaf_idx + 1) * kLeaf % kAttentionChunk == 0;
    if (!chunk_ends && leaf_idx != item.last_leaf) continue;
    if (has_result) {
      for (int64_t row = 0; row < item_rows; row += kMaxTile) {
        int count = static_cast<int>(item_rows - row < kMaxTile ? item_rows - row : kMaxTile);
        float* src[kMaxTile];
        for (int i = 0; i < count; ++i) src[i] = own.states[chunk] + (row + i) * D;
        fold(own.m[result] + row,
             own.l[result] + row,
             own.states[result] + row * D,
             own.m[chunk] + row,
             own.l[chunk] + row,
             src,
             count,
             D);
      }
    } else {
      has_result = true;
      chunk = 1 - chunk;
      result = 1 - result;
    }
    for (int64_t row = 0; row < item_rows; ++row) own.l[chunk][row] = 0.0f;
  }

  if (!item.partial) {
    for (int64_t head = 0; head < item.num_heads; ++head) {
      for (int row = 0; row < rows; ++row) {
        int64_t at = head * rows + row;
        write_row<T, D>(params,
                        out_rows[row] + head * group,
                        own.m[result][at],
                        own.l[result][at],
                        own.states[result] + at * D);
      }
    }
    return;
  }
  for (int i = 0; i < num_members; ++i) {
    const Member& member = members[i];
    int64_t index = item.first_leaf / kChunkLeaves - member.request->first_leaf / kChunkLeaves;
    if (index < 0 || index >= chunks_of(*member.request)) continue;
    int64_t all = member.rows * params.num_kv_heads;
    float* state = params.workspace + member.request->partial + index * all * (D + 2);
    for (int64_t head = 0; head < item.num_heads; ++head) {
      int64_t src = head * rows + member.first_row;
      int64_t dst = (item.first_head + head) * member.rows;
      std::memcpy(state + dst, own.m[result] + src, member.rows * sizeof(float));
      std::memcpy(state + all + dst, own.l[result] + src, member.rows * sizeof(float));
      std::memcpy(
          state + 2 * all + dst * D, own.states[result] + src * D, member.rows * D * sizeof(float));
    }
  }
}

// Folds the chunk states of one split request's rows [begin, end), at most kLanes of them.
template <typename T, int D>
void join(const AppendAttentionParams& params, const Request& request, int64_t begin, int64_t end) {
  Scratch<T>& own = scratch<T>();
  int64_t group = params.num_qo_heads / params.num_kv_heads;
  int64_t rows = request.qo_len * params.num_qo_heads;
  int count = static_cast<int>(end - begin);
  for (int i = 0; i < count; ++i) own.l[0][i] = 0.0f;
  for (int64_t chunk = 0; chunk < chunks_of(request); ++chunk) {
    float* state = params.workspace + request.partial + chunk * rows * (D + 2);
    float* src[kLanes];
    for (int i = 0; i < count; ++i) src[i] = state + 2 * rows + (begin + i) * D;
    fold(own.m[0], own.l[0], own.states[0], state + begin, state + rows + begin, src, count, D);
  }
  int64_t tile_rows = request.qo_len * group;
  for (int i = 0; i < count; ++i) {
    int64_t head = (begin + i) / tile_rows, local = (begin + i) % tile_rows;
    int64_t qo_row = request.qo_begin + local / group;
    write_row<T, D>(params,
                    qo_row * params.num_qo_heads + head * group + local % group,
                    own.m[0][i],
                    own.l[0][i],
                    own.states[0] + static_cast<int64_t>(i) * D);
  }
}

// ---- the launch ----

// Leading leaves that two requests have in common: those of the narrowest group with both.
inline int64_t shared_leaves(const AppendAttentionParams& params, int64_t a, int64_t b) {
  int64_t tokens = 0;
  for (int64_t level = 0; level < params.num_prefix_levels; ++level) {
    const int32_t* leaders = params.prefix_leaders + level * params.batch;
    if (leaders[a] != leaders[b]) break;
    tokens = params.prefix_lens[level * params.batch + b];
  }
  return tokens / kLeaf;
}

// Cuts the requests into items and returns how many. Only the cutting knows of threads: it decides
// where states live, never the order in which they are folded. small: not worth waking a thread;
// cold: the KV does not fit a cache, so it pays to read it in memory order.
template <typename T, int D>
int64_t plan(const AppendAttentionParams& params,
             int64_t first_request,
             int64_t count,
             Request* requests,
             bool* small,
             bool* cold) {
  int64_t group = params.num_qo_heads / params.num_kv_heads;
  int64_t threads = num_threads();
  int64_t all_rows =
      (params.qo_indptr[first_request + count] - params.qo_indptr[first_request]) * group;
  // A bundle is cut into KV heads and chunks; where these are too few for the threads, it gets no
  // more than its share of the rows.
  auto bundle_rows = [&](const Request& first) {
    int64_t pieces = params.num_kv_heads * (params.workspace_size > 0 ? chunks_of(first) : 1);
    int64_t share = all_rows / ((threads + pieces - 1) / pieces);
    int64_t most = kStateFloats / D < kMaxBundle ? kStateFloats / D : kMaxBundle;
    return share < most ? share : most;
  };
  int64_t costs[kBatchSlice], total = 0, kv_bytes = 0;
  int64_t head = -1, before = -1;  // of the bundle that may go on, and its last request
  for (int64_t i = 0; i < count; ++i) {
    Request& r = requests[i];
    r.batch_idx = first_request + i;
    r.qo_begin = params.qo_indptr[r.batch_idx];
    r.qo_len = params.qo_indptr[r.batch_idx + 1] - r.qo_begin;
    r.kv_len = params.kv_lens[r.batch_idx];
    r.partial = -1;
    r.shared = r.members = r.chunks = 0;
    costs[i] = 0;
    if (r.qo_len == 0) continue;
    int64_t seen = params.sliding_window > 0 ? r.kv_len - r.qo_len - params.sliding_window + 1 : 0;
    r.first_leaf = (seen > 0 ? seen : 0) / kLeaf;
    r.last_leaf = (r.kv_len - 1) / kLeaf;
    // Whole vectors of rows where there are many.
    r.rows = r.qo_len * group;
    r.tile_rows = r.rows <= kMaxTile ? r.qo_len : group <= kWholeTile ? kWholeTile / group : 1;
    r.tiles = (r.qo_len + r.tile_rows - 1) / r.tile_rows;
    int64_t leaves = r.last_leaf - r.first_leaf + 1, read = leaves;
    if (params.num_prefix_levels > 0 && r.tiles == 1) {
      if (head >= 0 && requests[head].rows + r.rows <= bundle_rows(requests[head])) {
        r.shared = shared_leaves(params, requests[before].batch_idx, r.batch_idx);
        if (r.shared <= r.first_leaf) r.shared = 0;
      }
      before = i;
    }
    if (r.shared > 0) {
      Request& first = requests[head];
      ++first.members;
      first.rows += r.rows;
      if (r.first_leaf < first.bundle_first_leaf) first.bundle_first_leaf = r.first_leaf;
      if (r.last_leaf > first.bundle_last_leaf) first.bundle_last_leaf = r.last_leaf;
      read -= r.shared - r.first_leaf;
    } else {
      head = r.tiles == 1 ? i : -1;
      r.members = 1;
      r.bundle_first_leaf = r.first_leaf;
      r.bundle_last_leaf = r.last_leaf;
    }
    // About a cycle each: 8 bytes of KV, and a quarter of a multiplied vector.
    int64_t size = static_cast<int64_t>(sizeof(T));
    int64_t cost = params.num_kv_heads * D * (16 * size * read + 4 * r.rows * leaves);
    costs[r.shared > 0 ? head : i] += cost;
    total += cost;
    kv_bytes += read * kLeaf * 2 * params.num_kv_heads * D * size;
  }
  *small = threads == 1 || total < kSmallCost;
  *cold = kv_bytes > kColdBytes;
  int64_t used = 0, items = 0;
  for (int64_t i = 0; i < count; ++i) {
    Request& r = requests[i];
    if (r.members == 0) continue;
    r.chunks = 1;
    int64_t chunks = r.bundle_last_leaf / kChunkLeaves - r.bundle_first_leaf / kChunkLeaves + 1;
    if (!*small && r.tiles == 1 && chunks > 1 && costs[i] > total / (4 * threads)) {
      int64_t floats = 0, left = r.members;
      for (Request* member = &r; left > 0; ++member) {
        if (member->qo_len == 0) continue;
        member->partial = used + floats;
        floats += chunks_of(*member) * member->qo_len * params.num_qo_heads * (D + 2);
        --left;
      }
      bool fits = used + floats <= params.workspace_size;
      left = fits ? 0 : r.members;
      for (Request* member = &r; left > 0; ++member) {
        if (member->qo_len == 0) continue;
        member->partial = -1;
        --left;
      }
      if (fits) {
        r.chunks = chunks;
        used += floats;
      }
    }
    items += r.tiles * r.chunks;
  }
  int64_t groups = *small || items == 0 ? 1 : (2 * threads + items - 1) / items;
  items = 0;
  for (int64_t i = 0; i < count; ++i) {
    Request& r = requests[i];
    r.first_item = items;
    if (r.members == 0) continue;
    int64_t rows = r.tiles > 1 ? r.tile_rows * group : r.rows;
    int64_t leaf_bytes = 2 * kLeaf * D * static_cast<int64_t>(sizeof(T));
    int64_t heads = r.tiles > 1 ? 1 : kAheadBytes / leaf_bytes;
    if (heads > kStateFloats / (rows * D)) heads = kStateFloats / (rows * D);
    int64_t share = (params.num_kv_heads + groups - 1) / groups;
    if (heads > share) heads = share;
    r.heads_per_item = heads < 1 ? 1 : heads;
    r.head_groups = (params.num_kv_heads + r.heads_per_item - 1) / r.heads_per_item;
    items += r.tiles * r.chunks * r.head_groups;
  }
  return items;
}

// out = softmax(q k^T * sm_scale, causal) v over each request's pages, and its log-sum-exp.
// Cost:    the KV in use read once per tile of rows (all rows of a verification, all query heads of
//          a KV head); 4 * tokens * head_dim flops per row and head.
// Assumes: indices checked; kv_lens >= the request's rows.
// Order:   fp32 states; leaves of 64 tokens, each from a fresh state, folded left into chunks of 8
//          leaves, those folded left into the row's result. A dot product is 16 lanes over head_dim,
//          then one tree; a column of the output is one chain over tokens. Probabilities are rounded
//          to bf16 for bf16 caches. What a row does not see never enters its arithmetic.
// Source:  Milakov and Gimelshein 2018 (online softmax), Dao et al. 2022 and 2023 (FlashAttention).
// Threads: (request, tile of rows, chunks, KV heads): as few pieces as keep the threads busy. A
//          thread takes all KV heads of a leaf in turn, so that pages are read in memory order.
// Shared:  neighbours of one prefix are one piece: the leaves that they share are read once and
//          multiplied for all of their rows, tile by tile, the others request by request.
template <typename T, int D>
void run(const AppendAttentionParams& params) {
  Request requests[kBatchSlice];
  for (int64_t first = 0; first < params.batch; first += kBatchSlice) {
    int64_t count = params.batch - first < kBatchSlice ? params.batch - first : kBatchSlice;
    bool small = true, cold = false;
    int64_t items = plan<T, D>(params, first, count, requests, &small, &cold);
    parallel_for(items, small ? items : 1, [&](int64_t begin, int64_t end) {
      int64_t at = 0;
      for (int64_t index = begin; index < end; ++index) {
        while (at + 1 < count && requests[at + 1].first_item <= index) ++at;
        const Request& r = requests[at];
        int64_t local = index - r.first_item;
        int64_t group_idx = local % r.head_groups;
        int64_t chunk = local / r.head_groups % r.chunks;
        int64_t tile = local / r.head_groups / r.chunks;
        Item item;
        item.bundle = &r;
        item.first_row = tile * r.tile_rows;
        item.num_rows =
            r.qo_len - item.first_row < r.tile_rows ? r.qo_len - item.first_row : r.tile_rows;
        item.first_head = group_idx * r.heads_per_item;
        item.num_heads = params.num_kv_heads - item.first_head < r.heads_per_item
                             ? params.num_kv_heads - item.first_head
                             : r.heads_per_item;
        item.first_leaf = r.bundle_first_leaf;
        item.last_leaf = r.bundle_last_leaf;
        if (r.tiles > 1) {
          int64_t first_position = r.kv_len - r.qo_len + item.first_row;
          int64_t seen = params.sliding_window > 0 ? first_position - params.sliding_window + 1 : 0;
          item.first_leaf = (seen > 0 ? seen : 0) / kLeaf;
          item.last_leaf = (first_position + item.num_rows - 1) / kLeaf;
        }
        item.cold = cold && r.tiles == 1;
        item.partial = r.chunks > 1;
        if (item.partial) {
          int64_t start = (r.bundle_first_leaf / kChunkLeaves + chunk) * kChunkLeaves;
          if (item.first_leaf < start) item.first_leaf = start;
          if (item.last_leaf >= start + kChunkLeaves) item.last_leaf = start + kChunkLeaves - 1;
        }
        attend<T, D>(params, item);
      }
    });
    for (int64_t i = 0; i < count; ++i) {
      const Request& r = requests[i];
      if (r.partial < 0) continue;
      int64_t rows = r.qo_len * params.num_qo_heads;
      int64_t pieces = (rows + kLanes - 1) / kLanes;
      parallel_for(
          pieces, 65536 / (chunks_of(r) * kLanes * D) + 1, [&](int64_t begin, int64_t end) {
            for (int64_t piece = begin; piece < end; ++piece) {
              int64_t last = (piece + 1) * kLanes < rows ? (piece + 1) * kLanes : rows;
              join<T, D>(params, r, piece * kLanes, last);
            }
          });
    }
  }
  // Rows that belong to no request.
  int64_t used = params.qo_indptr[params.batch];
  int64_t width = params.num_qo_heads * D;
  if (used < params.rows) {
    std::memset(static_cast<void*>(static_cast<T*>(params.out) + used * width),
                0,
                (params.rows - used) * width * sizeof(T));
    if (params.lse == nullptr) return;
    for (int64_t i = used * params.num_qo_heads; i < params.rows * params.num_qo_heads; ++i) {
      params.lse[i] = -INFINITY;
    }
  }
}

template <typename T>
void dispatch(const AppendAttentionParams& params) {
  switch (params.head_dim) {
    case 64:
      return run<T, 64>(params);
    case 96:
      return run<T, 96>(params);
    case 128:
      return run<T, 128>(params);
    default:
      return run<T, 256>(params);
  }
}

}  // namespace

void append_attention_cpu(const AppendAttentionParams& params) {
  switch (params.dtype) {
    case DType::kBFloat16:
      return dispatch<bfloat16>(params);
    case DType::kFloat16:
      return dispatch<float16>(params);
    default:
      return dispatch<float>(params);
  }
}

}  // namespace specops::SPECOPS_ISA
