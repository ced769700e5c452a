// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "common/growing_array.h"
#include "common/parallel.h"
#include "common/simd.h"
#include "gemm/finish_cpu.h"
#include "gemm/gemm_range.h"
#include "gemm/unrolled_cpu.h"
#include "llamacpp/float_product.h"

namespace specops::SPECOPS_ISA {
namespace {

constexpr int64_t kInlineFloats = 128 << 10;
constexpr int64_t kStrip = 256;  // inputs that are converted together; a multiple of every block

thread_local GrowingArray<float> packed_blocks_memory;

// Converts `count` numbers of a row from `first` on, a multiple of 16. Reads whole blocks, and writes
// up to 15 numbers past the last.
void convert(const GgmlMatrix& matrix, int64_t row, int64_t first, int64_t count, float* out) {
  const char* data = static_cast<const char*>(matrix.data) + row * matrix.row_bytes;
  // Rows are read in pieces, which the hardware does not fetch ahead: the next block's come now.
  int64_t ahead = kWeightBlock * static_cast<int64_t>(matrix.row_bytes);
  auto plain = [&](const auto* in) {
    in += first;
    int64_t whole = count / kLanes * kLanes;
    for (int64_t i = 0; i < whole; i += kLanes) {
      __builtin_prefetch(reinterpret_cast<const char*>(in + i) + ahead, 0, 2);
      store(out + i, load(in + i));
    }
    if (whole < count) {
      store(out + whole, load_partial(in + whole, static_cast<int>(count - whole)));
    }
  };
  switch (matrix.type) {
    case GGML_TYPE_F32:
      return plain(reinterpret_cast<const float*>(data));
    case GGML_TYPE_F16:
      return plain(reinterpret_cast<const float16*>(data));
    case GGML_TYPE_BF16:
      return plain(reinterpret_cast<const bfloat16*>(data));
    default:
      break;
  }
  const ggml_type_traits* traits = ggml_get_type_traits(matrix.type);
  int64_t begin = first / traits->blck_size * traits->blck_size;
  int64_t end = ceil_div(first + count, traits->blck_size) * traits->blck_size;
  float numbers[kStrip + 2 * 256];
  traits->to_float(data + begin / traits->blck_size * static_cast<int64_t>(traits->type_size),
                   numbers,
                   end - begin);
  std::memcpy(out, numbers + first - begin, count * sizeof(float));
}

// Transposes 16 rows of 16 floats.
inline void transpose(const float* in, int64_t stride, float* out) {
#if defined(SPECOPS_AVX512)
  __m512 a[16], b[16];
  unrolled<16>([&](int i) SPECOPS_INLINE { a[i] = _mm512_loadu_ps(in + i * stride); });
  unrolled<8>([&](int i) SPECOPS_INLINE {
    b[2 * i] = _mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]);
    b[2 * i + 1] = _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]);
  });
  auto pairs = [](__m512 x) SPECOPS_INLINE { return _mm512_castps_pd(x); };
  unrolled<4>([&](int i) SPECOPS_INLINE {
    unrolled<2>([&](int j) SPECOPS_INLINE {
      __m512d low = pairs(b[4 * i + j]), high = pairs(b[4 * i + 2 + j]);
      a[4 * i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      a[4 * i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    });
  });
  // a[4 * i + j] has column 4 * q + j of rows 4 * i to 4 * i + 3 in quarter q.
  unrolled<4>([&](int j) SPECOPS_INLINE {
    __m512 even = _mm512_shuffle_f32x4(a[j], a[4 + j], 0x88);
    __m512 odd = _mm512_shuffle_f32x4(a[j], a[4 + j], 0xdd);
    __m512 even2 = _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0x88);
    __m512 odd2 = _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0xdd);
    _mm512_storeu_ps(out + 16 * j, _mm512_shuffle_f32x4(even, even2, 0x88));
    _mm512_storeu_ps(out + 16 * (4 + j), _mm512_shuffle_f32x4(odd, odd2, 0x88));
    _mm512_storeu_ps(out + 16 * (8 + j), _mm512_shuffle_f32x4(even, even2, 0xdd));
    _mm512_storeu_ps(out + 16 * (12 + j), _mm512_shuffle_f32x4(odd, odd2, 0xdd));
  });
#else
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 16; ++j) out[16 * j + i] = in[i * stride + j];
  }
#endif
}

// Packs a block of 16 outputs, as pack_weight does. Numbers past the last output are zeros.
void pack_block(const GgmlMatrix& matrix, int64_t block, float* out) {
  int64_t first = block * kWeightBlock;
  int64_t outputs = min64(matrix.num_outputs - first, kWeightBlock);
  if (matrix.rows_are_inputs) {
    for (int64_t k = 0; k < matrix.num_inputs; ++k, out += kWeightBlock) {
      convert(matrix, k, first, outputs, out);
      for (int64_t i = outputs; i < kWeightBlock; ++i) out[i] = 0.0f;
    }
    return;
  }
  alignas(64) float strip[kWeightBlock * kStrip];
  if (outputs < kWeightBlock) std::memset(strip, 0, sizeof(strip));
  for (int64_t k = 0; k < matrix.num_inputs; k += kStrip) {
    int64_t inputs = min64(kStrip, matrix.num_inputs - k);
    for (int64_t i = 0; i < outputs; ++i) convert(matrix, first + i, k, inputs, strip + i * kStrip);
    int64_t whole = inputs / kWeightBlock * kWeightBlock;
    for (int64_t at = 0; at < whole; at += kWeightBlock) {
      transpose(strip + at, kStrip, out + (k + at) * kWeightBlock);
    }
    for (int64_t at = whole; at < inputs; ++at) {
      for (int64_t i = 0; i < kWeightBlock; ++i) {
        out[(k + at) * kWeightBlock + i] = strip[i * kStrip + at];
      }
    }
  }
}

}  // namespace

// Packs a few blocks of outputs at a time, and multiplies all rows with them.
// Cost:    the matrix read once; packed blocks stay in the cache.
// Assumes: nothing.
// Order:   that of gemm_range_f32: one chain of fused multiply-adds per output, in the order of the
//          inputs. A zero in x changes no sum of finite numbers.
// Source:  -
// Threads: one item per group of blocks.
void float_product_cpu(const FloatProductParams& params) {
  const GgmlMatrix& matrix = params.matrix;
  constexpr int64_t kGroupBytes = 256 << 10;
  int64_t blocks = weight_blocks(matrix.num_outputs);
  int64_t block_floats = matrix.num_inputs * kWeightBlock;
  int64_t group = max64(1, min64(8, kGroupBytes / 4 / max64(1, block_floats)));
  group = max64(1, min64(group, blocks / num_threads()));
  // Work that is too small to wake a thread.
  if (blocks * block_floats * (params.rows + 3) <= kInlineFloats) group = blocks;
  GemmParams product{};
  product.x = params.x;
  product.out = params.out;
  product.rows = params.rows;
  product.x_stride = params.x_stride;
  product.row_indices = params.row_indices;
  product.dtype = product.out_dtype = DType::kFloat32;
  product.weight.kind = WeightKind::kPlain;
  product.weight.num_outputs = matrix.num_outputs;
  product.weight.num_inputs = matrix.num_inputs;
  product.weight.activation = Activation::kNone;
  parallel_for(blocks, group, [&](int64_t begin, int64_t end) {
    float* packed = packed_blocks_memory.reserve((end - begin) * block_floats);
    for (int64_t block = begin; block < end; ++block) {
      pack_block(matrix, block, packed + (block - begin) * block_floats);
    }
    GemmParams own = product;
    own.weight.data = packed - begin * block_floats;
    SPECOPS_FLOAT_ISA::gemm_range_f32(own,
                                      {.row_begin = 0,
                                       .row_end = params.rows,
                                       .begin = begin,
                                       .end = end,
                                       .next = blocks,
                                       .product = 0});
  });
}

// Cost:    four passes over a row in cache.
// Assumes: finite scores where the mask is not -inf.
// Order:   none: the top and the sum, of integers, have the same bits in every order. So a masked
//          score, whose result is zero, changes nothing, wherever it lies.
// Source:  -
// Threads: one item per group of rows.
void softmax_cpu(const SoftmaxParams& params) {
  constexpr float kUnit = 0x1p40f;
  int64_t grain = max64(1, kInlineFloats / 8 / max64(1, params.width));
  auto row = [&](int64_t r) {
    const float* in = params.in + r * params.width;
    float* out = params.out + r * params.width;
    auto each = [&](const auto& fn) {
      for (int64_t i = 0; i < params.width; i += kLanes) {
        fn(i, static_cast<int>(min64(kLanes, params.width - i)));
      }
    };
    const float* mask = params.masks == nullptr ? nullptr : params.masks[r];
    F32x16 tops = set1(-INFINITY);
    each([&](int64_t i, int n) {
      F32x16 score = mul(load_partial(in + i, n), set1(params.scale));
      if (params.soft_cap != 0.0f) {
        alignas(64) float lanes[kLanes];
        store(lanes, score);
        for (float& lane : lanes) lane = params.soft_cap * std::tanh(lane);
        score = load(lanes);
      }
      if (mask != nullptr) {
        score = add(score, mul(set1(params.slopes[r]), load_partial(mask + i, n)));
      }
      store_partial(out + i, score, n);
      tops = max(load_partial(out + i, n, -INFINITY), tops);
    });
    float top = reduce_max(tops);
    if (params.sinks != nullptr && params.sinks[r] > top) top = params.sinks[r];
    if (top == -INFINITY) {  // nothing to attend to
      std::memset(out, 0, params.width * sizeof(float));
      return;
    }
    int64_t sum = 0;
    auto add_up = [&](F32x16 x) {
      alignas(64) float lanes[kLanes];
      store(lanes, mul(x, set1(kUnit)));
      for (float lane : lanes) sum += static_cast<int64_t>(lane);
    };
    auto weights = [&](F32x16 scores) { return exp(sub(scores, set1(top))); };
    if (params.sinks != nullptr) add_up(weights(load_partial(params.sinks + r, 1, -INFINITY)));
    each([&](int64_t i, int n) {
      F32x16 weight = weights(load_partial(out + i, n, -INFINITY));
      add_up(weight);
      store_partial(out + i, weight, n);
    });
    F32x16 inverse = set1(kUnit / static_cast<float>(sum));
    each([&](int64_t i, int n) {
      store_partial(out + i, mul(load_partial(out + i, n), inverse), n);
    });
  };
  parallel_for(params.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) row(r);
  });
}

}  // namespace specops::SPECOPS_ISA
