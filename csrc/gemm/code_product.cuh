// SPDX-License-Identifier: Apache-2.0
// Product of rows of x and quantized weights on tensor cores. A stage is 128 inputs. A piece is a
// part of a stage whose inputs share one scale of the row and one scale of the weight; its sum of
// products is exact. Pieces are added in one chain for every shape, so the bits equal those of the
// CPU kernels. (With fp8 weights, the bits differ from the CPU but are the same for all shapes.)
#pragma once

#include "gemm/code_rows.cuh"
#include "gemm/finish.cuh"

namespace specops {

constexpr int kCodeInputs = static_cast<int>(kCodeStage);
constexpr int kCodeDepth = 3;  // stages of weights in flight (slots of the ring)

struct CodePlan {
  int stages;
  int pieces;      // pieces per stage
  int piece;       // inputs per piece
  int lines;       // lines of scales per stage: one, or one per piece; 0: one scale per output
  int group;       // inputs that share a scale, at most all inputs
  int slot_bytes;  // bytes of a warp's stage of weights, with its scales and offsets
  bool aligned;    // rows of x can be read in chunks of 16 bytes
  bool quads;      // out can be written four outputs at a time
};

// Division of a block's tile among warps. kSides warps have 32 outputs each and together round the
// rows of a stage. There are kSplits sets of such warps. Each set takes every kSplits-th stage and
// shares its sums, in shared memory, with the warps of the other sets that have the same outputs.
// With one set, no sums are shared.
template <int kSplitsOf, int kSidesOf, int kColumnsOf, bool kHalvesOf = false>
struct CodeShape {
  static constexpr int kSplits = kSplitsOf;
  static constexpr int kSides = kSidesOf;
  static constexpr int kColumns = kColumnsOf;  // groups of 8 rows: columns of the mma
  static constexpr bool kHalves = kHalvesOf;   // pieces are half a step: 16 inputs
  static constexpr int kRows = 8 * kColumns;
  static constexpr int kThreads = 32 * kSplits * kSides;
  static constexpr int kOutputs = 32 * kSides;
  static constexpr int kSumBytes =
      144;  // bytes of the shared sums of one piece and row: 32 outputs, 16 bytes of padding
  static_assert(kSplits == 1 || kRows % kSplits == 0);
  static_assert(kSplits == 1 || !kHalves);
};

// Converts an integer sum to float. The sum started at the bits of kWholeFloat, and the sum of
// products is below 2^22.
template <typename Codes>
__device__ inline float whole(int sum) {
  constexpr float kUnit = 1.0f / (1 << Codes::kShift);
  return __fmaf_rn(__int_as_float(sum), kUnit, -kWholeFloat * kUnit);
}

// Converts the integer sum of a piece to float.
template <typename Codes, typename Numbers>
__device__ inline float whole(const int (&sums)[Numbers::kPlanes][4], int i) {
  if constexpr (Numbers::kPlanes == 1) {
    return whole<Codes>(sums[0][i]);
  } else {
    auto sum = static_cast<int>(static_cast<uint32_t>(sums[0][i]) << 8) + sums[1][i];
    return __int2float_rn(sum >> Codes::kShift);
  }
}

// Returns the scale of an output, if each output has a single scale; otherwise 1.
__device__ inline float output_scale(const WeightParams& weight,
                                     const CodePlan& plan,
                                     int64_t output) {
  if (plan.lines != 0 || output >= weight.num_outputs) return 1.0f;
  int64_t half = weight.num_outputs / 2;
  return weight.scales[is_gated(weight.activation) ? output / 2 + output % 2 * half : output];
}

// Finishes four neighboring outputs of any dtype.
__device__ inline void finish_quad(
    const GemmParams& params, const CodePlan& plan, int64_t row, int64_t output, float4 sums) {
  if (params.dtype == DType::kBFloat16) {
    return finish4<bfloat16>(params, plan.quads, row, output, sums);
  }
  if (params.dtype == DType::kFloat16) {
    return finish4<float16>(params, plan.quads, row, output, sums);
  }
  finish4<float>(params, plan.quads, row, output, sums);
}

// The weights and scales of 32 outputs, which one warp copies stage by stage for its own use.
template <typename Codes>
struct CodeRing {
  static constexpr int kVectors = 2 * Codes::kVectors * kWarpSize;  // per stage

  const uint4* weights;  // the lane's first vector
  const float *scales, *offsets;
  unsigned char* slots;
  int scale_groups, lane, stages;  // stages: 0 past the last output

  __device__ CodeRing(const WeightParams& weight,
                      const CodePlan& plan,
                      int64_t group,
                      unsigned char* memory)
      : slots(memory),
        scale_groups(static_cast<int>(specops::scale_groups(weight.num_inputs, weight.group))),
        lane(static_cast<int>(threadIdx.x) % kWarpSize),
        stages(group < weight_groups(weight.num_outputs) ? plan.stages : 0) {
    int64_t line = group * scale_groups * kWeightGroup;
    weights = static_cast<const uint4*>(weight.data) + group * plan.stages * kVectors + lane;
    scales = weight.scales + line;
    offsets = weight.offsets == nullptr ? nullptr : weight.offsets + line;
  }

  // Returns the address of the lane's first vector in a slot; its next vectors are kWarpSize apart.
  __device__ const uint4* vectors(const CodePlan& plan, int slot) const {
    return reinterpret_cast<const uint4*>(slots + slot * plan.slot_bytes) + lane;
  }

  __device__ void prefetch(int stage) const {
    if (stage >= stages) return;
    ptx::prefetch_l2(weights - lane + int64_t{stage} * kVectors, kVectors * sizeof(uint4));
  }

  // Starts copying a stage. A stage past the end copies nothing, but still ends a group of copies.
  __device__ void fetch(const CodePlan& plan, int slot, int stage) const {
    if (stage < stages) {
      auto* to = reinterpret_cast<uint4*>(slots + slot * plan.slot_bytes);
      const uint4* from = weights + int64_t{stage} * kVectors;
#pragma unroll
      for (int i = 0; i < kVectors; i += kWarpSize) ptx::cp_async_16(to + lane + i, from + i);
      fetch_lines(plan, stage, reinterpret_cast<float*>(to + kVectors));
    }
    ptx::cp_async_commit();
  }

  // Copies [lines, 32] scales, then equally many offsets.
  __device__ void fetch_lines(const CodePlan& plan, int stage, float* to) const {
    // A line of scales is eight vectors; each lane copies at most two vectors.
    constexpr int kLineVectors = kWeightGroup / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int vector = i * kWarpSize + lane, line = vector / kLineVectors;
      if (line >= plan.lines) continue;
      int input = stage * kCodeInputs + line * (kCodeInputs / plan.lines);
      int at = min(input / plan.group, scale_groups - 1) * static_cast<int>(kWeightGroup) +
               vector % kLineVectors * 4;
      ptx::cp_async_16(to + 4 * vector, scales + at);
      if (offsets == nullptr) continue;
      ptx::cp_async_16(to + plan.lines * kWeightGroup + 4 * vector, offsets + at);
    }
  }
};

// Scales and offsets of a stage that a warp has copied to shared memory.
template <typename Codes>
struct StageLines {
  const float* base;

  __device__ StageLines(const CodePlan& plan, const unsigned char* slots, int slot)
      : base(reinterpret_cast<const float*>(slots + slot * plan.slot_bytes +
                                            CodeRing<Codes>::kVectors * sizeof(uint4))) {}

  // Returns the scales of 32 outputs for a piece. Must not be called if plan.lines is 0.
  __device__ const float* scales(const CodePlan& plan, int piece) const {
    return base + (plan.lines == 1 ? 0 : piece) * kWeightGroup;
  }
  __device__ const float* offsets(const CodePlan& plan, int piece) const {
    return scales(plan, piece) + plan.lines * kWeightGroup;
  }
};

// Computes the outputs of one block for up to Shape::kRows rows, from `first_row` on. row_at(row)
// returns the start of a row of x, or nullptr for a row of zeros. Waits for the previous kernel.
template <typename Codes, typename Numbers, typename Shape, typename RowAt>
struct CodeProduct {
  static constexpr int kSplits = Shape::kSplits;
  static constexpr int kColumns = Shape::kColumns;
  static constexpr int kPlanes = Numbers::kPlanes;
  static constexpr int kTurnThreads =
      kWarpSize * Shape::kSides;  // threads that round the rows of a stage
  static constexpr int kItems = Shape::kRows * kCodeSteps;
  static constexpr int kOwnItems = (kItems + kTurnThreads - 1) / kTurnThreads;
  // Number of pieces per stage, if the number format determines it; 0: plan.pieces.
  static constexpr int kPieces = Shape::kHalves      ? 2 * kCodeSteps
                                 : Numbers::kIsFloat ? 1
                                 : kPlanes == 1      ? kCodeSteps
                                                     : 0;
  static constexpr int kPieceSteps = kPieces == 0 ? 0 : (kCodeSteps + kPieces - 1) / kPieces;
  static constexpr int kSumPlanes = Numbers::kIsFloat ? 1 : kPlanes;
  static constexpr bool kLoadsAhead = kOwnItems == 1;  // registers suffice for loading ahead
  using Rows = StageRows<Numbers, Shape::kRows>;

  const GemmParams& params;
  const CodePlan& plan;
  ErrorFlag error;
  int64_t first_row, group;  // group: index of this warp's group of 32 outputs
  RowAt row_at;
  Codes codes{};
  int warp, lane, side, split, turn;
  unsigned char* memory;
  CodeRing<Codes> ring;
  Rows rows;
  const void* own_rows[kOwnItems];
  RawInputs raw;

  __device__ CodeProduct(const GemmParams& of,
                         const CodePlan& by,
                         ErrorFlag flag,
                         int64_t row,
                         int64_t block,
                         RowAt at)
      : params(of),
        plan(by),
        error(flag),
        first_row(row),
        group(block * Shape::kSides + threadIdx.x / kWarpSize % Shape::kSides),
        row_at(at),
        warp(static_cast<int>(threadIdx.x) / kWarpSize),
        lane(static_cast<int>(threadIdx.x) % kWarpSize),
        side(warp % Shape::kSides),
        split(warp / Shape::kSides),
        turn(static_cast<int>(threadIdx.x) % kTurnThreads),
        memory(shared_memory()),
        ring(of.weight, by, group, memory + warp * kCodeDepth * by.slot_bytes),
        rows{rows_of(split)} {}

  __device__ int num_pieces() const { return kPieces != 0 ? kPieces : plan.pieces; }
  __device__ int piece_inputs() const { return kPieces != 0 ? kCodeInputs / kPieces : plan.piece; }

  __device__ unsigned char* rows_of(int which) const {
    constexpr int kWarps = Shape::kThreads / kWarpSize;
    return memory + kWarps * kCodeDepth * plan.slot_bytes + which * Rows::kBytes;
  }
  // Returns the 32 sums of a piece and row that the warp of split `of_split` shares for this side's
  // outputs.
  __device__ float* left_sums(int of_split, int piece, int row) const {
    unsigned char* at = rows_of(kSplits);
    int which = of_split * Shape::kSides + side;
    return reinterpret_cast<float*>(at + ((which * num_pieces() + piece) * Shape::kRows + row) *
                                             Shape::kSumBytes);
  }

  __device__ void load_item(int i, int stage) {
    int first = stage * kCodeInputs + turn % kCodeSteps * 32;
    load_raw(raw, params, own_rows[i], first, plan.aligned, error);
  }

  __device__ void store_item(int i) {
    int item = i * kTurnThreads + turn;
    if (kItems % kTurnThreads != 0 && item >= kItems) return;  // whole warps return
    int row = item / kCodeSteps, step = item % kCodeSteps;
    if constexpr (Numbers::kIsFloat) {
      store_floats(rows, row, step, raw);
    } else {
      float values[32];
      unpack_raw(values, raw, params.dtype);
      StageStep<Numbers, Shape::kRows> to{rows, row, step};
      store_integers(to, values, ring.offsets != nullptr);
    }
  }

  __device__ void store_rows(int stage) {
    if constexpr (kLoadsAhead) {
      store_item(0);
      load_item(0, stage + kSplits);
    } else {
#pragma unroll
      for (int i = 0; i < kOwnItems; ++i) {
        load_item(i, stage);
        store_item(i);
      }
    }
  }

  __device__ int left_inputs(int stage) const {
    return static_cast<int>(min(params.weight.num_inputs - stage * kCodeStage, kCodeStage));
  }
  // Returns the scale of a row for a piece, which multiplies the piece's sum in addition to the
  // weight's scale.
  __device__ float row_scale(const Rows& of, int piece, int row) const {
    if constexpr (Numbers::kIsFloat) return 1.0f;
    return of.scales(piece * piece_inputs() / 32)[row];
  }
  // Returns the sum of a row's integers in a piece.
  __device__ float row_sum(const Rows& of, int piece, int row) const {
    int halves = piece_inputs() / 16, sum = 0;
    if constexpr (!Numbers::kIsFloat) {
      for (int i = 0; i < halves; ++i) sum += of.sums(piece * halves + i)[row];
    }
    return __int2float_rn(sum);
  }

  // Computes the sums of a stage piece by piece. Calls end(column, piece, sums) with
  // sums[row][output] for the rows 2 * t and 2 * t + 1 of the column and the outputs 4 * g to 4 * g
  // + 3 of the group.
  template <typename End>
  __device__ void multiply(int slot, const End& end) {
    const uint4* from = ring.vectors(plan, slot);
    if constexpr (kPieces != 0 && kColumns <= 2) {
      // With few columns, the pieces of a stage are multiplied interleaved.
      uint4 held[2][Codes::kVectors];
#pragma unroll
      for (int i = 0; i < 2 * Codes::kVectors; ++i) {
        held[i / Codes::kVectors][i % Codes::kVectors] = from[i * kWarpSize];
      }
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        multiply_piece<kPieceSteps>(
            piece, kPieceSteps, [&](int tile, int i) { return held[tile][i]; }, end);
      }
    } else {
      int pieces = num_pieces(), steps = piece_inputs() / 32;
#pragma unroll 1
      for (int piece = 0; piece < pieces; ++piece) {
        multiply_piece<kPieceSteps>(
            piece,
            steps,
            [&](int tile, int i) { return from[(tile * Codes::kVectors + i) * kWarpSize]; },
            end);
      }
    }
  }

  // Computes one piece. kSteps: steps per piece if known at compile time; 0: use `steps`.
  template <int kSteps, typename VectorAt, typename End>
  __device__ void multiply_piece(int piece, int steps, const VectorAt& vector_at, const End& end) {
    using Sum = std::conditional_t<Numbers::kIsFloat, float, int>;
    // With one plane, sums start at the bits of kWholeFloat (see whole()).
    constexpr int kBegin = !Numbers::kIsFloat && kSumPlanes == 1 ? static_cast<int>(kWholeBits) : 0;
    Sum sums[kColumns][2][kSumPlanes][4];
#pragma unroll
    for (int i = 0; i < kColumns * 2 * kSumPlanes * 4; ++i) {
      sums[i / (8 * kSumPlanes)][i / (4 * kSumPlanes) % 2][i / 4 % kSumPlanes][i % 4] = kBegin;
    }
    auto add_step = [&](int step, int half) {
      uint32_t a[2][4];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        codes.load(a[tile], [&](int i) { return vector_at(tile, i); }, step);
      }
#pragma unroll
      for (int i = 0; i < kColumns * kPlanes; ++i) {
        int c = i / kPlanes, plane = i % kPlanes;
        if constexpr (Numbers::kIsFloat) {
          add_floats(sums[c], a, rows.float_operand(plane, 8 * c + lane / 4, lane % 4, step));
        } else {
          uint2 b = rows.operand(plane, 8 * c + lane / 4, lane % 4, step);
          if (Shape::kHalves && lane % 4 / 2 != half) b = make_uint2(0, 0);
          add_integers(sums[c], a, b, plane);
        }
      }
    };
    if constexpr (Shape::kHalves) {
      add_step(piece / 2, piece % 2);
    } else if constexpr (kSteps != 0) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) add_step(piece * kSteps + i, 0);
    } else {
#pragma unroll 1
      for (int i = 0; i < steps; ++i) add_step(piece * steps + i, 0);
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float out[2][4];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if constexpr (Numbers::kIsFloat) {
          constexpr float kFactor = fp8_factor<typename Numbers::Element>;
          out[i % 2][i / 2] = __fmul_rn(sums[c][i / 4][0][i % 4], kFactor);
        } else {
          out[i % 2][i / 2] = whole<Codes, Numbers>(sums[c][i / 4], i % 4);
        }
      }
      end(c, piece, out);
    }
  }

  __device__ static void add_floats(float (&sums)[2][1][4], const uint32_t (&a)[2][4], uint4 b) {
    using T = typename Numbers::Element;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      uint32_t w[4];
      widen_half<T>(w, a[tile], 0);
      ptx::mma_m16n8k16<T>(sums[tile][0], w, {b.x, b.y});
      widen_half<T>(w, a[tile], 1);
      ptx::mma_m16n8k16<T>(sums[tile][0], w, {b.z, b.w});
    }
  }

  __device__ static void add_integers(int (&sums)[2][kSumPlanes][4],
                                      const uint32_t (&a)[2][4],
                                      uint2 b,
                                      int plane) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      if (plane == 1) {  // low bytes
        ptx::mma_m16n8k32_int8<true>(sums[tile][kSumPlanes - 1], a[tile], {b.x, b.y});
      } else {
        ptx::mma_m16n8k32_int8<false>(sums[tile][0], a[tile], {b.x, b.y});
      }
    }
  }

  __device__ void run() {
    if (lane < kCodeDepth - 1) ring.prefetch(lane * kSplits + split);
    wait_for_previous_kernel();
#pragma unroll
    for (int i = 0; i < kCodeDepth - 1; ++i) ring.fetch(plan, i, i * kSplits + split);
    codes.begin(params.weight);
#pragma unroll
    for (int i = 0; i < kOwnItems; ++i) {
      int item = i * kTurnThreads + turn;
      int64_t row = first_row + item / kCodeSteps;
      own_rows[i] = item < kItems && row < params.rows ? row_at(row) : nullptr;
    }
    if constexpr (kLoadsAhead) load_item(0, split);
    if constexpr (kSplits == 1) {
      run_sides();
    } else {
      run_splits();
    }
  }

  // Begins one turn of the ring: rounds the rows of the current stage and starts copying a later
  // stage.
  __device__ void begin_turn(int turn_of, int slot) {
    store_rows(turn_of * kSplits + split);
    ptx::cp_async_wait<kCodeDepth - 2>();
    if constexpr (Shape::kSides == 1) {
      __syncwarp(kFullMask);
    } else {
      __syncthreads();
    }
    int later = slot == 0 ? kCodeDepth - 1 : slot - 1;
    ring.fetch(plan, later, (turn_of + kCodeDepth - 1) * kSplits + split);
  }

  __device__ void run_sides() {
    float totals[kColumns][2][4] = {};
    bool has_offsets = ring.offsets != nullptr;
    int slot = 0;
    for (int stage = 0; stage < plan.stages; ++stage) {
      begin_turn(stage, slot);
      int left = left_inputs(stage);
      StageLines<Codes> lines(plan, ring.slots, slot);
      auto end = [&](int c, int piece, const float (&sums)[2][4]) {
        if (piece * piece_inputs() >= left) return;
        int row = 8 * c + lane % 4 * 2, output = lane / 4 * 4;
        float4 scale = make_float4(1.0f, 1.0f, 1.0f, 1.0f), offset = scale;
        if (plan.lines != 0) {
          scale = *reinterpret_cast<const float4*>(lines.scales(plan, piece) + output);
        }
        if (has_offsets) {
          offset = *reinterpret_cast<const float4*>(lines.offsets(plan, piece) + output);
        }
        const float scales[4] = {scale.x, scale.y, scale.z, scale.w};
        const float offsets[4] = {offset.x, offset.y, offset.z, offset.w};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float step = row_scale(rows, piece, row + r);
          float sum = has_offsets ? row_sum(rows, piece, row + r) : 0.0f;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& total = totals[c][r][i];
            total = __fmaf_rn(sums[r][i], __fmul_rn(step, scales[i]), total);
            if (has_offsets) total = __fmaf_rn(sum, __fmul_rn(step, offsets[i]), total);
          }
        }
      };
      if (ring.stages != 0) multiply(slot, end);
      __syncthreads();
      slot = slot == kCodeDepth - 1 ? 0 : slot + 1;
    }
    int64_t output = group * kWeightGroup + lane / 4 * 4;
    float scales[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) scales[i] = output_scale(params.weight, plan, output + i);
#pragma unroll
    for (int i = 0; i < 2 * kColumns; ++i) {
      int64_t row = first_row + i / 2 * 8 + lane % 4 * 2 + i % 2;
      if (row >= params.rows) continue;
      const float (&sums)[4] = totals[i / 2][i % 2];
      finish_quad(params,
                  plan,
                  row,
                  output,
                  make_float4(__fmul_rn(sums[0], scales[0]),
                              __fmul_rn(sums[1], scales[1]),
                              __fmul_rn(sums[2], scales[2]),
                              __fmul_rn(sums[3], scales[3])));
    }
  }

  __device__ void run_splits() {
    // Totals of the lane's output, for the rows that this warp finishes.
    constexpr int kOwnRows = Shape::kRows / kSplits;
    float totals[kOwnRows] = {};
    int slot = 0;
    for (int first = 0; first < plan.stages; first += kSplits) {
      begin_turn(first / kSplits, slot);
      auto end = [&](int c, int piece, const float (&sums)[2][4]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float* to = left_sums(split, piece, 8 * c + lane % 4 * 2 + r) + lane / 4 * 4;
          *reinterpret_cast<float4*>(to) =
              make_float4(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
        }
      };
      if (first + split < ring.stages) multiply(slot, end);
      __syncthreads();
#pragma unroll
      for (int other = 0; other < kSplits; ++other) {
        if (first + other < ring.stages) add_stage(totals, first + other, other, slot);
      }
      __syncthreads();
      slot = slot == kCodeDepth - 1 ? 0 : slot + 1;
    }
    int64_t output = group * kWeightGroup + lane;
    float scale = output_scale(params.weight, plan, output);
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      finish_one(first_row + split * kOwnRows + i, output, __fmul_rn(totals[i], scale));
    }
  }

  // Adds the sums that split `other` shared for `stage` to the totals of this thread.
  template <int kOwnRows>
  __device__ void add_stage(float (&totals)[kOwnRows], int stage, int other, int slot) {
    int left = left_inputs(stage);
    Rows of{rows_of(other)};
    int of_warp = other * Shape::kSides + side;
    StageLines<Codes> lines(plan, memory + of_warp * kCodeDepth * plan.slot_bytes, slot);
    auto add_piece = [&](int piece) {
      float scale = plan.lines == 0 ? 1.0f : lines.scales(plan, piece)[lane];
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i) {
        int row = split * kOwnRows + i;
        float step = row_scale(of, piece, row), sum = left_sums(other, piece, row)[lane];
        totals[i] = __fmaf_rn(sum, __fmul_rn(step, scale), totals[i]);
        if (ring.offsets == nullptr) continue;
        float offset = __fmul_rn(step, lines.offsets(plan, piece)[lane]);
        totals[i] = __fmaf_rn(row_sum(of, piece, row), offset, totals[i]);
      }
    };
    if constexpr (kPieces != 0) {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        if (piece * piece_inputs() < left) add_piece(piece);
      }
    } else {
      for (int piece = 0; piece * piece_inputs() < left; ++piece) add_piece(piece);
    }
  }

  // Finishes one output. Must be called by whole warps, because the lane of a gate reads the up
  // from the next lane.
  __device__ void finish_one(int64_t row, int64_t output, float sum) {
    float up = __shfl_down_sync(kFullMask, sum, 1);
    if (row >= params.rows || output >= params.weight.num_outputs) return;
    auto end = [&]<typename T>(T) {
      if (!is_gated(params.weight.activation)) return finish<T>(params, row, output, sum);
      if (output % 2 != 0) return;
      float value = finish_gated<T>(params, output / 2, sum, up);
      store_gated<T>(params, row, output / 2, value);
    };
    if (params.dtype == DType::kBFloat16) return end(bfloat16{});
    if (params.dtype == DType::kFloat16) return end(float16{});
    end(0.0f);
  }
};

template <typename Codes, typename Numbers, typename Shape, typename RowAt>
__device__ inline void code_rows(const GemmParams& params,
                                 const CodePlan& plan,
                                 ErrorFlag error,
                                 int64_t first_row,
                                 int64_t block,
                                 RowAt row_at) {
  CodeProduct<Codes, Numbers, Shape, RowAt>(params, plan, error, first_row, block, row_at).run();
}

// Returns the size in bytes of a block's shared memory.
template <typename Codes, typename Numbers, typename Shape>
size_t code_bytes(const CodePlan& plan) {
  constexpr int kRowsBytes = StageRows<Numbers, Shape::kRows>::kBytes;
  int ring = Shape::kThreads / kWarpSize * kCodeDepth * plan.slot_bytes;
  int left = Shape::kSplits == 1
                 ? 0
                 : Shape::kSplits * Shape::kSides * plan.pieces * Shape::kRows * Shape::kSumBytes;
  return static_cast<size_t>(ring + Shape::kSplits * kRowsBytes + left);
}

template <typename Codes>
CodePlan code_plan(const GemmParams& params) {
  const WeightParams& weight = params.weight;
  int64_t row_group = weight.row_numbers == RowNumbers::kInt8 ? kInt8Group : kIntegerGroup;
  // The greatest common divisor of both group sizes; that of the row is a power of two.
  int64_t power = weight.group & -weight.group;
  int64_t piece = power == 0 || power > row_group ? row_group : power;
  CodePlan plan{};
  plan.stages = static_cast<int>((weight.num_inputs + kCodeStage - 1) / kCodeStage);
  plan.pieces = static_cast<int>(kCodeStage / piece);
  plan.piece = static_cast<int>(piece);
  plan.lines = weight.group == 0 ? 0 : weight.group % kCodeStage == 0 ? 1 : plan.pieces;
  int lines = plan.lines * (weight.offsets != nullptr ? 2 : 1);
  plan.group = static_cast<int>(weight.group < plan.stages * kCodeStage ? weight.group
                                                                        : plan.stages * kCodeStage);
  plan.slot_bytes = CodeRing<Codes>::kVectors * 16 + lines * 128;
  bool wide = params.dtype == DType::kFloat32;
  plan.aligned = wide ? chunk_aligned<float>(params.x, params.x_stride)
                      : chunk_aligned<bfloat16>(params.x, params.x_stride);
  plan.quads = weight.num_outputs % 4 == 0 && reinterpret_cast<uintptr_t>(params.out) % 16 == 0;
  return plan;
}

// Calls fn<Codes, Numbers>() with the types for the weight's kind and for the format of the rows.
template <typename Fn>
void with_codes(const GemmParams& params, const Fn& fn) {
  const WeightParams& weight = params.weight;
  if (weight.kind == WeightKind::kFp8) {
    if (params.dtype == DType::kBFloat16) {
      return fn.template operator()<Fp8Codes, FloatNumbers<bfloat16>>();
    }
    if (params.dtype == DType::kFloat16) {
      return fn.template operator()<Fp8Codes, FloatNumbers<float16>>();
    }
    return fn.template operator()<Fp8Codes, FloatNumbers<float>>();
  }
  auto with_numbers = [&]<typename Codes>() {
    if (weight.row_numbers == RowNumbers::kInt8)
      return fn.template operator()<Codes, Int8Numbers>();
    fn.template operator()<Codes, Int16Numbers>();
  };
  if (weight.kind == WeightKind::kInt8) return with_numbers.template operator()<Int8Codes>();
  if (weight.code_values != nullptr) return with_numbers.template operator()<Int4Table>();
  with_numbers.template operator()<Int4Codes>();
}

}  // namespace specops
