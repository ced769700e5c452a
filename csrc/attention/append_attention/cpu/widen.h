// SPDX-License-Identifier: Apache-2.0
// 8-bit caches in append_attention on the CPU. For one head of a leaf, blocks of K and then of V
// are widened to the dtype of q, which is exact. They are then multiplied like the elements of any
// other cache.
#pragma once

#include <type_traits>

#include "attention/append_attention/cpu/loads.h"
#include "attention/kv_element.h"

namespace specops::SPECOPS_ISA {

// Loads sixteen elements and multiplies them by kUnit.
inline F32x16 load(const KvInt8* p) {
#if defined(SPECOPS_AVX512)
  __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))};
#elif defined(SPECOPS_AVX2)
  __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
#elif defined(SPECOPS_NEON)
  int8x16_t bytes = vld1q_s8(&p->bits);
  int16x8_t lo = vmovl_s8(vget_low_s8(bytes)), hi = vmovl_high_s8(bytes);
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(lo))),
          vcvtq_f32_s32(vmovl_high_s16(lo)),
          vcvtq_f32_s32(vmovl_s16(vget_low_s16(hi))),
          vcvtq_f32_s32(vmovl_high_s16(hi))};
#else
  F32x16 out;
  for (int i = 0; i < 16; ++i) out.v[i] = to_float(p[i]);
  return out;
#endif
}
inline F32x16 load(const KvE4M3* p) {
  // Shifted left by seven bits, the byte is a float16 of 2^-8 times the value, for subnormal values
  // as well.
#if defined(SPECOPS_AVX512) || defined(SPECOPS_AVX2)
  __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  words = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(-0x4080));
#endif
#if defined(SPECOPS_AVX512)
  return {_mm512_cvtph_ps(words)};
#elif defined(SPECOPS_AVX2)
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(words)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(words, 1))};
#elif defined(SPECOPS_NEON)
  int8x16_t bytes = vreinterpretq_s8_u8(vld1q_u8(&p->bits));
  auto half = [](int16x8_t words) {
    words = vandq_s16(vshlq_n_s16(words, 7), vdupq_n_s16(-0x4080));
    return vreinterpretq_f16_s16(words);
  };
  float16x8_t lo = half(vmovl_s8(vget_low_s8(bytes))), hi = half(vmovl_high_s8(bytes));
  return {vcvt_f32_f16(vget_low_f16(lo)),
          vcvt_high_f32_f16(lo),
          vcvt_f32_f16(vget_low_f16(hi)),
          vcvt_high_f32_f16(hi)};
#else
  F32x16 out;
  for (int i = 0; i < 16; ++i) out.v[i] = to_float(p[i]);
  return out;
#endif
}

namespace {

// Factor by which load() multiplies the elements it widens; the scales are divided by it.
template <typename Cache>
constexpr float kUnit = 1.0f;
#if defined(SPECOPS_AVX512) || defined(SPECOPS_AVX2) || defined(SPECOPS_NEON)
template <>
constexpr float kUnit<KvE4M3> = 0x1p-8f;
#endif

// One head of a leaf of an 8-bit cache. Blocks that no row sees may be absent.
struct RawHead {
  const uint8_t* k[kLeafBlocks];
  const uint8_t* v[kLeafBlocks];
  int64_t stride;
  DType dtype;
};

// Widens 32 elements to T, which represents them exactly.
template <typename T, typename Cache>
inline void widen(const Cache* from, T* to) {
  F32x16 a = load(from), b = load(from + kLanes);
  if constexpr (std::is_same_v<T, bfloat16>) {
    // The low 16 bits of these floats are zero.
#if defined(SPECOPS_AVX512)
    alignas(64) static constexpr int16_t kHigh[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                      23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                      45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    __m512i words = _mm512_permutex2var_epi16(
        _mm512_castps_si512(a.v), _mm512_load_si512(kHigh), _mm512_castps_si512(b.v));
    _mm512_storeu_si512(to, words);
#elif defined(SPECOPS_AVX2)
    const F32x16 both[2] = {a, b};
    for (int i = 0; i < 2; ++i) {
      __m256i lo = _mm256_srli_epi32(_mm256_castps_si256(both[i].lo), 16);
      __m256i hi = _mm256_srli_epi32(_mm256_castps_si256(both[i].hi), 16);
      __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(lo, hi), 0xd8);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i * kLanes), words);
    }
#elif defined(SPECOPS_NEON)
    const F32x16 both[2] = {a, b};
    for (int i = 0; i < 4; ++i) {
      uint16x8_t lo = vreinterpretq_u16_f32(both[i / 2].q[i % 2 * 2]);
      uint16x8_t hi = vreinterpretq_u16_f32(both[i / 2].q[i % 2 * 2 + 1]);
      vst1q_u16(&to[i * 8].bits, vuzp2q_u16(lo, hi));
    }
#else
    store(to, a);
    store(to + kLanes, b);
#endif
  } else {
    store(to, a);
    store(to + kLanes, b);
  }
}

// Widens the elements of sixteen tokens of one head to [16, D].
template <typename T, typename Cache, int D>
SPECOPS_FLATTEN void widen_tokens(const Cache* from, int64_t stride, T* to) {
  for (int token = 0; token < kPageBlock; ++token) {
#pragma GCC unroll 8
    for (int at = 0; at < D; at += 32) widen(from + at, to + at);
    from += stride;
    to += D;
  }
}

template <typename T, int D>
void widen_block(const uint8_t* from, const RawHead& head, T* to) {
  if (head.dtype == DType::kInt8) {
    widen_tokens<T, KvInt8, D>(reinterpret_cast<const KvInt8*>(from), head.stride, to);
  } else {
    widen_tokens<T, KvE4M3, D>(reinterpret_cast<const KvE4M3*>(from), head.stride, to);
  }
}

// Loads the elements of head `head` of the unit at a leaf, and the scales. `kv` has the addresses
// of the unit's first head. The scales of absent blocks are undefined.
template <typename T, int D>
void load_raw_head(const AppendAttentionParams& params,
                   const LeafKv<uint8_t>& kv,
                   int64_t head,
                   RawHead& raw,
                   Scratch<T, D>& own) {
  raw.stride = kv.stride;
  raw.dtype = params.cache_dtype;
  float unit = params.cache_dtype == DType::kInt8 ? kUnit<KvInt8> : kUnit<KvE4M3>;
  for (int block = 0; block < kLeafBlocks; ++block) {
    raw.k[block] = raw.v[block] = nullptr;
    if (kv.k[block] == nullptr) continue;
    raw.k[block] = kv.k[block] + head * D;
    raw.v[block] = kv.v[block] + head * D;
    int64_t first = (raw.k[block] - static_cast<const uint8_t*>(params.k_cache)) / D;
    for (int64_t i = 0; i < kPageBlock; ++i) {
      int64_t place = first + i * params.num_kv_heads;
      own.k_scales[block * kPageBlock + i] = params.k_scales[place] * (1.0f / unit);
      own.v_scales[block * kPageBlock + i] = params.v_scales[place] * (1.0f / unit);
    }
  }
}

}  // namespace
}  // namespace specops::SPECOPS_ISA
