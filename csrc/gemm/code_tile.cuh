// SPDX-License-Identifier: Apache-2.0
// Product of many rows and integer weights on tensor cores, in tiles of 128 outputs by 64 rows. The
// rows have been rounded by another kernel (rounded_rows.cuh). Pieces are added as in
// code_product.cuh, so the bits are the same.
#pragma once

#include "common/sm_size.cuh"
#include "gemm/code_product.cuh"
#include "gemm/rounded_rows.cuh"

namespace specops {

struct CodeTilePlan : CodePlan {
  uint32_t inverse;  // 2^31 / lines per group of inputs, rounded up; 0 if there are no lines
};

// Returns the plan of a tile. Lines are divided by the lines of a group by a multiplication, which
// is exact for up to 2^20 inputs.
template <typename Codes>
CodeTilePlan code_tile_plan(const GemmParams& params) {
  CodeTilePlan plan{code_plan<Codes>(params), 0};
  if (plan.lines == 0) return plan;
  int64_t lines = params.weight.group * plan.lines / kCodeStage;
  plan.inverse = static_cast<uint32_t>(((int64_t{1} << 31) + lines - 1) / lines);
  return plan;
}

// Form of a tile. kPieceSteps: steps of 32 inputs per piece. kScaled: whether scales are by group
// of inputs. kOffsets: whether there are offsets.
template <typename CodesOf, typename NumbersOf, int kPieceStepsOf, bool kScaledOf, bool kOffsetsOf>
struct CodeTileShape {
  using Codes = CodesOf;
  using Numbers = NumbersOf;
  using Rows = RoundedStage<Numbers>;
  static constexpr int kPieceSteps = kPieceStepsOf;
  static constexpr bool kScaled = kScaledOf;
  static constexpr bool kOffsets = kOffsetsOf;
  static constexpr int kPieces = kCodeSteps / kPieceSteps;
  static constexpr int kSides = 4;  // warps, each with 32 outputs and all rows
  static constexpr int kThreads = kWarpSize * kSides;
  static constexpr int kOutputs = 32 * kSides;
  // A slot has weights, rows, and by side a line of scales per piece, and of offsets.
  static constexpr int kSideBytes = CodeRing<Codes>::kVectors * 16;
  static constexpr int kRowsAt = kSides * kSideBytes;
  static constexpr int kRowsBytes = kOffsets ? Rows::kBytes : Rows::kSumsAt;
  static constexpr int kLinesAt = kRowsAt + kRowsBytes;
  static constexpr int kLineBytes = kScaled ? kPieces * 128 : 0;
  static constexpr int kOffsetsAt = kLinesAt + kSides * kLineBytes;
  static constexpr int kSlotBytes = kOffsetsAt + (kOffsets ? kSides * kLineBytes : 0);
  static constexpr int kSmemBytes = 2 * kSlotBytes;
  // Blocks of an SM, as shared memory and registers allow.
  static constexpr bool kIsSmall = Numbers::kPlanes == 1 && !kOffsets &&
                                   !std::is_same_v<Codes, Int4Table> && kSmemBytes <= (53 << 10);
  static constexpr int kBlocks = kIsSmall && kHasLargeSms ? 3 : 2;
  static constexpr int kTotalBytes = kThreads * Rows::kRows * 4;
  static_assert(kTotalBytes <= kSmemBytes);
};

// The copies of one thread, of 16 bytes each: kWeights of its warp's weights, kRows of the block's
// rows, and one or two of scales and offsets.
template <typename Shape>
struct CodeTileCopy {
  using Ring = CodeRing<typename Shape::Codes>;
  static constexpr int kWeights = Ring::kVectors / kWarpSize;
  static constexpr int kRows = (Shape::kRowsBytes / 16 + Shape::kThreads - 1) / Shape::kThreads;
  static constexpr int kCopies = kWeights + kRows + 1;
  static constexpr int kLineVectors = static_cast<int>(kWeightGroup) / 4;

  const CodeTilePlan& plan;
  const uint4 *weights, *rows;
  const float *lines, *offsets;
  int num_inputs, last_group, lane, side, input;
  uint32_t twice_line;
  bool has_line, has_last_row;

  __device__ CodeTileCopy(const WeightParams& weight,
                          const CodeTilePlan& by,
                          const unsigned char* row_tile,
                          int64_t first_group)
      : plan(by),
        num_inputs(static_cast<int>(weight.num_inputs)),
        last_group(static_cast<int>(scale_groups(weight.num_inputs, weight.group)) - 1) {
    int thread = static_cast<int>(threadIdx.x);
    lane = thread % kWarpSize;
    side = thread / kWarpSize;
    int64_t group = min(first_group + side, weight_groups(weight.num_outputs) - 1);
    weights = static_cast<const uint4*>(weight.data) + group * plan.stages * Ring::kVectors + lane;
    rows = reinterpret_cast<const uint4*>(row_tile) + thread;
    has_last_row = (kRows - 1) * Shape::kThreads + thread < Shape::kRowsBytes / 16;
    // If the pieces of a stage share a scale, each piece gets a copy.
    int line = lane / kLineVectors;
    has_line = Shape::kScaled && line < Shape::kPieces;
    input = line * 32 * Shape::kPieceSteps;
    twice_line = plan.lines == 1 ? 0u : static_cast<uint32_t>(2 * line);
    int64_t line_at = group * (last_group + 1) * kWeightGroup + lane % kLineVectors * 4;
    lines = weight.scales + line_at;
    ptx::forget(lines);
    if (Shape::kOffsets) {
      offsets = weight.offsets + line_at;
      ptx::forget(offsets);
    }
  }

  // Starts copies number `first` to `last` - 1 of the next stage, and after the last one moves on
  // to the stage after it. Copies that are not valid and scales past the last input read nothing.
  __device__ void fetch(unsigned char* slot, int first, int last, bool valid) {
    unsigned char* w_to = slot + side * Shape::kSideBytes + lane * 16;
    unsigned char* rows_to = slot + Shape::kRowsAt + threadIdx.x * 16;
#pragma unroll
    for (int i = first; i < last; ++i) {
      if (i < kWeights) {
        ptx::cp_async_16(w_to + i * 512, weights + i * kWarpSize, valid);
      } else if (i < kCopies - 1) {
        int at = (i - kWeights) * Shape::kThreads;
        if (i < kCopies - 2 || has_last_row) {
          ptx::cp_async_16(rows_to + at * 16, rows + at, valid);
        }
      } else if (has_line) {
        fetch_line(slot + Shape::kLinesAt + side * Shape::kLineBytes + lane * 16);
      }
    }
    if (last < kCopies) return;
    weights += Ring::kVectors;
    rows += Shape::Rows::kBytes / 16;
    input += kCodeInputs;
    twice_line += 2 * static_cast<uint32_t>(plan.lines);
    ptx::cp_async_commit();
  }

  __device__ void fetch_line(unsigned char* to) const {
    int group = min(static_cast<int>(__umulhi(twice_line, plan.inverse)), last_group);
    int at = group * static_cast<int>(kWeightGroup);
    bool valid = input < num_inputs;
    ptx::cp_async_16(to, lines + at, valid);
    if (!Shape::kOffsets) return;
    ptx::cp_async_16(to + Shape::kOffsetsAt - Shape::kLinesAt, offsets + at, valid);
  }
};

__device__ inline void load4(float (&to)[4], const void* from) {
  float4 four = *static_cast<const float4*>(from);
  to[0] = four.x;
  to[1] = four.y;
  to[2] = four.z;
  to[3] = four.w;
}

// Scales and sums of integers of four rows, and scales and offsets of four outputs, for one piece.
struct PieceScales {
  float steps[4], row_sums[4], scales[4], offsets[4];
};

// The products of one warp. Columns 2 p and 2 p + 1 of the mma hold the rows 16 p to 16 p + 15,
// such that lane t has the rows 16 p + 4 t to 16 p + 4 t + 3, whose scales it reads at once.
template <typename Shape>
struct CodeTileProducts {
  using Codes = typename Shape::Codes;
  using Rows = typename Shape::Rows;
  static constexpr int kPairs = Rows::kRows / 16;
  static constexpr int kPlanes = Shape::Numbers::kPlanes;
  static constexpr int kPieceSteps = Shape::kPieceSteps;
  // A piece of 32 inputs has few products, so the sums of each pair are added while the next pair
  // is multiplied. A piece of a whole stage leaves no registers for that.
  static constexpr bool kIsLong = Shape::kPieces == 1;
  using Sums = int[2][2][kPlanes][4];  // of a pair: [column][tile]

  Codes codes{};
  int lane, side, w_from, x_from, lines_from, scales_from;
  int rows_left;
  Sums last_sums;  // of the pair before, not yet added
  PieceScales last = {};
  float totals[kPairs][4][4] = {};  // [pair][row][output]

  __device__ CodeTileProducts(const WeightParams& weight, int64_t rows)
      : rows_left(static_cast<int>(rows)) {
    lane = static_cast<int>(threadIdx.x) % kWarpSize;
    side = static_cast<int>(threadIdx.x) / kWarpSize;
    int g = lane / 4, t = lane % 4;
    w_from = side * Shape::kSideBytes + lane * 16;
    x_from = Shape::kRowsAt + Rows::lane_at(g / 2 * 4 + g % 2, t);
    lines_from = Shape::kLinesAt + side * Shape::kLineBytes + g * 16;
    scales_from = Shape::kRowsAt + Rows::kScalesAt + 16 * t;
    codes.begin(weight);
#pragma unroll
    for (int i = 0; i < 16 * kPlanes; ++i) at(last_sums, i) = static_cast<int>(kWholeBits);
  }

  static __device__ int& at(Sums& sums, int i) {
    return sums[i / 8 / kPlanes][i / 4 / kPlanes % 2][i / 4 % kPlanes][i % 4];
  }

  // Adds a piece of the stage in `slot`. between(pair) is called after the products of each pair.
  template <typename Between>
  __device__ void add_piece(const unsigned char* memory,
                            int slot,
                            int piece,
                            const Between& between) {
    int first = piece * kPieceSteps;
    uint32_t a[kPieceSteps][2][4];
#pragma unroll
    for (int i = 0; i < 2 * kPieceSteps; ++i) {
      const unsigned char* from = memory + slot + w_from + i % 2 * Codes::kVectors * 512;
      codes.load(
          a[i / 2][i % 2],
          [&](int vector) { return *reinterpret_cast<const uint4*>(from + vector * 512); },
          first + i / 2);
    }
    PieceScales by;
    const unsigned char* lines = memory + slot + lines_from + piece * 128;
    if (Shape::kScaled) load4(by.scales, lines);
    if (Shape::kOffsets) load4(by.offsets, lines + Shape::kOffsetsAt - Shape::kLinesAt);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      if (kIsLong && pair > 0 && 16 * pair >= rows_left) break;
      load_scales(by, memory + slot + scales_from + pair * 64, piece);
      Sums sums;
#pragma unroll
      for (int i = 0; i < 16 * kPlanes; ++i) at(sums, i) = static_cast<int>(kWholeBits);
#pragma unroll
      for (int i = 0; i < 2 * kPlanes; ++i) {
        int plane = i / 2, column = i % 2;
        uint2 b[kPieceSteps];
        int at = plane * Rows::kPlaneBytes + (pair * 16 + column * 2) * Rows::kRowBytes;
        load_row(b, memory + at, slot + x_from, first);
#pragma unroll
        for (int j = 0; j < 2 * kPieceSteps; ++j) {
          auto& sum = sums[column][j % 2][plane];
          const uint32_t (&w)[4] = a[j / 2][j % 2];
          if (plane == 1) {  // low bytes
            ptx::mma_m16n8k32_int8<true>(sum, w, {b[j / 2].x, b[j / 2].y});
          } else {
            ptx::mma_m16n8k32_int8<false>(sum, w, {b[j / 2].x, b[j / 2].y});
          }
        }
      }
      between(pair);
      if constexpr (kIsLong) {
        end_pair(sums, by, pair);
      } else {
        end_pair(last_sums, last, (pair + kPairs - 1) % kPairs);
#pragma unroll
        for (int i = 0; i < 16 * kPlanes; ++i) at(last_sums, i) = at(sums, i);
        last = by;
      }
    }
  }

  // Loads a lane's operand of a column for the steps of a piece, which begins with step `first`.
  static __device__ void load_row(uint2 (&to)[kPieceSteps],
                                  const unsigned char* memory,
                                  int from,
                                  int first) {
    if constexpr (kPieceSteps == 1) {
      to[0] = *reinterpret_cast<const uint2*>(memory + (from ^ 8 * first));
    } else {
#pragma unroll
      for (int i = 0; i < kPieceSteps; i += 2) {
        uint4 two = *reinterpret_cast<const uint4*>(memory + (from ^ 8 * i));
        to[i] = make_uint2(two.x, two.y);
        to[i + 1] = make_uint2(two.z, two.w);
      }
    }
  }

  // Loads the scales of a lane's rows, and the sums of their integers over the piece.
  static __device__ void load_scales(PieceScales& to, const unsigned char* from, int piece) {
    from += piece * kPieceSteps * Rows::kStepBytes;
    load4(to.steps, from);
    if constexpr (Shape::kOffsets) {
      from += Rows::kSumsAt - Rows::kScalesAt;
      load4(to.row_sums, from);
#pragma unroll
      for (int i = 1; i < kPieceSteps; ++i) {
        float more[4];
        load4(more, from + i * Rows::kStepBytes);
#pragma unroll
        for (int j = 0; j < 4; ++j) to.row_sums[j] = __fadd_rn(to.row_sums[j], more[j]);
      }
    }
  }

  // Adds the sums of a pair of columns to its totals.
  __device__ void end_pair(const Sums& sums, const PieceScales& by, int pair) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      int column = i / 8, tile = i / 4 % 2, j = i % 4;
      int row = 2 * column + j % 2, output = 2 * tile + j / 2;
      float sum = whole<Codes>(sums[column][tile][0][j]);
      if constexpr (kPlanes == 2) {  // both terms are exact, so only their sum is rounded
        sum = __fmaf_rn(sum, 256.0f, whole<Codes>(sums[column][tile][1][j]));
      }
      float step = by.steps[row];
      float& total = totals[pair][row][output];
      total = __fmaf_rn(sum, Shape::kScaled ? __fmul_rn(step, by.scales[output]) : step, total);
      if constexpr (Shape::kOffsets) {
        total = __fmaf_rn(by.row_sums[row], __fmul_rn(step, by.offsets[output]), total);
      }
    }
  }
};

// Computes the outputs of one block: of all rows, at most kRoundedRows, and of four groups of outputs
// from first_group on. product_of(): the product. It is called again before the outputs are stored,
// because the loop leaves no registers for it. row_tile: stages of these rows.
template <typename Shape, typename ProductOf>
__device__ inline void code_tile(const ProductOf& product_of,
                                 const CodeTilePlan& plan,
                                 const unsigned char* row_tile,
                                 int64_t first_group) {
  unsigned char* memory = shared_memory();
  GemmParams product = product_of();
  CodeTileCopy<Shape> copy(product.weight, plan, row_tile, first_group);
  using Products = CodeTileProducts<Shape>;
  Products products(product.weight, product.rows);
  constexpr int kCopies = CodeTileCopy<Shape>::kCopies;
  copy.fetch(memory, 0, kCopies, true);
  int slot = 0;  // offset of the current stage
  for (int stage = 0; stage < plan.stages; ++stage) {
    ptx::cp_async_wait<0>();
    __syncthreads();
    unsigned char* later = memory + (Shape::kSlotBytes - slot);
    bool valid = stage + 1 < plan.stages;
    int left = copy.num_inputs - stage * kCodeInputs;
#pragma unroll
    for (int piece = 0; piece < Shape::kPieces; ++piece) {
      if (piece > 0 && piece * 32 * Shape::kPieceSteps >= left) break;
      products.add_piece(memory, slot, piece, [&](int pair) {
        // Copies of the next stage start in two parts, so that loads need not wait for all. Pairs
        // of a long piece may be skipped, so there they start with the first.
        constexpr int kFirst = Products::kIsLong ? kCopies : kCopies / 2;
        int done = piece * Products::kPairs + pair, turn = done / Shape::kPieces;
        bool begins = done % Shape::kPieces == 0;
        if (begins && turn == 0) copy.fetch(later, 0, kFirst, valid);
        if (begins && turn == 1 && kFirst < kCopies) copy.fetch(later, kFirst, kCopies, valid);
      });
    }
    slot = Shape::kSlotBytes - slot;
  }
  if constexpr (!Products::kIsLong) {
    products.end_pair(products.last_sums, products.last, Products::kPairs - 1);
  }
  // The rest of the code is short if the totals pass through memory that only their thread uses.
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();
  auto* totals = reinterpret_cast<float4*>(memory) + threadIdx.x;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float (&t)[4] = products.totals[i / 4][i % 4];
    totals[i * Shape::kThreads] = make_float4(t[0], t[1], t[2], t[3]);
  }
  GemmParams params = product_of();
  int64_t output = (first_group + products.side) * kWeightGroup + products.lane / 4 * 4;
  float scales[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) scales[i] = output_scale(params.weight, plan, output + i);
#pragma unroll 1
  for (int i = 0; i < 16; ++i) {
    int64_t row = i / 4 * 16 + products.lane % 4 * 4 + i % 4;
    if (row >= params.rows) continue;
    float4 sums = totals[i * Shape::kThreads];
    finish_quad(params,
                plan,
                row,
                output,
                make_float4(__fmul_rn(sums.x, scales[0]),
                            __fmul_rn(sums.y, scales[1]),
                            __fmul_rn(sums.z, scales[2]),
                            __fmul_rn(sums.w, scales[3])));
  }
}

}  // namespace specops
