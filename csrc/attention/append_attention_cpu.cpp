// SPDX-License-Identifier: Apache-2.0
#include "attention/append_attention.h"

#include "common/parallel.h"
#include "common/simd.h"

namespace specops::SPECOPS_ISA {
namespace {

constexpr int kLeaf = static_cast<int>(kAttentionLeaf);
constexpr int kBlock = 16;                    // tokens that lie in one page at one stride
constexpr int kBlocks = kLeaf / kBlock;
constexpr int kMaxTile = 64;                  // query rows (row, head of the group) of one KV head
constexpr int kStateFloats = 32768;           // of one item: 128 KiB, a fraction of L2

// Rows of one (request, row tile, KV head): what a leaf kernel reads and writes.
template <typename T>
struct Tile {
  const T* q[kMaxTile];
  int lo[kMaxTile], hi[kMaxTile];  // the tokens of this leaf that the row sees: [lo, hi)
  int rows;
};

// The leaf's 64 tokens: four blocks of 16, each contiguous in a page at one token stride.
template <typename T>
struct LeafKv {
  const T* k[kBlocks];
  const T* v[kBlocks];
  int64_t stride;
};

// Probabilities as PV reads them: bf16 pairs for bf16 caches, floats otherwise.
template <typename T>
struct Prob {
  using type = float;
  static constexpr int kUnit = 1;  // tokens per step of PV
};
template <>
struct Prob<bfloat16> {
  using type = bfloat16;
  static constexpr int kUnit = 2;
};

// q . k: 16 lanes over head_dim, each a chain, then the tree of reduce_add.
template <int D>
inline float dot(const bfloat16* q, const bfloat16* k) {
  F32x16 acc = zero();
  for (int i = 0; i < D; i += 32) acc = dot_pairs(acc, load_pairs(q + i), load_pairs(k + i));
  return reduce_add(acc);
}
template <int D, typename T>
inline float dot(const T* q, const T* k) {
  F32x16 acc = zero();
  for (int i = 0; i < D; i += kLanes) acc = fma(load(q + i), load(k + i), acc);
  return reduce_add(acc);
}

// Two V rows as pairs: out[0] and out[1] hold 16 columns each.
inline void zip(const bfloat16* a, const bfloat16* b, BF16x32 out[2]) {
  bfloat16 pairs[64];
  for (int i = 0; i < 32; ++i) {
    pairs[2 * i] = a[i];
    pairs[2 * i + 1] = b[i];
  }
  out[0] = load_pairs(pairs);
  out[1] = load_pairs(pairs + 32);
}

// acc += p * v over tokens [begin, end) of the leaf; a half of a pair outside them counts as zero.
template <int D>
inline void weigh(const bfloat16* p, const LeafKv<bfloat16>& kv, int begin, int end, float* o) {
  for (int first = begin & ~1; first < end; first += 2) {
    const bfloat16* v = kv.v[first / kBlock] + (first % kBlock) * kv.stride;
    bfloat16 a[D], b[D];
    std::memset(static_cast<void*>(a), 0, sizeof(a));
    std::memset(static_cast<void*>(b), 0, sizeof(b));
    if (first >= begin) std::memcpy(static_cast<void*>(a), v, sizeof(a));
    if (first + 1 < end) std::memcpy(static_cast<void*>(b), v + kv.stride, sizeof(b));
    BF16x32 weight = broadcast_pair(p + first);
    for (int i = 0; i < D; i += 32) {
      BF16x32 pairs[2];
      zip(a + i, b + i, pairs);
      store(o + i, dot_pairs(load(o + i), weight, pairs[0]));
      store(o + i + 16, dot_pairs(load(o + i + 16), weight, pairs[1]));
    }
  }
}
template <int D, typename T>
inline void weigh(const float* p, const LeafKv<T>& kv, int begin, int end, float* o) {
  for (int token = begin; token < end; ++token) {
    const T* v = kv.v[token / kBlock] + (token % kBlock) * kv.stride;
    F32x16 weight = set1(p[token]);
    for (int i = 0; i < D; i += kLanes) store(o + i, fma(weight, load(v + i), load(o + i)));
  }
}

// State of a row: running maximum, sum and unnormalised output. sum 0: nothing folded in yet.
inline void fold(float& m, float& l, float* o, float m2, float l2, const float* o2, int width) {
  if (!(l2 != 0.0f)) return;
  if (l == 0.0f) {
    m = m2;
    l = l2;
    std::memcpy(o, o2, width * sizeof(float));
    return;
  }
  float top = m > m2 ? m : m2;
  float factors[kLanes] = {m - top, m2 - top};
  store(factors, exp(load(factors)));
  float a = factors[0], b = factors[1];
  m = top;
  l = scalar_fma(l2, b, l * a);
  for (int i = 0; i < width; i += kLanes) {
    store(o + i, fma(load(o2 + i), set1(b), mul(load(o + i), set1(a))));
  }
}

// One leaf of one tile from a fresh state: m, l and o of every row that sees a token of it.
template <typename T, int D>
void leaf(const Tile<T>& tile, const LeafKv<T>& kv, float scale, float* m, float* l, float* o) {
  using P = typename Prob<T>::type;
  for (int row = 0; row < tile.rows; ++row) {
    int lo = tile.lo[row], hi = tile.hi[row];
    l[row] = 0.0f;
    if (lo >= hi) continue;
    float s[kLeaf];
    for (int token = 0; token < kLeaf; ++token) {
      bool seen = token >= lo && token < hi;
      s[token] = -INFINITY;
      if (!seen) continue;
      const T* k = kv.k[token / kBlock] + (token % kBlock) * kv.stride;
      s[token] = dot<D>(tile.q[row], k) * scale;
    }
    F32x16 s0 = load(s), s1 = load(s + 16), s2 = load(s + 32), s3 = load(s + 48);
    float top = reduce_max(max(max(s0, s1), max(s2, s3)));
    F32x16 shift = set1(top == -INFINITY ? 0.0f : top);
    s0 = exp(sub(s0, shift));
    s1 = exp(sub(s1, shift));
    s2 = exp(sub(s2, shift));
    s3 = exp(sub(s3, shift));
    P p[kLeaf];
    store(p, s0);
    store(p + 16, s1);
    store(p + 32, s2);
    store(p + 48, s3);
    m[row] = top;
    l[row] = reduce_add(add(add(s0, s1), add(s2, s3)));
    std::memset(o + row * D, 0, D * sizeof(float));
    weigh<D>(p, kv, lo, hi, o + row * D);
  }
}

struct Scratch {
  float leaf_o[kStateFloats], chunk_o[kStateFloats], result_o[kStateFloats];
  float leaf_m[kMaxTile], leaf_l[kMaxTile];
  float chunk_m[kStateFloats / 64], chunk_l[kStateFloats / 64];
  float result_m[kStateFloats / 64], result_l[kStateFloats / 64];
};

thread_local Scratch scratch;

template <typename T, int D>
void attend(const AppendAttentionParams& params,
            int64_t batch_idx,
            int64_t first_row,
            int64_t num_rows,
            int64_t head_idx) {
  int64_t group = params.num_qo_heads / params.num_kv_heads;
  int64_t width = params.num_kv_heads * D;
  int64_t qo_begin = params.qo_indptr[batch_idx], qo_end = params.qo_indptr[batch_idx + 1];
  int64_t first_position = params.kv_lens[batch_idx] - (qo_end - qo_begin) + first_row;
  int64_t last_position = first_position + num_rows - 1;
  int64_t window = params.sliding_window > 0 ? params.sliding_window : INT64_MAX;
  const int32_t* pages = params.kv_indices + params.kv_indptr[batch_idx];
  auto* q = static_cast<const T*>(params.q) + (qo_begin + first_row) * params.q_stride;
  Tile<T> tile;
  tile.rows = static_cast<int>(num_rows * group);
  for (int64_t row = 0; row < tile.rows; ++row) {
    tile.q[row] = q + row / group * params.q_stride + (head_idx * group + row % group) * D;
    scratch.chunk_l[row] = scratch.result_l[row] = 0.0f;
  }
  int64_t first_seen = first_position >= window ? first_position - window + 1 : 0;
  int64_t last_leaf = last_position / kLeaf;
  for (int64_t leaf_idx = first_seen / kLeaf; leaf_idx <= last_leaf; ++leaf_idx) {
    int64_t base = leaf_idx * kLeaf;
    LeafKv<T> kv;
    kv.stride = width;
    for (int block = 0; block < kBlocks; ++block) {
      int64_t token = base + block * kBlock;
      // Blocks that no row sees may have no page: they are never read.
      if (token > last_position || token + kBlock <= first_seen) continue;
      int64_t slot = pages[token / params.page_size] * params.page_size + token % params.page_size;
      kv.k[block] = static_cast<const T*>(params.k_cache) + slot * width + head_idx * D;
      kv.v[block] = static_cast<const T*>(params.v_cache) + slot * width + head_idx * D;
    }
    for (int64_t row = 0; row < tile.rows; ++row) {
      int64_t position = first_position + row / group;
      int64_t seen = position >= window ? position - window + 1 : 0;
      tile.lo[row] = static_cast<int>(seen > base ? seen - base : 0);
      tile.hi[row] = static_cast<int>(position + 1 < base + kLeaf ? position + 1 - base : kLeaf);
    }
    leaf<T, D>(tile, kv, params.sm_scale, scratch.leaf_m, scratch.leaf_l, scratch.leaf_o);
    for (int64_t row = 0; row < tile.rows; ++row) {
      fold(scratch.chunk_m[row], scratch.chunk_l[row], scratch.chunk_o + row * D,
           scratch.leaf_m[row], scratch.leaf_l[row], scratch.leaf_o + row * D, D);
    }
    if ((leaf_idx + 1) * kLeaf % kAttentionChunk != 0 && leaf_idx != last_leaf) continue;
    for (int64_t row = 0; row < tile.rows; ++row) {
      fold(scratch.result_m[row], scratch.result_l[row], scratch.result_o + row * D,
           scratch.chunk_m[row], scratch.chunk_l[row], scratch.chunk_o + row * D, D);
      scratch.chunk_l[row] = 0.0f;
    }
  }
  for (int64_t row = 0; row < tile.rows; ++row) {
    int64_t out_row = (qo_begin + first_row + row / group) * params.num_qo_heads +
                      head_idx * group + row % group;
    F32x16 inverse = set1(1.0f / scratch.result_l[row]);
    for (int i = 0; i < D; i += kLanes) {
      store(static_cast<T*>(params.out) + out_row * D + i,
            mul(load(scratch.result_o + row * D + i), inverse));
    }
    if (params.lse != nullptr) {
      params.lse[out_row] = scratch.result_m[row] + std::log(scratch.result_l[row]);
    }
  }
}

// out = softmax(q k^T * sm_scale, causal) v over each request's pages, and its log-sum-exp.
// Cost:    the used KV read once per row tile; 4 * tokens * head_dim flops per row and head.
// Assumes: indices checked; kv_lens >= the request's rows.
// Order:   fp32 states; leaves of 64 tokens, each from a fresh state, folded left into chunks of 8
//          leaves, those folded left into the row's result. Probabilities are rounded to bf16 for
//          bf16 caches. What a row does not see never enters its arithmetic, not even times zero.
// Source:  Milakov and Gimelshein 2018 (online softmax), Dao et al. 2022 and 2023 (FlashAttention).
// Threads: (request, row tile, KV head).
template <typename T, int D>
void run(const AppendAttentionParams& params) {
  int64_t group = params.num_qo_heads / params.num_kv_heads;
  int64_t tile_rows = kMaxTile / group;
  for (int64_t batch_idx = 0; batch_idx < params.batch; ++batch_idx) {
    int64_t num_rows = params.qo_indptr[batch_idx + 1] - params.qo_indptr[batch_idx];
    int64_t tiles = (num_rows + tile_rows - 1) / tile_rows;
    parallel_for(tiles * params.num_kv_heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        int64_t first = item / params.num_kv_heads * tile_rows;
        int64_t count = num_rows - first < tile_rows ? num_rows - first : tile_rows;
        attend<T, D>(params, batch_idx, first, count, item % params.num_kv_heads);
      }
    });
  }
  // Rows that belong to no request.
  int64_t used = params.qo_indptr[params.batch];
  int64_t width = params.num_qo_heads * D;
  if (used < params.rows) {
    std::memset(static_cast<void*>(static_cast<T*>(params.out) + used * width), 0,
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
