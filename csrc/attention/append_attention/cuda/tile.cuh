// SPDX-License-Identifier: Apache-2.0
// 8-bit caches in append_attention on CUDA. A tile has the same layout in shared memory as in the
// cache. ldmatrix moves pairs of bytes, so a lane receives four neighboring elements, which it
// widens to bf16 (exactly). This reorders columns: of each 16 columns, the even ones come first.
// Queries are stored in this order, and results come out in it.
#pragma once

#include <type_traits>

#include "attention/append_attention/cuda/block.cuh"
#include "attention/append_attention/cuda/state.cuh"
#include "attention/kv_element.h"
#include "common/device.cuh"

namespace specops {

// Returns four elements as bf16: bytes 0 and 2 in x, bytes 1 and 3 in y.
template <typename Cache>
__device__ __forceinline__ uint2 widen(uint32_t word) {
  if constexpr (std::is_same_v<Cache, KvInt8>) {
    // The value is 128 + (low 7 bits) - (128, or 256 if negative). bf16 represents all of these
    // numbers exactly.
    constexpr uint32_t kBase = 0x43004300u, kMinusOne = 0xbf80bf80u;
    auto two = [](uint32_t bytes) {
      uint32_t low = ptx::merge_bits(bytes, kBase, 0x007f007fu);
      uint32_t origin = ptx::merge_bits(bytes, kBase, 0x00800080u);
      return ptx::fma_bf16x2(origin, kMinusOne, low);
    };
    return {two(word), two(word >> 8)};
  } else {
    static_assert(std::is_same_v<Cache, KvE4M3>);
    // The exponent and mantissa bits, moved to their places in bf16, are 2^-120 times the value,
    // for subnormal values as well. Adding -0 preserves the sign of a zero.
    constexpr uint32_t kUnit = 0x7b807b80u, kMinusZero = 0x80008000u;
    auto two = [](uint32_t magnitude, uint32_t sign) {
      return ptx::fma_bf16x2(ptx::merge_bits(magnitude, sign, 0x07f007f0u), kUnit, kMinusZero);
    };
    uint32_t signs = word & 0x80808080u;
    ptx::forget(signs);  // otherwise nvcc shifts first and masks twice
    return {two(word << 4, signs << 8), two(word >> 4, signs)};
  }
}

// Stores two vectors of 8 query elements at the place of the first vector, even columns first.
template <typename Shape>
__device__ __forceinline__ void store_query(
    unsigned char* queries, int row, int vector, uint4 first, uint4 second) {
  auto evens = [](uint32_t a, uint32_t b) { return (a & 0xffffu) | b << 16; };
  auto odds = [](uint32_t a, uint32_t b) { return a >> 16 | (b & 0xffff0000u); };
  *reinterpret_cast<uint4*>(queries + place_of<Shape::kQueryVectors>(row, vector)) = {
      evens(first.x, first.y),
      evens(first.z, first.w),
      evens(second.x, second.y),
      evens(second.z, second.w)};
  *reinterpret_cast<uint4*>(queries + place_of<Shape::kQueryVectors>(row, vector + 1)) = {
      odds(first.x, first.y),
      odds(first.z, first.w),
      odds(second.x, second.y),
      odds(second.z, second.w)};
}

// Returns the column of a warp's o[n][e] (see Outputs): tile 2 g has the even columns of the g-th
// group of 16 columns, and tile 2 g + 1 has the odd ones.
template <typename Block>
__device__ __forceinline__ int column_of_byte(int warp, int lane, int n, int e) {
  int tile = warp * Block::kOutTiles + n;
  return tile / 2 * 16 + 4 * (lane % 4) + 2 * e + tile % 2;
}

// Returns the scale that a lane holds for a tile: lanes 0 to 15 hold scales of K for the tokens of
// the warp, lanes 16 to 31 those of V. Returns 0 if the token must not be read.
template <typename Block>
__device__ __forceinline__ float load_scale(const Block& block, int tile) {
  using Shape = typename Block::Shape;
  constexpr int kTokens = 8 * Block::kScoreTiles, kBlocks = Shape::kTile / kPageBlock;
  if (tile > block.last_tile()) return 0.0f;
  unsigned thread = thread_index_in_loop<Block>();
  int lane = thread % kWarpSize, row = thread / kWarpSize * kTokens + lane % 16;
  const int* table = reinterpret_cast<const int*>(block.smem + Shape::kTable) +
                     static_cast<unsigned>(tile) * kBlocks % (2 * kChunkBlocks);
  int token = tile * Block::kTile + row;
  if (lane % 16 >= kTokens || token < block.item.load_begin || token >= block.item.load_end) {
    return 0.0f;
  }
  int place = table[row / kPageBlock];
  if (place < 0) return 0.0f;
  int64_t slot = int64_t{place} * kPageBlock + row % kPageBlock;
  const float* scales = lane < 16 ? block.params.k_scales : block.params.v_scales;
  return scales[slot * block.params.num_kv_heads + block.item.head];
}

// Returns the scale of token 8 * n + 2 * (lane % 4) + e of the warp; `which` selects K (0) or V
// (1).
template <typename Block>
__device__ __forceinline__ float scale_of_token(float scale, int which, int n, int e) {
  int lane = static_cast<int>(thread_index_in_loop<Block>()) % kWarpSize;
  return __shfl_sync(kFullMask, scale, 16 * which + 8 * n + 2 * (lane % 4) + e);
}

// Computes s += q k for the tokens of the warp.
template <typename Block>
__device__ __forceinline__ void multiply_byte_keys(
    const Block& block,
    const unsigned char* keys,
    float (&s)[Block::kScoreRowTiles][Block::kScoreTiles][4]) {
  using Shape = typename Block::Shape;
  constexpr int kScoreTiles = Block::kScoreTiles;
  unsigned thread = thread_index_in_loop<Block>();
  int lane = thread % kWarpSize, warp = thread / kWarpSize;
  // B operand: lanes 0-7 address the first 8 tokens at vector 2 k, lanes 8-15 at vector 2 k + 1,
  // and lanes 16-31 the next 8 tokens in the same way.
  int token = warp * (8 * kScoreTiles) + lane % 8 + (kScoreTiles == 2 ? lane / 16 * 8 : 0);
  LanePlace<Shape::kVectors> b_place(token, lane / 8 % 2);
  LanePlace<Shape::kQueryVectors> a_place(lane % 16, lane / 16);
  const unsigned char* queries = block.smem + Shape::kQueries;
#pragma unroll
  for (int k = 0; k < Block::kHeadDim / 32; ++k) {
    uint32_t words[kScoreTiles][2];
    if constexpr (kScoreTiles == 2) {
      uint32_t r[4];
      ptx::ldmatrix_x4(r, keys + b_place.after(2 * k));
      words[0][0] = r[0];
      words[0][1] = r[1];
      words[1][0] = r[2];
      words[1][1] = r[3];
    } else {
      ptx::ldmatrix_x2(words[0], keys + b_place.after(2 * k));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t b[kScoreTiles][2];
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n) {
        uint2 wide = widen<typename Block::Cache>(words[n][half]);
        b[n][0] = wide.x;
        b[n][1] = wide.y;
      }
#pragma unroll
      for (int i = 0; i < Block::kRowTiles; ++i) {
        uint32_t a[4];
        ptx::ldmatrix_x4(a,
                         queries + i * 16 * Shape::kQueryBytes + a_place.after(2 * (2 * k + half)));
#pragma unroll
        for (int n = 0; n < kScoreTiles; ++n) {
          ptx::mma_m16n8k16<typename Block::Element>(s[i][n], a, b[n]);
        }
      }
    }
  }
}

// Computes leaf.o += P V.
template <typename Block>
__device__ __forceinline__ void add_byte_values(const Block& block,
                                                const unsigned char* values,
                                                Outputs<Block>& leaf) {
  using Shape = typename Block::Shape;
  constexpr int kOutTiles = Block::kOutTiles;
  constexpr int kGroups = (kOutTiles + 1) / 2;  // groups of 16 columns
  static_assert(kGroups == 1 || kGroups % 2 == 0);
  unsigned thread = thread_index_in_loop<Block>();
  int lane = thread % kWarpSize, warp = thread / kWarpSize;
  // If a warp has an odd number of column tiles, every second warp begins with odd columns.
  bool begins_odd = kOutTiles % 2 != 0 && warp % 2 != 0;
  const unsigned char* probs = block.smem + Shape::kProbs;
  LanePlace<Shape::kProbVectors> a_place(lane % 16, lane / 16);
  // B operand: lanes 0-15 address the tokens at a group of columns, lanes 16-31 at the next group.
  int group = warp * kOutTiles / 2 + (kGroups > 1 ? lane / 16 : 0);
  // Opaque, so that the addresses in a tile differ only by constants; otherwise each would use a
  // register.
  int b_row = opaque_in_loop<Block>(lane % 16 * Shape::kRowBytes);
  int b_vector = opaque_in_loop<Block>(group ^ twist<Shape::kVectors>(lane % 16));
#pragma unroll
  for (int k = 0; k < Block::kTile / 16; ++k) {
    uint32_t b[2 * kGroups][2];
#pragma unroll
    for (int g = 0; g < kGroups; g += 2) {
      const unsigned char* place = values + k * 16 * Shape::kRowBytes + b_row + (b_vector ^ g) * 16;
      uint32_t r[kGroups > 1 ? 4 : 2];
      if constexpr (kGroups > 1) {
        ptx::ldmatrix_x4_trans(r, place);
      } else {
        ptx::ldmatrix_x2_trans(r, place);
      }
#pragma unroll
      for (int i = 0; i < (kGroups > 1 ? 4 : 2); ++i) {
        uint2 wide = widen<typename Block::Cache>(r[i]);
        b[2 * (g + i / 2)][i % 2] = wide.x;
        b[2 * (g + i / 2) + 1][i % 2] = wide.y;
      }
    }
#pragma unroll
    for (int i = 0; i < Block::kRowTiles; ++i) {
      uint32_t a[4];
      ptx::ldmatrix_x4(a, probs + i * 16 * Shape::kProbVectors * 16 + a_place.after(2 * k));
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) {
        constexpr int kMore = kOutTiles % 2;
        uint32_t column[2] = {begins_odd ? b[n + kMore][0] : b[n][0],
                              begins_odd ? b[n + kMore][1] : b[n][1]};
        ptx::mma_m16n8k16<typename Block::Element>(leaf.o[i][n], a, column);
      }
    }
  }
}

// ---- masks ----

// The functions below apply the mask bits of append_attention, which hide tokens from single rows.

// Returns whether the mask, if there is one, hides a token from a row of the tile.
template <typename Block>
__device__ __forceinline__ bool is_masked(const Block& block, int row, int token) {
  if (block.params.mask == nullptr) return false;
  WorkItem& item = block.item;
  // Many tokens are checked in sequence. The opaque value keeps the compiler from holding values of
  // one token in registers for the next.
  row = opaque(row);
  token = opaque(token);
  int packed = item.first_row + min(row, item.rows - 1);
  int query = item.request.qo_begin + packed / block.group();
  int position = item.request.kv_len - item.request.qo_len;
  int64_t place = token - mask_begin(block.params, item.batch_idx, position);
  return !mask_allows(block.params, query, place);
}

// ---- from global to shared memory ----

// The functions below copy the page table, tiles of K and V, and the queries of a work item to
// shared memory.

// Loads the cache positions of a chunk, one per block of 16 tokens, into the page table in shared
// memory; -1 for blocks that must not be read.
template <typename Block>
__device__ __forceinline__ void load_table(const Block& block, int chunk) {
  using Shape = typename Block::Shape;
  int* table = reinterpret_cast<int*>(block.smem + Shape::kTable) + (chunk & 1) * kChunkBlocks;
#pragma unroll 1
  for (int i = thread_index(); i < kChunkBlocks; i += Shape::kThreads) {
    int token = chunk * kChunkTokens + i * kPageBlock;
    int place = -1;
    if (token < block.item.load_end && token + kPageBlock > block.item.load_begin) {
      int page_size = static_cast<int>(block.params.page_size);
      int entry = block.item.request.kv_begin + token / page_size;
      int page = block.params.kv_indices[entry];
      Fault fault = find_page_fault(block.params, entry, page);
      if (fault.found()) {
        report_error(block.params.error, fault.code);
      } else {
        place = page * (page_size / kPageBlock) + token % page_size / kPageBlock;
      }
    }
    table[i] = place;
  }
}

// The part of a tile that one thread copies: every kCopyRows-th row from `row`, and in these rows
// every kCopyLanes-th vector from `vector`. Neither step changes the XOR permutation of a row in
// shared memory, so all places of a thread differ from the first by constants.
template <typename Shape>
struct CopyShare {
  static constexpr int kPasses = Shape::kTile / Shape::kCopyRows;
  static constexpr int kSteps = Shape::kVectors / Shape::kCopyLanes;
  int row, vector;

  __device__ __forceinline__ explicit CopyShare(unsigned thread)
      : row(thread / Shape::kCopyLanes), vector(thread % Shape::kCopyLanes) {}

  // Returns the offset of the first vector in the tile, in bytes.
  __device__ __forceinline__ int place() const { return place_of<Shape::kVectors>(row, vector); }
  __device__ __forceinline__ static constexpr int more(int pass, int step) {
    return (pass * Shape::kCopyRows * Shape::kVectors + step * Shape::kCopyLanes) * 16;
  }
};

// Cache positions of a tile's blocks of 16 tokens, read from the page table.
template <int kBlocks>
struct TileBlocks {
  int place[kBlocks];

  __device__ __forceinline__ explicit TileBlocks(const int* table) {
    static_assert(kBlocks == 2 || kBlocks == 4);
    if constexpr (kBlocks == 4) {
      int4 found = *reinterpret_cast<const int4*>(table);
      place[0] = found.x;
      place[1] = found.y;
      place[2] = found.z;
      place[3] = found.w;
    } else {
      int2 found = *reinterpret_cast<const int2*>(table);
      place[0] = found.x;
      place[1] = found.y;
    }
  }
  __device__ __forceinline__ bool all_there() const {
    int every = place[0];
#pragma unroll
    for (int i = 1; i < kBlocks; ++i) every |= place[i];
    return every >= 0;
  }
};

// Starts copying one tile of K or V. Tokens out of range are filled with zeros.
template <typename Block>
__device__ __forceinline__ void load_tile(const Block& block,
                                          const void* cache,
                                          unsigned char* slot,
                                          int tile) {
  using Shape = typename Block::Shape;
  using Share = CopyShare<Shape>;
  constexpr int kRowsAtOnce = Shape::kCopyRows;
  constexpr int kBlocks = Shape::kTile / kPageBlock;
  Share share(thread_index_in_loop<Block>());
  if (Shape::kFilled < Shape::kVectors && share.vector >= Shape::kFilled) return;
  unsigned token_bytes = static_cast<unsigned>(block.params.num_kv_heads) * Shape::kCacheBytes;
  unsigned block_bytes = kPageBlock * token_bytes;
  unsigned first_byte = block.item.head * Shape::kCacheBytes + share.vector * 16 +
                        share.row % kPageBlock * token_bytes;
  const unsigned char* source = static_cast<const unsigned char*>(cache) + first_byte;
  unsigned char* target = slot + share.place();
  const int* table = reinterpret_cast<const int*>(block.smem + Shape::kTable) +
                     static_cast<unsigned>(tile) * kBlocks % (2 * kChunkBlocks);
  int begin = block.item.load_begin - tile * Block::kTile;
  int end = block.item.load_end - tile * Block::kTile;
  TileBlocks<kBlocks> blocks(table);
  if (begin <= 0 && end >= Block::kTile && blocks.all_there()) {
    // The rows copied at once are half a page block, one page block, or two.
    const unsigned char* second = source + kPageBlock / 2 * token_bytes;
#pragma unroll
    for (int pass = 0; pass < Share::kPasses; ++pass) {
      int first = pass * kRowsAtOnce / kPageBlock;
      int place = blocks.place[first];
      if (kRowsAtOnce > kPageBlock && share.row >= kPageBlock) place = blocks.place[first + 1];
      bool is_second = pass * kRowsAtOnce % kPageBlock != 0;
      const unsigned char* from = ptx::advance(is_second ? second : source, place, block_bytes);
#pragma unroll
      for (int step = 0; step < Share::kSteps; ++step) {
        ptx::cp_async_16(target + Share::more(pass, step), from + step * Shape::kCopyLanes * 16);
      }
    }
    return;
  }
#pragma unroll 1
  for (int pass = 0; pass < Share::kPasses; ++pass) {
    int row = pass * kRowsAtOnce + share.row;
    int place = table[row / kPageBlock];
    bool valid = place >= 0 && row >= begin && row < end;
    const unsigned char* from = source;
    if (valid) {
      from =
          ptx::advance(source + pass * kRowsAtOnce % kPageBlock * token_bytes, place, block_bytes);
    }
#pragma unroll
    for (int step = 0; step < Share::kSteps; ++step) {
      ptx::cp_async_16(target + Share::more(0, step) + pass * Share::more(1, 0),
                       from + step * Shape::kCopyLanes * 16,
                       valid);
    }
  }
}

// Returns the query of a row of the tile in global memory, or of the first row if the tile does not
// have the row.
template <typename Block>
__device__ __forceinline__ const typename Block::Element* query_of_row(const Block& block,
                                                                       int row) {
  WorkItem& item = block.item;
  int packed = item.first_row + (row < item.rows ? row : 0);
  int64_t query = int64_t{item.request.qo_begin} + packed / block.group();
  int head = item.head * block.group() + packed % block.group();
  return static_cast<const typename Block::Element*>(block.params.q) +
         query * block.params.q_stride + head * Block::kHeadDim;
}

template <typename Block>
__device__ __forceinline__ void load_queries(const Block& block) {
  using Shape = typename Block::Shape;
  using T = typename Block::Element;
  WorkItem& item = block.item;
  unsigned thread = thread_index();
  int2* seen = reinterpret_cast<int2*>(block.smem + Shape::kSeen);
  static_assert(16 * Block::kRowTiles <= Shape::kThreads);
  if (thread < 16 * Block::kRowTiles) {
    int row = thread;
    int packed = item.first_row + min(row, item.rows - 1);
    int position = item.request.kv_len - item.request.qo_len + packed / block.group();
    seen[row] = make_int2(window_begin(block.params, position),
                          seen_end(block.params, position, item.request.kv_len));
  }
  if constexpr (Shape::kOneSlot) return;  // multiply_keys() reads the queries from global memory
  // Queries for 8-bit caches are stored two vectors at a time, because their columns are
  // interleaved.
  constexpr int kAtOnce = Shape::kScaled ? 2 : 1, kShares = Shape::kQueryVectors / kAtOnce;
#pragma unroll 1
  for (unsigned index = thread; index < 16 * Block::kRowTiles * kShares; index += Shape::kThreads) {
    int row = index / kShares, vector = index % kShares * kAtOnce;
    bool valid = row < item.rows;
    const T* source = query_of_row(block, row) + vector * (16 / sizeof(T));
    unsigned char* queries = block.smem + Shape::kQueries;
    if constexpr (Shape::kScaled) {
      const uint4* from = reinterpret_cast<const uint4*>(source);
      uint4 first{}, second{};
      if (valid) {
        first = from[0];
        second = from[1];
      }
      store_query<Shape>(queries, row, vector, first, second);
    } else {
      ptx::cp_async_16(queries + place_of<Shape::kQueryVectors>(row, vector), source, valid);
    }
  }
}

// ---- arithmetic ----

// The functions below compute one KV tile: scores, their weights, and the weighted sums of V.

constexpr float kLog2E = 1.4426950408889634f;

// Computes s = q k for the tokens of the warp.
template <typename Block>
__device__ __forceinline__ void multiply_keys(
    const Block& block,
    int tile,
    unsigned thread,
    float (&s)[Block::kScoreRowTiles][Block::kScoreTiles][4]) {
  using Shape = typename Block::Shape;
  using T = typename Block::Element;
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
  int first = warp * (8 * Block::kScoreTiles);  // the warp's first token in the tile
  if constexpr (Shape::kScaled) {
    multiply_byte_keys(block, keys, s);
  } else if constexpr (sizeof(T) == 2) {
    // B operand: lanes 0-7 address the first 8 tokens at vector 2 k, lanes 8-15 at vector 2 k + 1,
    // and lanes 16-31 the next 8 tokens in the same way.
    int token = first + lane % 8 + (Block::kScoreTiles == 2 ? lane / 16 * 8 : 0);
    LanePlace<Shape::kVectors> b_place(token, lane / 8 % 2);
    // A operand: lanes 0-15 address the rows at vector 2 k, lanes 16-31 at vector 2 k + 1.
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
    [[maybe_unused]] const float4* rows[2];
    if constexpr (Shape::kOneSlot) {
      static_assert(Block::kRowTiles == 1);
      rows[0] = reinterpret_cast<const float4*>(query_of_row(block, lane / 4));
      rows[1] = reinterpret_cast<const float4*>(query_of_row(block, lane / 4 + 8));
    }
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
          float4 a;
          if constexpr (Shape::kOneSlot) {
            a = rows[half][vector];
          } else {
            a = at(queries, 16 * i + lane / 4 + 8 * half, vector);
          }
#pragma unroll
          for (int n = 0; n < Block::kScoreTiles; ++n) {
            s[i][n][2 * half] = dot(s[i][n][2 * half], a, b[n][0]);
            s[i][n][2 * half + 1] = dot(s[i][n][2 * half + 1], a, b[n][1]);
          }
        }
      }
    }
  }
}

// Turns the products of multiply_keys() into scores of the warp's tokens, with -inf for tokens that
// a row does not see. Writes the maximum over these tokens of each row to shared memory.
// token_scale: the result of load_scale, for 8-bit caches.
template <typename Block>
__device__ __forceinline__ void finish_scores(
    const Block& block,
    int tile,
    unsigned thread,
    float token_scale,
    float (&s)[Block::kScoreRowTiles][Block::kScoreTiles][4]) {
  using Shape = typename Block::Shape;
  int lane = thread % kWarpSize, warp = thread / kWarpSize;
  int first_row = block.first_score_row(warp);
  int first =
      block.token_warp(warp) * (8 * Block::kScoreTiles);  // the warp's first token in the tile
  float scale = __fmul_rn(block.params.sm_scale, kLog2E);
#pragma unroll
  for (int n = 0; n < Block::kScoreTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float factor = scale;
      if constexpr (Shape::kScaled)
        factor = __fmul_rn(scale, scale_of_token<Block>(token_scale, 0, n, e));
#pragma unroll
      for (int i = 0; i < Block::kScoreRowTiles; ++i) {
        s[i][n][e] = __fmul_rn(s[i][n][e], factor);
        s[i][n][2 + e] = __fmul_rn(s[i][n][2 + e], factor);
      }
    }
  }
  if (block.partly_seen(tile)) {
    const int2* rows = reinterpret_cast<const int2*>(block.smem + Shape::kSeen);
#pragma unroll
    for (int i = 0; i < Block::kScoreRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int row = first_row + 16 * i + lane / 4 + 8 * half;
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
  for (int i = 0; i < Block::kScoreRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int row = first_row + 16 * i + lane / 4 + 8 * half;
      float top = fmaxf(s[i][0][2 * half], s[i][0][2 * half + 1]);
      if (Block::kScoreTiles == 2) {
        constexpr int kLast = Block::kScoreTiles - 1;
        top = fmaxf(top, fmaxf(s[i][kLast][2 * half], s[i][kLast][2 * half + 1]));
      }
      top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 1));
      top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 2));
      if (lane % 4 == 0) maxima[row * Shape::kTokenWarps + block.token_warp(warp)] = top;
    }
  }
}

// Returns the maximum of a row over the warps that share the tokens of a tile.
template <int kTokenWarps>
__device__ __forceinline__ float top_of_tile(const float* maxima) {
  if constexpr (kTokenWarps == 2) {
    float2 tops = *reinterpret_cast<const float2*>(maxima);
    return fmaxf(tops.x, tops.y);
  } else {
    static_assert(kTokenWarps == 4);
    float4 tops = *reinterpret_cast<const float4*>(maxima);
    return fmaxf(fmaxf(tops.x, tops.y), fmaxf(tops.z, tops.w));
  }
}

// Computes the weights of the tile's tokens relative to the running maximum and writes them to
// shared memory. Rescales the state or, if kIsWide, stores the factors with which accumulate_wide()
// rescales it.
template <typename Block>
__device__ __forceinline__ void weigh(const Block& block,
                                      int tile,
                                      float token_scale,
                                      float (&s)[Block::kScoreRowTiles][Block::kScoreTiles][4],
                                      Outputs<Block>& leaf) {
  using Shape = typename Block::Shape;
  using T = typename Block::Element;
  constexpr int kPerVector = 16 / sizeof(T);
  bool begins = tile * Block::kTile % Block::kLeaf == 0;
  unsigned thread = thread_index_in_loop<Block>();
  int lane = thread % kWarpSize, warp = thread / kWarpSize;
  // A lane has every eighth row, and all of these rows have the same XOR permutation in shared
  // memory.
  int token_warp = block.token_warp(warp), first_row = block.first_score_row(warp) + lane / 4;
  const float* maxima =
      reinterpret_cast<const float*>(block.smem + Shape::kMaxima) + first_row * Shape::kTokenWarps;
  const float* before = block.running(tile - 1) + first_row;
  float* after = block.running(tile) + first_row;
  float* shares = block.lane_sums() + thread;
  unsigned char* probs[Block::kScoreTiles];
#pragma unroll
  for (int n = 0; n < Block::kScoreTiles; ++n) {
    int element = token_warp * (8 * Block::kScoreTiles) + 8 * n + 2 * (lane % 4);
    probs[n] = block.smem + Shape::kProbs +
               place_of<Shape::kProbVectors>(first_row, element / kPerVector) +
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
  bool writes = token_warp == 0 && lane % 4 == 0;
  // Values from other warps are read before they are used, so that these loads overlap. 64 rows of
  // 8-bit caches do this in two rounds, because registers are scarce.
  constexpr int kRounds = Shape::kScaled && Block::kRowTiles == 4 ? 2 : 1;
  constexpr int kAtOnce = 2 * Block::kScoreRowTiles / kRounds;
  constexpr int kParts = Shape::kSumsOfWarp, kTilesOfPart = Block::kScoreTiles / kParts;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    float old[kAtOnce], top[kAtOnce], share[kAtOnce][kParts];
#pragma unroll
    for (int at = 0; at < kAtOnce; ++at) {
      int r = round * kAtOnce + at;
      float tops = top_of_tile<Shape::kTokenWarps>(maxima + 8 * r * Shape::kTokenWarps);
      old[at] = begins ? -INFINITY : before[8 * r];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        share[at][part] = begins ? 0.0f : shares[(r * kParts + part) * Shape::kThreads];
      }
      top[at] = fmaxf(old[at], tops);
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
        if (n % kTilesOfPart == 0) sum = 0.0f;
        float p0 = ptx::exp2_approx(__fsub_rn(s[i][n][2 * half], origin));
        float p1 = ptx::exp2_approx(__fsub_rn(s[i][n][2 * half + 1], origin));
        sum = __fadd_rn(sum, __fadd_rn(p0, p1));
        if constexpr (Shape::kScaled) {
          // A scale may be NaN; a token that the row does not see must still have a weight of zero.
          p0 = p0 == 0.0f ? 0.0f : __fmul_rn(p0, scales[n][0]);
          p1 = p1 == 0.0f ? 0.0f : __fmul_rn(p1, scales[n][1]);
        }
        unsigned char* place = probs[n] + 8 * r * Shape::kProbVectors * 16;
        if constexpr (sizeof(T) == 2) {
          *reinterpret_cast<uint32_t*>(place) = ptx::pack2<T>(p0, p1);
        } else {
          *reinterpret_cast<float2*>(place) = make_float2(p0, p1);
        }
        if (n % kTilesOfPart != kTilesOfPart - 1) continue;
        int part = n / kTilesOfPart;
        shares[(r * kParts + part) * Shape::kThreads] =
            begins ? sum : __fmaf_rn(share[at][part], rescale, sum);
      }
      if constexpr (Shape::kIsWide) {
        if (writes) block.rescales()[first_row + 8 * r] = rescale;
      } else {
#pragma unroll
        for (int n = 0; n < Block::kOutTiles; ++n) {
          leaf.o[i][n][2 * half] = __fmul_rn(leaf.o[i][n][2 * half], rescale);
          leaf.o[i][n][2 * half + 1] = __fmul_rn(leaf.o[i][n][2 * half + 1], rescale);
        }
      }
    }
  }
}

// Computes leaf.o += P V.
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
    // B operand: lanes 0-15 address the tokens at a column tile, lanes 16-31 at the next one, so
    // each load serves two column tiles. Opaque for the same reason as in add_byte_values().
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

// Returns whether the part of a loaded tile of V that this thread copied has an infinity or a NaN.
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
