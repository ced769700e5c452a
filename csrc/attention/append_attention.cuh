// SPDX-License-Identifier: Apache-2.0
// append_attention on CUDA. One kernel serves decoding, verification and prefill: a block takes up
// to 64 packed rows (query row, query head of one KV head), a range of whole leaves of their KV, and
// runs the same instructions for a row whoever else is in the tile.
//
// What a row's bits mean, and nothing else may change them:
//   tile   kTile tokens: scores by one chain of mma over head_dim; the tile's maximum; weights
//          2^(score - running maximum); P V by one chain over the tokens. Running sums of weights
//          live in 16 lanes of a row (warp, lane of a quad), added up in one order at the leaf's end.
//   leaf   256 tokens at fixed positions, from an empty state.
//   chunk  8 leaves, folded left; the chunks of a row are folded left into its result.
// A state with a zero sum is empty and folding it changes nothing, so tiles and leaves in which a row
// sees nothing may run or not. Who computes what (Plan) moves states between registers and workspace.
#pragma once

#include <type_traits>

#include "attention/append_attention.h"
#include "attention/attention_plan.cuh"
#include "common/device.cuh"

namespace specops {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// Sizes that follow from the element type and head_dim.
template <typename T, int kHeadDim>
struct AttentionShape {
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(T));
  static constexpr int kTile = kRowBytes <= 256 ? 64 : 32;  // tokens
  static constexpr int kRowTiles = kRowBytes <= 256 ? 4 : 2;
  static constexpr int kRows = 16 * kRowTiles;
  static constexpr int kScoreTiles = kTile / kAttentionWarps / 8;   // of 8 tokens, per warp
  static constexpr int kOutTiles = kHeadDim / kAttentionWarps / 8;  // of 8 columns, per warp
  static constexpr int kStages = kRowBytes <= 128 ? 4 : kRowBytes <= 512 ? 2 : 1;
  static constexpr int kVectors = kRowBytes / 16;  // of 16 bytes, per token
  static constexpr int kProbVectors = kTile * static_cast<int>(sizeof(T)) / 16;
  static constexpr int kTileBytes = kTile * kRowBytes;
  static constexpr int kTilesPerChunk = kChunkTokens / kTile;

  // Shared memory.
  static constexpr int kQueries = 0;
  static constexpr int kRing = kQueries + kRows * kRowBytes;  // kStages tiles of K, then of V
  static constexpr int kProbs = kRing + 2 * kStages * kTileBytes;
  static constexpr int kMaxima = kProbs + kRows * kProbVectors * 16;  // float [kRows, warps]
  static constexpr int kSums = kMaxima + kRows * kAttentionWarps * 4;
  static constexpr int kRunning = kSums + kRows * kAttentionWarps * 4;  // float [2, kRows]
  static constexpr int kLaneSums = kRunning + 2 * kRows * 4;
  static constexpr int kChunkSums = kLaneSums + 2 * kRowTiles * kAttentionThreads * 4;
  // float2 [2, kRows]
  static constexpr int kSeen = kChunkSums + 2 * kRows * 8;     // int2 [kRows]
  static constexpr int kTable = kSeen + kRows * 8;             // int [2, kChunkBlocks]
  static constexpr int kPlan = kTable + 2 * kChunkBlocks * 4;  // int [3, kPlanned]
  static constexpr int kScan = kPlan + 3 * kPlanned * 4;       // int [8]
  static constexpr int kUnit = kScan + 32;
  static constexpr int kTurns = kUnit + 256;
  static constexpr int kSharedBytes = kTurns + 48;  // then totals, or the list of groups

  // The running total of a sequence that one block owns: thread-private float4, thread innermost.
  static constexpr int kTotalFloats = kAttentionThreads * 4 * kRowTiles * (kOutTiles + 1);
};

// Rows of a tile in shared memory are rotated by XOR, so that eight rows read at one vector of 16
// bytes hit all banks: vector v of a row lies at v ^ twist(row).
template <int kVectors>
__device__ __forceinline__ int twist(int row) {
  static_assert(kVectors % 4 == 0);
  return kVectors % 8 == 0 ? row & 7 : (row >> 1) & 3;
}
// Its offset in bytes.
template <int kVectors>
__device__ __forceinline__ int place_of(int row, int vector) {
  return (row * kVectors + (vector ^ twist<kVectors>(row))) * 16;
}

// `x`, of which the compiler then knows nothing: it would else keep every address that follows from a
// thread's index in registers all along, and spill the states.
__device__ __forceinline__ int opaque(int x) {
  uint32_t word = x;
  ptx::forget(word);
  return static_cast<int>(word);
}

// The place of a lane's row, from which the vectors 2, 4, .. after its own are one XOR away: lanes
// begin at vector 0 or 1.
template <int kVectors>
struct LanePlace {
  static constexpr bool kPowerOfTwo = (kVectors & (kVectors - 1)) == 0;
  int row, vector;

  __device__ __forceinline__ LanePlace(int at_row, int at_vector)
      : row(at_row * kVectors * 16),
        vector(opaque((at_vector ^ twist<kVectors>(at_row)) * 16 + (kPowerOfTwo ? row : 0))) {}

  __device__ __forceinline__ int after(int vectors) const {
    return kPowerOfTwo ? vector ^ vectors * 16 : row + (vector ^ vectors * 16);
  }
};

// ---- states ----

// How two states combine: b after a. The weights of an empty one are zeros, its outputs too, and the
// other's scale is 1.
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

// The share of one lane in outputs of a tile of rows, in the fragment layout of mma: o[i][n][2 * half
// + e] belongs to row 16 * i + lane / 4 + 8 * half and column (warp * kOutTiles + n) * 8 +
// 2 * (lane % 4) + e.
template <int kRowTiles, int kOutTiles>
struct Outputs {
  float o[kRowTiles][kOutTiles][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[i][n][e] = 0.0f;
      }
    }
  }
};

// ---- one unit of work ----

// A tile of rows and the tokens one block reduces for it; what becomes of its state. In shared
// memory: as registers its fields would not leave room for the state of 64 rows.
struct Unit {
  Request request;
  int first_row;  // of the tile, packed: query row * group + query head of the KV head
  int rows;
  int head;                  // KV head
  int low, high;             // tokens that any row of the tile sees
  int begin, end;            // those of this unit, whole leaves cut to [low, high)
  int load_begin, load_end;  // those that are read
  // Tiles of KV that end after seen_end or begin before seen_begin have tokens some row of the tile
  // does not see.
  int seen_begin, seen_end;
  bool many_queries;
  bool valid;  // else there is nothing to do
  // A state in the workspace: [state_rows, head_dim] outputs, then [state_rows] of (m, l). The tile
  // begins at state_row.
  int state_row, state_rows;
  int tile_rows;        // rows before the unit was narrowed
  float* state;         // nullptr: the unit finishes the sequence and writes to out
  int64_t leaf_stride;  // not 0: every leaf has a state of its own, so many floats apart
  // How the sequence of this tile and head is split: chunks before first_cut are one unit each, the
  // others are cut into parts; first_tail is the number of chunk first_cut among the chunks so cut.
  int arrivals;  // units that are not empty; 0: nobody waits for the state
  int first_cut, first_tail;
  int64_t batch_idx;
  int shared, first_chunk;  // of the request
  int sequences, sequence;  // of the request; this one
  int counter;
  int chunk_quad, state_quads;  // where the request's chunk states begin, and their size
};

// A block's way through the units of a plan, in shared memory too.
struct Turns {
  int64_t first_request;
  int now, end;               // turns; from tail_begin on they are parts of chunks
  int tail_begin;             // units
  int part_leaves;            // of a part of a chunk that is cut
  int counters, quads, base;  // for the next plan
  int row_end;                // of all requests
};

// kExact = false is for a bench to price exactness: a chunk runs from end to end in one state, without
// the folds of its leaves. Launch it with tail_units = 0 and no prefixes; the product has no instance.
template <typename T, int kHeadDim, bool kExact = true>
struct Attention {
  using Shape = AttentionShape<T, kHeadDim>;
  static constexpr int kTile = Shape::kTile;
  static constexpr int kOutTiles = Shape::kOutTiles;
  static constexpr int kScoreTiles = Shape::kScoreTiles;
  static constexpr int kStages = Shape::kStages;
  static constexpr int kLeaf = kExact ? kLeafTokens : kChunkTokens;

  const AttentionLaunch& launch;
  const AppendAttentionParams& params;
  unsigned char* smem;
  Plan plan;
  Unit& unit;
  Turns& turns;

  static_assert(sizeof(Unit) <= 256 && sizeof(Turns) <= 48);

  __device__ __forceinline__ Attention(const AttentionLaunch& given)
      : launch(given),
        params(given.params),
        smem(shared_memory()),
        unit(*reinterpret_cast<Unit*>(smem + Shape::kUnit)),
        turns(*reinterpret_cast<Turns*>(smem + Shape::kTurns)) {
    int* ints = reinterpret_cast<int*>(smem + Shape::kPlan);
    plan = {
        ints, ints + kPlanned, ints + 2 * kPlanned, reinterpret_cast<int*>(smem + Shape::kScan)};
  }

  __device__ __forceinline__ int group() const {
    return static_cast<int>(params.num_qo_heads / params.num_kv_heads);
  }

  __device__ __forceinline__ static int thread_index() { return opaque(threadIdx.x); }

  // ---- loads ----

  // Where each 16 tokens of a chunk lie in the caches, in blocks of 16 tokens; -1: not to be read.
  __device__ __forceinline__ void load_table(int chunk) {
    int* table = reinterpret_cast<int*>(smem + Shape::kTable) + (chunk & 1) * kChunkBlocks;
    for (int i = threadIdx.x; i < kChunkBlocks; i += kAttentionThreads) {
      int token = chunk * kChunkTokens + i * kPageBlock;
      int place = -1;
      if (token < unit.load_end && token + kPageBlock > unit.load_begin) {
        int page_size = static_cast<int>(params.page_size);
        int page = params.kv_indices[unit.request.kv_begin + token / page_size];
        if (page < 0 || page >= params.num_pages) {
          report_error(params.error, ErrorCode::kAttentionPage);
        } else {
          place = page * (page_size / kPageBlock) + token % page_size / kPageBlock;
        }
      }
      table[i] = place;
    }
  }

  // Starts the copy of one tile of K or V; tokens out of range become zeros.
  __device__ __forceinline__ void load_tile(const void* cache, unsigned char* slot, int tile) {
    int begin = unit.load_begin, end = unit.load_end;
    unsigned thread = thread_index();
    const int* table = reinterpret_cast<const int*>(smem + Shape::kTable);
    int heads = static_cast<int>(params.num_kv_heads);
    const T* base = static_cast<const T*>(cache) + unit.head * kHeadDim;
#pragma unroll 4
    for (int pass = 0; pass < kTile * Shape::kVectors / kAttentionThreads; ++pass) {
      unsigned index = pass * kAttentionThreads + thread;
      int row = index / Shape::kVectors, vector = index % Shape::kVectors;
      int token = tile * kTile + row;
      int place = table[token / kPageBlock % (2 * kChunkBlocks)];
      bool valid = place >= 0 && token >= begin && token < end;
      int64_t offset = int64_t{place} * (kPageBlock * heads * kHeadDim) +
                       row % kPageBlock * (heads * kHeadDim) + vector * (16 / sizeof(T));
      ptx::cp_async_16(
          slot + place_of<Shape::kVectors>(row, vector), base + (valid ? offset : 0), valid);
    }
  }

  __device__ __forceinline__ unsigned char* k_slot(int tile) const {
    return smem + Shape::kRing + tile % kStages * Shape::kTileBytes;
  }
  __device__ __forceinline__ unsigned char* v_slot(int tile) const {
    return smem + Shape::kRing + (kStages + tile % kStages) * Shape::kTileBytes;
  }

  // Packed row -> row of q and out, query head of the KV head.
  __device__ __forceinline__ int64_t item_of(int row) const {
    int packed = unit.first_row + row;
    int query = packed / group(), head = packed % group();
    return (int64_t{unit.request.qo_begin} + query) * params.num_qo_heads + unit.head * group() +
           head;
  }

  template <int kRowTiles>
  __device__ __forceinline__ void load_queries() {
    int2* seen = reinterpret_cast<int2*>(smem + Shape::kSeen);
    for (int row = threadIdx.x; row < 16 * kRowTiles; row += kAttentionThreads) {
      int packed = unit.first_row + min(row, unit.rows - 1);
      int position = unit.request.kv_len - unit.request.qo_len + packed / group();
      seen[row] = make_int2(window_begin(params, position), position + 1);
    }
#pragma unroll 1
    for (unsigned index = threadIdx.x; index < 16 * kRowTiles * Shape::kVectors;
         index += kAttentionThreads) {
      int row = index / Shape::kVectors, vector = index % Shape::kVectors;
      bool valid = row < unit.rows;
      int packed = unit.first_row + (valid ? row : 0);
      int64_t query = int64_t{unit.request.qo_begin} + packed / group();
      int head = unit.head * group() + packed % group();
      const T* source = static_cast<const T*>(params.q) + query * params.q_stride +
                        head * kHeadDim + vector * (16 / sizeof(T));
      ptx::cp_async_16(
          smem + Shape::kQueries + place_of<Shape::kVectors>(row, vector), source, valid);
    }
  }

  // ---- arithmetic of a tile ----

  // s = scaled scores of the warp's tokens, -inf where a row does not see the token; each row's
  // maximum over them goes to shared memory.
  template <int kRowTiles>
  __device__ __forceinline__ void score(int tile, float (&s)[kRowTiles][kScoreTiles][4]) {
    int thread = thread_index();
    int lane = thread % kWarpSize, warp = thread / kWarpSize;
    const unsigned char* queries = smem + Shape::kQueries;
    const unsigned char* keys = k_slot(tile);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][n][e] = 0.0f;
      }
    }
    int first = warp * (8 * kScoreTiles);  // token of the warp in the tile
    if constexpr (sizeof(T) == 2) {
      // B: lanes 0-7 the first 8 tokens at vector 2 k, 8-15 at 2 k + 1, 16-31 the next 8 tokens.
      int token = first + lane % 8 + (kScoreTiles == 2 ? lane / 16 * 8 : 0);
      LanePlace<Shape::kVectors> b_place(token, lane / 8 % 2);
      // A: lanes 0-15 the rows at vector 2 k, 16-31 at 2 k + 1.
      LanePlace<Shape::kVectors> a_place(lane % 16, lane / 16);
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; ++k) {
        uint32_t b[kScoreTiles][2];
        if constexpr (kScoreTiles == 2) {
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
        for (int i = 0; i < kRowTiles; ++i) {
          uint32_t a[4];
          ptx::ldmatrix_x4(a, queries + i * 16 * Shape::kRowBytes + a_place.after(2 * k));
#pragma unroll
          for (int n = 0; n < kScoreTiles; ++n) ptx::mma_m16n8k16<T>(s[i][n], a, b[n]);
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
        float4 b[kScoreTiles][2];
#pragma unroll
        for (int n = 0; n < kScoreTiles; ++n) {
          b[n][0] = at(keys, first + 8 * n + 2 * (lane % 4), vector);
          b[n][1] = at(keys, first + 8 * n + 2 * (lane % 4) + 1, vector);
        }
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float4 a = at(queries, 16 * i + lane / 4 + 8 * half, vector);
#pragma unroll
            for (int n = 0; n < kScoreTiles; ++n) {
              s[i][n][2 * half] = dot(s[i][n][2 * half], a, b[n][0]);
              s[i][n][2 * half + 1] = dot(s[i][n][2 * half + 1], a, b[n][1]);
            }
          }
        }
      }
    }
    float scale = __fmul_rn(params.sm_scale, kLog2E);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][n][e] = __fmul_rn(s[i][n][e], scale);
      }
    }
    if (partly_seen(tile)) {
      const int2* rows = reinterpret_cast<const int2*>(smem + Shape::kSeen);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          int2 seen = rows[16 * i + lane / 4 + 8 * half];
#pragma unroll
          for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              int token = tile * kTile + first + 8 * n + 2 * (lane % 4) + e;
              if (token < seen.x || token >= seen.y) s[i][n][2 * half + e] = -INFINITY;
            }
          }
        }
      }
    }
    float* maxima = reinterpret_cast<float*>(smem + Shape::kMaxima);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int row = 16 * i + lane / 4 + 8 * half;
        float top = fmaxf(s[i][0][2 * half], s[i][0][2 * half + 1]);
        if (kScoreTiles == 2) {
          constexpr int kLast = kScoreTiles - 1;
          top = fmaxf(top, fmaxf(s[i][kLast][2 * half], s[i][kLast][2 * half + 1]));
        }
        top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kFullMask, top, 2));
        if (lane % 4 == 0) maxima[row * kAttentionWarps + warp] = top;
      }
    }
  }

  // Whether some row of the tile does not see some token of this tile of KV.
  __device__ __forceinline__ bool partly_seen(int tile) const {
    return (tile + 1) * kTile > unit.seen_end || tile * kTile < unit.seen_begin;
  }

  // The running maximum of a leaf after a tile, by row, in turns like chunk_sums.
  __device__ __forceinline__ float* running(int tile) const {
    return reinterpret_cast<float*>(smem + Shape::kRunning) + (tile & 1) * Shape::kRows;
  }

  // Each lane's share of the sums of weights of a leaf: [2 * row tiles, threads].
  __device__ __forceinline__ float* lane_sums() const {
    return reinterpret_cast<float*>(smem + Shape::kLaneSums);
  }

  // Weights of the tile's tokens under the running maximum, to shared memory; rescales the state.
  template <int kRowTiles>
  __device__ __forceinline__ void weigh(int tile,
                                        float (&s)[kRowTiles][kScoreTiles][4],
                                        Outputs<kRowTiles, kOutTiles>& leaf) {
    bool begins = tile * kTile % kLeaf == 0;
    int thread = thread_index();
    int lane = thread % kWarpSize, warp = thread / kWarpSize;
    unsigned char* probs = smem + Shape::kProbs;
    const float4* maxima = reinterpret_cast<const float4*>(smem + Shape::kMaxima);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int row = 16 * i + lane / 4 + 8 * half;
        float4 tops = maxima[row];
        float old = begins ? -INFINITY : running(tile - 1)[row];
        float top = fmaxf(old, fmaxf(fmaxf(tops.x, tops.y), fmaxf(tops.z, tops.w)));
        if (thread < kWarpSize && lane % 4 == 0) running(tile)[row] = top;
        float origin = top == -INFINITY ? 0.0f : top;
        float rescale = ptx::exp2_approx(__fsub_rn(old, origin));
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < kScoreTiles; ++n) {
          float p0 = ptx::exp2_approx(__fsub_rn(s[i][n][2 * half], origin));
          float p1 = ptx::exp2_approx(__fsub_rn(s[i][n][2 * half + 1], origin));
          sum = __fadd_rn(sum, __fadd_rn(p0, p1));
          int element = warp * (8 * kScoreTiles) + 8 * n + 2 * (lane % 4);
          constexpr int kPerVector = 16 / sizeof(T);
          unsigned char* place = probs + place_of<Shape::kProbVectors>(row, element / kPerVector) +
                                 element % kPerVector * sizeof(T);
          if constexpr (sizeof(T) == 2) {
            *reinterpret_cast<uint32_t*>(place) = ptx::pack2<T>(p0, p1);
          } else {
            *reinterpret_cast<float2*>(place) = make_float2(p0, p1);
          }
        }
        float* shares = lane_sums() + (2 * i + half) * kAttentionThreads + thread;
        *shares = begins ? sum : __fmaf_rn(*shares, rescale, sum);
#pragma unroll
        for (int n = 0; n < kOutTiles; ++n) {
          leaf.o[i][n][2 * half] = __fmul_rn(leaf.o[i][n][2 * half], rescale);
          leaf.o[i][n][2 * half + 1] = __fmul_rn(leaf.o[i][n][2 * half + 1], rescale);
        }
      }
    }
  }

  // leaf.o += P V.
  template <int kRowTiles>
  __device__ __forceinline__ void accumulate(int tile, Outputs<kRowTiles, kOutTiles>& leaf) {
    int thread = thread_index();
    int lane = thread % kWarpSize, warp = thread / kWarpSize;
    const unsigned char* probs = smem + Shape::kProbs;
    const unsigned char* values = v_slot(tile);
    if constexpr (sizeof(T) == 4) {
      const float* p = reinterpret_cast<const float*>(probs);
#pragma unroll 1
      for (int token = 0; token < kTile; ++token) {
        float2 v[kOutTiles];
#pragma unroll
        for (int n = 0; n < kOutTiles; ++n) {
          int column = (warp * kOutTiles + n) * 8 + 2 * (lane % 4);
          int place = place_of<Shape::kVectors>(token, column / 4) / 4 + column % 4;
          v[n] = *reinterpret_cast<const float2*>(reinterpret_cast<const float*>(values) + place);
        }
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            int row = 16 * i + lane / 4 + 8 * half;
            float weight = p[place_of<Shape::kProbVectors>(row, token / 4) / 4 + token % 4];
#pragma unroll
            for (int n = 0; n < kOutTiles; ++n) {
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
      int b_row = opaque(lane % 16 * Shape::kRowBytes);
      int b_turn = twist<Shape::kVectors>(lane % 16);
      int b_vector = opaque(kOutTiles % 2 == 0 ? (warp * kOutTiles + lane / 16) ^ b_turn
                                               : warp * kOutTiles + lane / 16);
#pragma unroll
      for (int k = 0; k < kTile / 16; ++k) {
        uint32_t b[(kOutTiles + 1) / 2][4];
#pragma unroll
        for (int n = 0; n < kOutTiles; n += 2) {
          int vector = kOutTiles % 2 == 0 ? b_vector ^ n : (b_vector + n) ^ b_turn;
          const unsigned char* place = values + k * 16 * Shape::kRowBytes + b_row + vector * 16;
          if (n + 1 < kOutTiles) {
            ptx::ldmatrix_x4_trans(b[n / 2], place);
          } else {
            uint32_t one[2];
            ptx::ldmatrix_x2_trans(one, place);
            b[n / 2][0] = one[0];
            b[n / 2][1] = one[1];
          }
        }
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          uint32_t a[4];
          ptx::ldmatrix_x4(a, probs + i * 16 * Shape::kProbVectors * 16 + a_place.after(2 * k));
#pragma unroll
          for (int n = 0; n < kOutTiles; ++n) {
            uint32_t column[2] = {b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]};
            ptx::mma_m16n8k16<T>(leaf.o[i][n], a, column);
          }
        }
      }
    }
  }

  // Whether the thread's own part of a landed tile of V holds an infinity or a NaN.
  __device__ __forceinline__ bool has_nonfinite(int tile) const {
    constexpr uint32_t kExponent = sizeof(T) == 4                ? 0x7f800000u
                                   : std::is_same_v<T, bfloat16> ? 0x7f80u
                                                                 : 0x7c00u;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(v_slot(tile));
    unsigned thread = thread_index();
    bool found = false;
    for (int pass = 0; pass < kTile * Shape::kVectors / kAttentionThreads; ++pass) {
      unsigned index = pass * kAttentionThreads + thread;
      int row = index / Shape::kVectors, vector = index % Shape::kVectors;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t word = words[place_of<Shape::kVectors>(row, vector) / 4 + i];
        found = found || (word & kExponent) == kExponent;
        if constexpr (sizeof(T) == 2) {
          found = found || (word >> 16 & kExponent) == kExponent;
        }
      }
    }
    return found;
  }

  // m and l of the chunk before leaf `leaf`, by row: in shared memory, as every thread of a row needs
  // the same and registers are short. In turns, so that a thread may read while another writes.
  __device__ __forceinline__ float2* chunk_sums(int leaf) const {
    return reinterpret_cast<float2*>(smem + Shape::kChunkSums) + (leaf & 1) * Shape::kRows;
  }

  // chunk = chunk, then the leaf that ends with the tile. The leaf's sums of weights are added up first: the four lanes of a
  // quad, then the warps in order.
  template <int kRowTiles>
  __device__ __forceinline__ void fold_leaf(int tile,
                                            const Outputs<kRowTiles, kOutTiles>& leaf,
                                            Outputs<kRowTiles, kOutTiles>& chunk) {
    int thread = thread_index();
    int lane = thread % kWarpSize, warp = thread / kWarpSize;
    float* sums = reinterpret_cast<float*>(smem + Shape::kSums);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = lane_sums()[(2 * i + half) * kAttentionThreads + thread];
        sum = __fadd_rn(sum, __shfl_xor_sync(kFullMask, sum, 1));
        sum = __fadd_rn(sum, __shfl_xor_sync(kFullMask, sum, 2));
        if (lane % 4 == 0) sums[(16 * i + lane / 4 + 8 * half) * kAttentionWarps + warp] = sum;
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int row = 16 * i + lane / 4 + 8 * half;
        float4 x = reinterpret_cast<const float4*>(sums)[row];
        float l = __fadd_rn(__fadd_rn(__fadd_rn(x.x, x.y), x.z), x.w);
        float2 before = chunk_sums(leaf_of(tile))[row];
        Fold fold = fold_sums(before.x, before.y, running(tile)[row], l);
        if (thread < kWarpSize && lane % 4 == 0) {
          chunk_sums(leaf_of(tile) + 1)[row] = make_float2(fold.m, fold.l);
        }
#pragma unroll
        for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            chunk.o[i][n][e] = fold_value(fold, chunk.o[i][n][e], leaf.o[i][n][e]);
          }
        }
      }
    }
  }

  // The chunks of a sequence that one block owns: `total`, thread-private memory, becomes total, then
  // the chunk, which takes the result as well.
  template <int kRowTiles>
  __device__ __forceinline__ void fold_chunk(int leaf,
                                             bool has_total,
                                             bool is_last,
                                             Outputs<kRowTiles, kOutTiles>& chunk) {
    int thread = thread_index();
    int lane = thread % kWarpSize;
    float4* total = total_of_block(thread);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      float2* place[2] = {chunk_sums(leaf) + 16 * i + lane / 4,
                          chunk_sums(leaf) + 16 * i + lane / 4 + 8};
      float2 sums[2] = {*place[0], *place[1]};
      Fold fold[2] = {fold_sums(-INFINITY, 0.0f, sums[0].x, sums[0].y),
                      fold_sums(-INFINITY, 0.0f, sums[1].x, sums[1].y)};
      if (has_total) {
        float4 before = total[i * (kOutTiles + 1) * kAttentionThreads];
        fold[0] = fold_sums(before.x, before.y, sums[0].x, sums[0].y);
        fold[1] = fold_sums(before.z, before.w, sums[1].x, sums[1].y);
      }
      total[i * (kOutTiles + 1) * kAttentionThreads] =
          make_float4(fold[0].m, fold[0].l, fold[1].m, fold[1].l);
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) {
        float4* at = total + (i * (kOutTiles + 1) + n + 1) * kAttentionThreads;
        float* o = chunk.o[i][n];
        if (has_total) {
          float4 before = *at;
          o[0] = fold_value(fold[0], before.x, o[0]);
          o[1] = fold_value(fold[0], before.y, o[1]);
          o[2] = fold_value(fold[1], before.z, o[2]);
          o[3] = fold_value(fold[1], before.w, o[3]);
        }
        if (!is_last) *at = make_float4(o[0], o[1], o[2], o[3]);
      }
    }
    __syncthreads();  // every thread has read the sums
    if (thread >= kWarpSize || lane % 4 != 0) return;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      float4 sums = total[i * (kOutTiles + 1) * kAttentionThreads];
      chunk_sums(leaf)[16 * i + lane / 4] =
          is_last ? make_float2(sums.x, sums.y) : make_float2(-INFINITY, 0.0f);
      chunk_sums(leaf)[16 * i + lane / 4 + 8] =
          is_last ? make_float2(sums.z, sums.w) : make_float2(-INFINITY, 0.0f);
    }
  }

  // ---- a unit ----

  // Reduces the unit's tokens for the rows of its tile and writes its states or the result. Returns
  // false, with nothing written, where V holds an infinity or a NaN that some row must not see: a
  // weight of zero would not keep it out.
  template <int kRowTiles>
  __device__ __forceinline__ bool attend() {
    load_queries<kRowTiles>();
    load_table(unit.begin / kChunkTokens);
    if (unit.end > (unit.begin / kChunkTokens + 1) * kChunkTokens) {
      load_table(unit.begin / kChunkTokens + 1);
    }
    __syncthreads();
    int begin = unit.begin / kTile;

    float s[kRowTiles][kScoreTiles][4];
    Outputs<kRowTiles, kOutTiles> leaf;
    Outputs<kRowTiles, kOutTiles> chunk;
    leaf.clear();
    chunk.clear();
    if (threadIdx.x < 16 * kRowTiles) {
      chunk_sums(leaf_of(begin))[threadIdx.x] = make_float2(-INFINITY, 0.0f);
      running(begin - 1)[threadIdx.x] = -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) lane_sums()[i * kAttentionThreads + threadIdx.x] = 0.0f;
    // Copies run ahead: what is begun in step `tile` is V of tile + kStages - 1 and K of the one
    // after it. The steps before first - 1 only begin copies, that step scores the first tile. What
    // the loop asks of the unit it reads anew in each step: registers are short.
#pragma unroll 1
    for (int tile = begin - kStages;; ++tile) {
      int first = unit.begin / kTile, last = (unit.end - 1) / kTile;
      if (tile > last) break;
      if (tile >= first - 1) __syncthreads();  // maxima are out; the tile before is done with
      if (tile >= first) {
        weigh<kRowTiles>(tile, s, leaf);
      }
      int ahead = tile + kStages - 1;
#pragma unroll 1
      for (int which = 0; which < 2; ++which) {
        int wanted = ahead + 1 - which;
        if (wanted < first || wanted > last) continue;
        load_tile(which == 0 ? params.k_cache : params.v_cache,
                  which == 0 ? k_slot(wanted) : v_slot(wanted),
                  wanted);
      }
      ptx::cp_async_commit();
      if (tile < first - 1) continue;
      if (tile % Shape::kTilesPerChunk == 0 && tile > first &&
          unit.end > (tile / Shape::kTilesPerChunk + 1) * kChunkTokens) {
        load_table(tile / Shape::kTilesPerChunk + 1);
      }
      ptx::cp_async_wait<kStages - 1>();
      if (tile >= first && unit.many_queries && partly_seen(tile)) {
        if (__syncthreads_or(has_nonfinite(tile))) {
          ptx::cp_async_wait<0>();
          return false;
        }
      } else {
        __syncthreads();  // weights, this tile's V and the next one's K are there
      }
      if (tile >= first) {
        accumulate<kRowTiles>(tile, leaf);
        last = (unit.end - 1) / kTile;
        if ((tile + 1) * kTile % kLeaf == 0 || tile == last) {
          fold_leaf<kRowTiles>(tile, leaf, chunk);
          bool leafwise = unit.leaf_stride != 0;
          if (leafwise || (tile + 1) % Shape::kTilesPerChunk == 0 || tile == last) {
            __syncthreads();  // the chunk's sums are there
            bool has_total = tile / Shape::kTilesPerChunk > unit.begin / kChunkTokens;
            if (!leafwise && (has_total || tile < last)) {
              fold_chunk<kRowTiles>(leaf_of(tile) + 1, has_total, tile == last, chunk);
              __syncthreads();
            }
            if (leafwise || tile == last) write<kRowTiles>(tile, chunk);
            if (leafwise && tile < last) {
              __syncthreads();
              if (threadIdx.x < 16 * kRowTiles) {
                chunk_sums(leaf_of(tile) + 1)[threadIdx.x] = make_float2(-INFINITY, 0.0f);
              }
            }
            chunk.clear();
          }
          leaf.clear();
        }
      }
      if (tile < (unit.end - 1) / kTile) score<kRowTiles>(tile + 1, s);
    }
    return true;
  }

  __device__ __forceinline__ static int leaf_of(int tile) { return tile * kTile / kLeaf; }

  __device__ __forceinline__ float4* total_of_block(int thread) const {
    float* base = launch.totals == nullptr
                      ? reinterpret_cast<float*>(smem + Shape::kSharedBytes)
                      : launch.totals + int64_t{blockIdx.x} * Shape::kTotalFloats;
    return reinterpret_cast<float4*>(base) + thread;
  }

  // ---- results ----

  __device__ __forceinline__ void write_lse(int64_t item, float m, float l) const {
    if (params.lse == nullptr) return;
    params.lse[item] = l == 0.0f ? -INFINITY : __fmul_rn(__fadd_rn(m, log2f(l)), kLn2);
  }
  __device__ __forceinline__ static float inverse(float l) {
    return l == 0.0f ? 0.0f : __fdiv_rn(1.0f, l);
  }

  __device__ __forceinline__ static void store_pair(T* out, float x, float y) {
    if constexpr (sizeof(T) == 2) {
      *reinterpret_cast<uint32_t*>(out) = ptx::pack2<T>(x, y);
    } else {
      *reinterpret_cast<float2*>(out) = make_float2(x, y);
    }
  }

  template <int kRowTiles>
  __device__ __forceinline__ void write(int tile, const Outputs<kRowTiles, kOutTiles>& sum) const {
    const float2* sums = chunk_sums(leaf_of(tile) + 1);
    float* state = unit.state;
    if (unit.leaf_stride != 0) {
      state += (leaf_of(tile) - unit.begin / kLeaf) * unit.leaf_stride;
    }
    int thread = thread_index();
    int lane = thread % kWarpSize, warp = thread / kWarpSize;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int row = 16 * i + lane / 4 + 8 * half;
        if (row >= unit.rows) continue;
        int column = warp * kOutTiles * 8 + 2 * (lane % 4);
        float m = sums[row].x, l = sums[row].y;
        bool writes_sums = warp == 0 && lane % 4 == 0;
        if (state != nullptr) {
          int place = unit.state_row + row;
#pragma unroll
          for (int n = 0; n < kOutTiles; ++n) {
            *reinterpret_cast<float2*>(state + place * kHeadDim + column + 8 * n) =
                make_float2(sum.o[i][n][2 * half], sum.o[i][n][2 * half + 1]);
          }
          if (writes_sums) {
            reinterpret_cast<float2*>(state + unit.state_rows * kHeadDim)[place] =
                make_float2(m, l);
          }
          continue;
        }
        int64_t item = item_of(row);
        T* out = static_cast<T*>(params.out) + item * kHeadDim + column;
        float scale = inverse(l);
#pragma unroll
        for (int n = 0; n < kOutTiles; ++n) {
          store_pair(out + 8 * n,
                     finished(sum.o[i][n][2 * half], scale),
                     finished(sum.o[i][n][2 * half + 1], scale));
        }
        if (writes_sums) write_lse(item, m, l);
      }
    }
  }

  // A request that contradicts itself: zeros and -inf.
  __device__ __forceinline__ void write_zeros() const {
    for (int i = threadIdx.x; i < unit.rows * (kHeadDim / 2); i += kAttentionThreads) {
      int64_t item = item_of(i / (kHeadDim / 2));
      int column = i % (kHeadDim / 2) * 2;
      store_pair(static_cast<T*>(params.out) + item * kHeadDim + column, 0.0f, 0.0f);
      if (column == 0) write_lse(item, 0.0f, 0.0f);
    }
  }

  // ---- split sequences ----

  // States of the sequence: of a chunk, and of a leaf of a chunk that was cut.
  __device__ __forceinline__ float* slot_state(int slot) const {
    int64_t index = int64_t{slot} * unit.sequences + unit.sequence;
    return launch.chunk_states + 4 * (unit.chunk_quad + index * unit.state_quads);
  }
  // A chunk that begins with shared leaves has a slot for each of its own.
  __device__ __forceinline__ bool is_boundary(int chunk) const {
    return unit.shared % kChunkLeaves != 0 && chunk == unit.first_chunk;
  }
  __device__ __forceinline__ float* chunk_state(int chunk) const {
    int slot = chunk - unit.first_chunk;
    if (unit.shared % kChunkLeaves != 0) slot += kChunkLeaves - 1 - unit.shared % kChunkLeaves;
    return slot_state(slot);
  }
  __device__ __forceinline__ float* leaf_state(int leaf) const {
    if (is_boundary(leaf / kChunkLeaves)) return slot_state(leaf - unit.shared);
    int64_t tail = unit.first_tail + int64_t{leaf / kChunkLeaves - unit.first_cut} * unit.sequences;
    return launch.leaf_states + (tail * kChunkLeaves + leaf % kChunkLeaves) * launch.leaf_floats;
  }

  // Four columns of a row's state.
  struct Part {
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
    __device__ __forceinline__ void append(const float* state, int rows, int row, int quad) {
      append(reinterpret_cast<const float2*>(state + rows * kHeadDim)[row],
             reinterpret_cast<const float4*>(state)[row * (kHeadDim / 4) + quad]);
    }
  };

  __device__ __forceinline__ void write_part(int row, int quad, const Part& total) const {
    int64_t item = item_of(row);
    float scale = inverse(total.l);
    T* out = static_cast<T*>(params.out) + item * kHeadDim + 4 * quad;
    store_pair(out, finished(total.o.x, scale), finished(total.o.y, scale));
    store_pair(out + 2, finished(total.o.z, scale), finished(total.o.w, scale));
    if (quad == 0) write_lse(item, total.m, total.l);
  }

  // The same where groups have reduced the first leaves.
  __device__ __forceinline__ void finish_shared() const {
    constexpr int kQuads = kHeadDim / 4;
    int last_leaf = (unit.high - 1) / kLeafTokens;
    for (int i = threadIdx.x; i < unit.rows * kQuads; i += kAttentionThreads) {
      int row = i / kQuads, quad = i % kQuads;
      Part total;
      for (int chunk = 0; chunk * kChunkLeaves <= last_leaf; ++chunk) {
        int leaf = chunk * kChunkLeaves;
        if (leaf < unit.shared) {
          const Group& group = group_of(leaf);
          if (group.holds_chunk(chunk)) {
            append_shared(total, group, group.slot_of_chunk(chunk), row, quad);
            continue;
          }
        } else if (chunk < unit.first_cut) {
          total.append(chunk_state(chunk), unit.state_rows, row, quad);
          continue;
        }
        Part sum;
        for (; leaf <= last_leaf && leaf / kChunkLeaves == chunk; ++leaf) {
          if (leaf < unit.shared) {
            const Group& group = group_of(leaf);
            append_shared(sum, group, group.slot_of_leaf(leaf), row, quad);
          } else {
            sum.append(leaf_state(leaf), unit.state_rows, row, quad);
          }
        }
        total.append(make_float2(sum.m, sum.l), sum.o);
      }
      write_part(row, quad, total);
    }
  }

  // The group that has reduced a leaf of the unit's request.
  __device__ __forceinline__ const Group& group_of(int leaf) const {
    int64_t level = params.num_prefix_levels - 1;
    for (; level > 0; --level) {
      const Group& group = group_at(level);
      if (leaf >= group.begin) return group;
    }
    return group_at(0);
  }
  __device__ __forceinline__ const Group& group_at(int64_t level) const {
    return launch.groups[level * params.batch + leader_of(params, level, unit.batch_idx)];
  }
  __device__ __forceinline__ void append_shared(
      Part& part, const Group& group, int slot, int row, int quad) const {
    int packed = unit.first_row + row;
    packed += (unit.request.qo_begin - group.first_row) * this->group();
    part.append(group_state(group, slot, unit.head, packed / Shape::kRows),
                group_state_rows(group),
                packed % Shape::kRows,
                quad);
  }
  __device__ __forceinline__ int group_state_rows(const Group& group) const {
    int64_t packed = int64_t{group.rows} * this->group();
    return packed < Shape::kRows ? static_cast<int>(packed + 1) / 2 * 2 : Shape::kRows;
  }
  __device__ __forceinline__ int group_tiles(const Group& group) const {
    return static_cast<int>((int64_t{group.rows} * this->group() + Shape::kRows - 1) /
                            Shape::kRows);
  }
  // Floats between slots of a group.
  __device__ __forceinline__ int64_t group_stride(const Group& group) const {
    return int64_t{group_tiles(group)} * params.num_kv_heads * group_state_rows(group) *
           (kHeadDim + 2);
  }
  __device__ __forceinline__ float* group_state(const Group& group,
                                                int slot,
                                                int head,
                                                int tile) const {
    return launch.shared_states + int64_t{4} * group.state + slot * group_stride(group) +
           (int64_t{head} * group_tiles(group) + tile) * group_state_rows(group) * (kHeadDim + 2);
  }

  // Folds the states of a sequence in order and writes its rows.
  __device__ __forceinline__ void finish() const {
    constexpr int kQuads = kHeadDim / 4;
    int first_leaf = unit.low / kLeafTokens, last_leaf = (unit.high - 1) / kLeafTokens;
    int first_chunk = unit.low / kChunkTokens, last_chunk = (unit.high - 1) / kChunkTokens;
    for (int i = threadIdx.x; i < unit.rows * kQuads; i += kAttentionThreads) {
      int row = i / kQuads, quad = i % kQuads;
      Part total;
      // Eight states at a time, so that their loads overlap.
      float2 sums[kChunkLeaves];
      float4 outs[kChunkLeaves];
      auto load = [&](int slot, const float* state) {
        sums[slot] = reinterpret_cast<const float2*>(state + unit.state_rows * kHeadDim)[row];
        outs[slot] = reinterpret_cast<const float4*>(state)[row * kQuads + quad];
      };
      for (int chunk = first_chunk; chunk <= last_chunk && chunk < unit.first_cut;
           chunk += kChunkLeaves) {
#pragma unroll
        for (int j = 0; j < kChunkLeaves; ++j) {
          sums[j] = make_float2(-INFINITY, 0.0f);
          outs[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (chunk + j <= last_chunk && chunk + j < unit.first_cut) {
            load(j, chunk_state(chunk + j));
          }
        }
#pragma unroll
        for (int j = 0; j < kChunkLeaves; ++j) {
          total.append(sums[j], outs[j]);
        }
      }
      for (int chunk = max(first_chunk, unit.first_cut); chunk <= last_chunk; ++chunk) {
#pragma unroll
        for (int j = 0; j < kChunkLeaves; ++j) {
          int leaf = chunk * kChunkLeaves + j;
          sums[j] = make_float2(-INFINITY, 0.0f);
          outs[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (leaf >= first_leaf && leaf <= last_leaf) load(j, leaf_state(leaf));
        }
        Part sum;
#pragma unroll
        for (int j = 0; j < kChunkLeaves; ++j) sum.append(sums[j], outs[j]);
        total.append(make_float2(sum.m, sum.l), sum.o);
      }
      write_part(row, quad, total);
    }
  }

  __device__ __forceinline__ bool run_tile() {
    if (Shape::kRowTiles == 2 || unit.rows <= 32) return attend<2>();
    return attend<Shape::kRowTiles>();
  }

  // Runs the tile at once, or, where that would not be exact, one query row after the other.
  __device__ __forceinline__ void run() {
    for (;;) {
      bool done = run_tile();
      if (done && unit.tile_rows == unit.state_row + unit.rows) return;
      __syncthreads();
      if (threadIdx.x == 0) narrow(done ? unit.state_row + unit.rows : 0);
      __syncthreads();
    }
  }

  // Makes the unit one of the query of row `row` of its tile.
  __device__ __forceinline__ void narrow(int row) {
    unit.first_row += row - unit.state_row;
    unit.state_row = row;
    int query = unit.first_row / group();
    unit.rows = min((query + 1) * group() - unit.first_row, unit.tile_rows - row);
    int position = unit.request.kv_len - unit.request.qo_len + query;
    unit.load_begin = max(unit.begin, window_begin(params, position));
    unit.load_end = min(unit.end, position + 1);
    unit.seen_end = position + 1;
    unit.seen_begin = window_begin(params, position);
    unit.many_queries = false;
  }

  // Unit `index` of the plan of the requests from first_request on. `part`: -1, or which part of the
  // chunk; units from tail_begin on are cut into parts, where they can be. By one thread.
  __device__ __forceinline__ void find_unit(int64_t first_request,
                                            int index,
                                            int tail_begin,
                                            int part) {
    int most = static_cast<int>(min(params.batch - first_request, int64_t{kPlanned}));
    int low = find_owner(index, most);
    int first_unit = low == 0 ? 0 : plan.unit_end[low - 1];
    Request request = load_request(params, first_request + low);
    bool whole = plan.counter[low] < 0;
    int shared = whole || !request.valid ? 0 : shared_leaves(launch, first_request + low);
    Demand demand = demand_of<Shape::kRows>(params, request, shared);
    int sequences = demand.sequences;
    int place = index - first_unit;
    int chunk = demand.first_chunk + place / sequences;
    int sequence = place % sequences;
    int head = sequence / demand.tiles, tile = sequence % demand.tiles;
    unit.valid = true;
    if (whole) {
      tile = demand.tiles - 1 - tile;  // the longest first
      if (part > 0) unit.valid = false;
      part = -1;
    }
    unit.request = request;
    unit.head = head;
    unit.first_row = tile * Shape::kRows;
    int64_t packed = int64_t{request.qo_len} * group();
    unit.rows = static_cast<int>(min(packed - unit.first_row, int64_t{Shape::kRows}));
    unit.state_row = 0;
    unit.state_rows = (unit.rows + 1) / 2 * 2;
    unit.tile_rows = unit.rows;
    unit.state = nullptr;
    unit.leaf_stride = 0;
    unit.arrivals = 1;
    unit.batch_idx = first_request + low;
    unit.shared = shared;
    if (!request.valid) {
      if (part > 0) unit.valid = false;
      return;
    }
    int first_query = unit.first_row / group();
    int last_query = (unit.first_row + unit.rows - 1) / group();
    int position = request.kv_len - request.qo_len;
    unit.low = window_begin(params, position + first_query);
    unit.high = position + last_query + 1;
    unit.seen_begin = window_begin(params, position + last_query);
    unit.seen_end = position + first_query + 1;
    unit.many_queries = first_query != last_query;
    unit.begin = unit.low;
    unit.end = unit.high;
    if (!whole) {
      int part_leaves = turns.part_leaves;
      int begin = chunk * kChunkTokens + max(part, 0) * part_leaves * kLeafTokens;
      unit.begin = max(max(unit.low, begin), shared * kLeafTokens);
      unit.end = min(unit.high, begin + (part < 0 ? kChunkTokens : part_leaves * kLeafTokens));
      if (unit.begin >= unit.end) unit.valid = false;
      // Chunks of this sequence from first_cut on lie in the tail.
      int before = max(tail_begin - first_unit - sequence, 0);
      int first_cut = (before + sequences - 1) / sequences;
      unit.first_cut = demand.first_chunk + first_cut;
      unit.first_tail = first_unit + first_cut * sequences + sequence - tail_begin;
      int begin_leaf = max(unit.low / kLeafTokens, shared);
      int chunks =
          min(unit.first_cut, (unit.high - 1) / kChunkTokens + 1) - begin_leaf / kChunkLeaves;
      int first_leaf = max(begin_leaf, unit.first_cut * kChunkLeaves);
      int last_part = (unit.high - 1) / kLeafTokens / part_leaves;
      unit.arrivals = max(chunks, 0) + max(last_part + 1 - first_leaf / part_leaves, 0);
      unit.first_chunk = demand.first_chunk;
      unit.sequences = sequences;
      unit.sequence = sequence;
      unit.counter = plan.counter[low] + sequence;
      unit.chunk_quad = plan.state[low];
      unit.state_quads = demand.state_quads;
      if (unit.arrivals > 1 || shared > 0) {
        bool leafwise = part >= 0 || is_boundary(chunk);
        unit.state = leafwise ? leaf_state(unit.begin / kLeafTokens) : chunk_state(chunk);
        if (leafwise) {
          unit.leaf_stride =
              is_boundary(chunk) ? slot_state(1) - slot_state(0) : launch.leaf_floats;
        }
      }
    }
    unit.load_begin = unit.begin;
    unit.load_end = unit.end;
  }

  // Which request, or group, of the first `count` of the plan has the unit.
  __device__ __forceinline__ int find_owner(int index, int count) const {
    int low = 0, high = count - 1;  // the first that ends after the unit
    while (low < high) {
      int middle = (low + high) / 2;
      if (plan.unit_end[middle] > index) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }

  __device__ __forceinline__ Group* group_list() const {
    return reinterpret_cast<Group*>(smem + Shape::kSharedBytes);
  }

  // Unit `index` of plan_groups: rows of all members of a group and a piece of what they share. All
  // of it lies before the first of their rows.
  __device__ __forceinline__ void find_shared_unit(int index) {
    int owner = find_owner(index, kPlanned);
    const Group& group = group_list()[owner];
    int place = index - (owner == 0 ? 0 : plan.unit_end[owner - 1]);
    int tiles = group_tiles(group), heads = static_cast<int>(params.num_kv_heads);
    int piece = place / (tiles * heads), tile = place % tiles;
    int begin = group.begin + piece, end = begin + 1;
    if (group.leafwise == 0) {
      int chunk = group.begin / kChunkLeaves + piece;
      begin = max(group.begin, chunk * kChunkLeaves);
      end = min(group.end, (chunk + 1) * kChunkLeaves);
    }
    unit.valid = true;
    unit.request = load_request(params, group.member);
    unit.request.qo_begin = group.first_row;
    unit.head = place / tiles % heads;
    unit.first_row = tile * Shape::kRows;
    int64_t packed = int64_t{group.rows} * this->group();
    unit.rows = static_cast<int>(min(packed - unit.first_row, int64_t{Shape::kRows}));
    unit.state_row = 0;
    unit.state_rows = group_state_rows(group);
    unit.tile_rows = unit.rows;
    unit.low = unit.begin = unit.load_begin = begin * kLeafTokens;
    unit.high = unit.end = unit.load_end = end * kLeafTokens;
    unit.seen_begin = 0;
    unit.seen_end = INT32_MAX;
    unit.many_queries = false;
    unit.arrivals = 0;
    unit.leaf_stride = 0;
    if (group.holds_chunk(begin / kChunkLeaves)) {
      unit.state = group_state(group, group.slot_of_chunk(begin / kChunkLeaves), unit.head, tile);
    } else {
      unit.state = group_state(group, group.slot_of_leaf(begin), unit.head, tile);
      unit.leaf_stride = group_stride(group);
    }
  }

  // Runs the unit that was found.
  __device__ __forceinline__ void run_unit() {
    if (!unit.valid) return;
    if (!unit.request.valid) return write_zeros();
    run();
    if (unit.state == nullptr || unit.arrivals == 0) return;
    // The last block to arrive folds what all have written.
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      int32_t* counter = launch.counters + unit.counter;
      bool is_last = atomicAdd(counter, 1) == unit.arrivals - 1;
      if (is_last) *counter = 0;
      *plan.scan = is_last;
      unit.first_row -= unit.state_row;  // the whole tile again
      unit.rows = unit.tile_rows;
    }
    __syncthreads();
    if (*plan.scan == 0) return;
    __threadfence();
    if (unit.shared > 0) {
      finish_shared();
    } else {
      finish();
    }
  }

  __device__ __forceinline__ void run_shared() {
    int units = plan_groups<Shape::kRows>(launch,
                                          plan,
                                          group_list(),
                                          reinterpret_cast<int*>(smem + Shape::kRing),
                                          (Shape::kProbs - Shape::kRing) / 4);
    if (threadIdx.x == 0) {
      turns.now = static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x);
      turns.end = units;
    }
    run_turns();
  }

  __device__ __forceinline__ void run_turns() {
    for (;;) {
      __syncthreads();  // the unit before is done with shared memory
      if (threadIdx.x == 0) next_unit();
      __syncthreads();
      if (turns.now >= turns.end) break;
      run_unit();
    }
  }

  __device__ __forceinline__ void run_all() {
    if (launch.is_shared_launch) return run_shared();
    if (threadIdx.x == 0) turns.row_end = 0;
    __syncthreads();
    for (int64_t first = 0; first < params.batch; first = turns.first_request + kPlanned) {
      // Used so far, and the units of the requests before, modulo the grid.
      int counters = first == 0 ? 0 : turns.counters, quads = first == 0 ? 0 : turns.quads;
      int base = first == 0 ? 0 : turns.base;
      int units = make_plan<Shape::kRows>(launch, plan, first, counters, quads, &turns.row_end);
      int blocks = static_cast<int>(gridDim.x);
      // Units go to the blocks in turn. What is left for a wave of few blocks is cut into leaves.
      int tail = (base + units) % blocks;
      bool cuts = first + kPlanned >= params.batch && tail <= min(launch.tail_units, units);
      int parts = kChunkLeaves;  // of a chunk that is cut: as many as run at once
      while (parts > 2 && tail * parts > blocks) parts /= 2;
      if (threadIdx.x == 0) {
        turns.first_request = first;
        turns.tail_begin = cuts ? units - tail : units;
        turns.end = cuts ? units - tail + tail * parts : units;
        turns.part_leaves = kChunkLeaves / parts;
        turns.now = (static_cast<int>(blockIdx.x) - base + blocks) % blocks - blocks;
        turns.counters = counters;
        turns.quads = quads;
        turns.base = tail;
      }
      run_turns();
    }
    zero_padding();
  }

  __device__ __forceinline__ void next_unit() {
    turns.now += static_cast<int>(gridDim.x);
    if (turns.now >= turns.end) return;
    if (launch.is_shared_launch) return find_shared_unit(turns.now);
    int in_tail = turns.now - turns.tail_begin, parts = kChunkLeaves / turns.part_leaves;
    if (in_tail < 0) {
      find_unit(turns.first_request, turns.now, turns.tail_begin, -1);
    } else {
      find_unit(turns.first_request,
                turns.tail_begin + in_tail / parts,
                turns.tail_begin,
                in_tail % parts);
    }
  }

  // Rows that belong to no request.
  __device__ __forceinline__ void zero_padding() const {
    int64_t used = turns.row_end;
    int64_t first = used * params.num_qo_heads * (kHeadDim / 2);
    int64_t last = params.rows * params.num_qo_heads * (kHeadDim / 2);
    int64_t step = int64_t{gridDim.x} * kAttentionThreads;
    for (int64_t i = first + int64_t{blockIdx.x} * kAttentionThreads + threadIdx.x; i < last;
         i += step) {
      store_pair(static_cast<T*>(params.out) + 2 * i, 0.0f, 0.0f);
      if (i % (kHeadDim / 2) == 0) write_lse(i / (kHeadDim / 2), 0.0f, 0.0f);
    }
  }
};

// out = softmax(sm_scale q K^T) V over the tokens each row sees, and its log-sum-exp.
// Grid:    kAttentionBlocksPerSm per SM; a block takes every gridDim.x-th unit of work: a chunk of
//          2,048 tokens, a part of one or a whole sequence, for a tile of rows and one KV head.
// Block:   4 warps. Scores: a warp owns a quarter of the tile's tokens for all rows. P V: a warp owns
//          a quarter of head_dim for all tokens, so that K and V are read once from shared memory.
// Smem:    queries, a ring of kStages tiles of K and of V, weights, maxima and sums, page table,
//          plan: 100 KiB at head_dim 128 and two bytes; 8 more to share prefixes, 40 without totals.
// Cost:    K and V once per tile of rows, 4 * rows * tokens * head_dim flops with rows rounded up to
//          32 or 64; bandwidth-bound up to there. States: 520 bytes per row and unit at head_dim 128.
// Assumes: q rows, caches and workspace aligned to 16 bytes; counters zero.
// Order:   fixed by the positions of the tokens, see the head of this file; fp32.
// Source:  Dao et al. 2022, 2023 (FlashAttention); Ye et al. 2025 (FlashInfer: packed groups).
template <typename T, int kHeadDim, bool kExact = true>
__global__ void __launch_bounds__(kAttentionThreads, kAttentionBlocksPerSm)
    append_attention_kernel(AttentionLaunch launch) {
  Attention<T, kHeadDim, kExact>(launch).run_all();
}

}  // namespace specops
