// SPDX-License-Identifier: Apache-2.0
// Rows times codes on tensor cores. A stage is 128 inputs; of a piece of it, so many inputs as share a
// scale of the row and one of the weight, sums are exact. Whatever the shape, pieces are added in one
// chain: the bits are those of the CPU's kernels. (Those of fp8 are each shape's, and equal.)
#pragma once

#include "gemm/code_rows.cuh"
#include "gemm/finish.cuh"

namespace specops {

constexpr int kCodeInputs = static_cast<int>(kCodeStage);
constexpr int kCodeDepth = 3;  // stages of weights under way

struct CodePlan {
  int stages;
  int pieces;      // of a stage
  int lines;       // of scales, of a stage; 0: an output has one scale
  int slot_bytes;  // of a stage of weights of a warp, with its scales and offsets
  bool aligned;    // rows of x can be read by chunks of 16 bytes
  bool quads;      // out can be written by four outputs
};

// How a block's tile is cut. kSplits warps have every kSplits-th stage each of the same outputs, and
// leave their sums to all. Or kSides warps, side by side, have all stages of their own outputs.
template <int kSplitsOf, int kSidesOf, int kGroupsOf, int kColumnsOf, bool kHalvesOf = false>
struct CodeShape {
  static constexpr int kSplits = kSplitsOf;
  static constexpr int kSides = kSidesOf;
  static constexpr int kGroups = kGroupsOf;    // of 32 outputs, of a warp
  static constexpr int kColumns = kColumnsOf;  // of 8 rows
  static constexpr bool kHalves = kHalvesOf;   // pieces are half a step: 16 inputs
  static constexpr int kRows = 8 * kColumns;
  static constexpr int kThreads = 32 * kSplits * kSides;
  static constexpr int kOutputs = 32 * kGroups * kSides;
  static constexpr int kSumBytes = (32 * kGroups + 4) * 4;  // of a piece of a row, that are left
  static_assert(kSplits == 1 || kSides == 1);
  static_assert(kSplits == 1 || kColumns * 8 % kSplits == 0);
  static_assert(kSplits == 1 || !kHalves);
};

// Of a piece's sum.
template <typename Codes, typename Numbers>
__device__ inline float whole(const int (&sums)[Numbers::kPlanes][4], int i) {
  if constexpr (Numbers::kPlanes == 1) {
    // It was begun at the bits of kWholeFloat, and is below 2^22.
    constexpr float kUnit = 1.0f / (1 << Codes::kShift);
    return __fmaf_rn(__int_as_float(sums[0][i]), kUnit, -kWholeFloat * kUnit);
  } else {
    auto sum = static_cast<int>(static_cast<uint32_t>(sums[0][i]) << 8) + sums[1][i];
    return __int2float_rn(sum >> Codes::kShift);
  }
}

// Ring of weights, and scales: what a warp copies for itself.
template <typename Codes, typename Shape>
struct CodeRing {
  static constexpr int kVectors = 2 * Codes::kVectors * kWarpSize;  // of a group and a stage

  const uint4* weights;  // of the lane, of the first group
  const float *scales, *offsets;
  unsigned char* slots;
  int64_t scale_groups;
  int lane, stages, groups;  // groups: that there are

  __device__ CodeRing(const WeightParams& weight,
                      const CodePlan& plan,
                      int64_t first_group,
                      unsigned char* memory)
      : slots(memory),
        scale_groups(specops::scale_groups(weight.num_inputs, weight.group)),
        lane(static_cast<int>(threadIdx.x) % kWarpSize),
        stages(plan.stages) {
    int64_t left = weight_groups(weight.num_outputs) - first_group;
    groups = static_cast<int>(max(int64_t{0}, min(left, int64_t{Shape::kGroups})));
    weights = static_cast<const uint4*>(weight.data) + first_group * stages * kVectors + lane;
    scales = weight.scales + first_group * scale_groups * kWeightGroup;
    offsets = weight.offsets == nullptr
                  ? nullptr
                  : weight.offsets + first_group * scale_groups * kWeightGroup;
  }

  __device__ uint4* vectors(const CodePlan& plan, int slot, int group) const {
    return reinterpret_cast<uint4*>(slots + slot * plan.slot_bytes) + group * kVectors;
  }
  // [groups, lines, 32], offsets behind scales.
  __device__ float* lines(const CodePlan& plan, int slot) const {
    return reinterpret_cast<float*>(vectors(plan, slot, Shape::kGroups));
  }
  __device__ float* offset_lines(const CodePlan& plan, int slot) const {
    return lines(plan, slot) + Shape::kGroups * plan.lines * kWeightGroup;
  }

  __device__ void prefetch(int stage) const {
    if (stage >= stages || groups == 0) return;
    ptx::prefetch_l2(weights - lane + int64_t{stage} * kVectors, kVectors * sizeof(uint4));
  }

  // A stage that is none is nothing, and counts.
  __device__ void fetch(const WeightParams& weight, const CodePlan& plan, int slot, int stage) {
    if (stage < stages) {
      for (int group = 0; group < groups; ++group) {
        const uint4* from = weights + (int64_t{group} * stages + stage) * kVectors;
        uint4* to = vectors(plan, slot, group) + lane;
#pragma unroll
        for (int i = 0; i < kVectors; i += kWarpSize) ptx::cp_async_16(to + i, from + i);
      }
      fetch_lines(scales, lines(plan, slot), weight, plan, stage);
      if (offsets != nullptr) {
        fetch_lines(offsets, offset_lines(plan, slot), weight, plan, stage);
      }
    }
    ptx::cp_async_commit();
  }

  __device__ void fetch_lines(const float* from,
                              float* to,
                              const WeightParams& weight,
                              const CodePlan& plan,
                              int stage) {
    constexpr int kLineVectors = kWeightGroup / 4;
    int of_group = plan.lines * kLineVectors;
    for (int i = lane; i < groups * of_group; i += kWarpSize) {
      int group = i / of_group, line = i % of_group / kLineVectors;
      int64_t input = stage * kCodeStage + line * (kCodeInputs / plan.lines);
      int64_t at = min(input / weight.group, scale_groups - 1);
      const float* source = from + (group * scale_groups + at) * kWeightGroup;
      ptx::cp_async_16(to + 4 * i, source + i % kLineVectors * 4);
    }
  }
};

// What one block does for at most Shape::kRows rows from `first_row` on, and the outputs of `block`.
// row_at(row): where a row of x begins, nullptr for zeros. Waits for the kernel before it, if the
// caller has not.
template <typename Codes, typename Numbers, typename Shape, typename RowAt>
struct CodeProduct {
  static constexpr int kSplits = Shape::kSplits;
  static constexpr int kColumns = Shape::kColumns;
  static constexpr int kGroups = Shape::kGroups;
  static constexpr int kPlanes = Numbers::kPlanes;
  static constexpr int kTurnThreads = kWarpSize * Shape::kSides;  // that round the rows of a stage
  static constexpr int kItems = Shape::kRows * kCodeSteps;
  static constexpr int kOwnItems = (kItems + kTurnThreads - 1) / kTurnThreads;
  using Rows = StageRows<Numbers, Shape::kRows>;

  const GemmParams& params;
  const CodePlan& plan;
  ErrorFlag error;
  int64_t first_row, first_group;
  RowAt row_at;
  Codes codes{};
  int warp, lane, split, turn;
  unsigned char* memory;
  CodeRing<Codes, Shape> ring;
  Rows rows;
  const void* own_rows[kOwnItems];
  RawInputs raw[kOwnItems];

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
        first_group((block * Shape::kSides + (kSplits == 1 ? threadIdx.x / kWarpSize : 0)) *
                    kGroups),
        row_at(at),
        warp(static_cast<int>(threadIdx.x) / kWarpSize),
        lane(static_cast<int>(threadIdx.x) % kWarpSize),
        split(kSplits == 1 ? 0 : warp),
        turn(kSplits == 1 ? static_cast<int>(threadIdx.x) : lane),
        memory(shared_memory()),
        ring(of.weight, by, first_group, memory + warp * kCodeDepth * by.slot_bytes),
        rows{rows_of(split)} {}

  __device__ unsigned char* rows_of(int which) const {
    constexpr int kWarps = Shape::kThreads / kWarpSize;
    return memory + kWarps * kCodeDepth * plan.slot_bytes + which * Rows::kBytes;
  }
  // Of a piece of a row, 32 of each group.
  __device__ float* left_sums(int which, int piece, int row) const {
    unsigned char* at = rows_of(kSplits);
    return reinterpret_cast<float*>(
        at + ((which * plan.pieces + piece) * Shape::kRows + row) * Shape::kSumBytes);
  }

  __device__ void load_rows(int stage) {
#pragma unroll
    for (int i = 0; i < kOwnItems; ++i) {
      int first = stage * kCodeInputs + turn % kCodeSteps * 32;
      load_raw(raw[i], params, own_rows[i], first, plan.aligned, error);
    }
  }

  __device__ void store_rows() {
#pragma unroll
    for (int i = 0; i < kOwnItems; ++i) {
      int item = i * kTurnThreads + turn;
      if (kItems % kTurnThreads != 0 && item >= kItems) continue;  // of whole warps
      int row = item / kCodeSteps, step = item % kCodeSteps;
      if constexpr (Numbers::kIsFloat) {
        store_floats(rows, row, step, raw[i]);
      } else {
        float values[32];
        unpack_raw(values, raw[i], params.dtype);
        store_integers(rows, row, step, values, ring.offsets != nullptr);
      }
    }
  }

  __device__ int left_inputs(int stage) const {
    return static_cast<int>(
        min(params.weight.num_inputs - stage * kCodeStage, kCodeStage));
  }
  // What a piece's sum is multiplied with, beside the weight's scale.
  __device__ float row_scale(const Rows& of, int piece, int row) const {
    if constexpr (Numbers::kIsFloat) return 1.0f;
    return of.scales(piece * kCodeSteps / plan.pieces)[row];
  }
  // The sum of a piece's integers.
  __device__ float row_sum(const Rows& of, int piece, int row) const {
    int halves = 2 * kCodeSteps / plan.pieces, sum = 0;
    if constexpr (!Numbers::kIsFloat) {
      for (int i = 0; i < halves; ++i) sum += of.sums(piece * halves + i)[row];
    }
    return __int2float_rn(sum);
  }

  // The sums of a group's stage, piece by piece: end(column, piece, [row][output]), of rows 2 * t and
  // 2 * t + 1 of the column and outputs 4 * g to 4 * g + 3 of the group.
  template <typename End>
  __device__ void multiply(int slot, int group, const End& end) {
    const uint4* from = ring.vectors(plan, slot, group) + lane;
    uint32_t a[kCodeSteps][2][4];
#pragma unroll
    for (int step = 0; step < kCodeSteps; ++step) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        codes.load(a[step][tile], from + tile * Codes::kVectors * kWarpSize, step);
      }
    }
    int t = lane % 4;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      int row = 8 * c + lane / 4;
      if constexpr (Numbers::kIsFloat) {
        using T = typename Numbers::Element;
        float sums[2][4] = {};
#pragma unroll
        for (int step = 0; step < kCodeSteps; ++step) {
#pragma unroll
          for (int plane = 0; plane < kPlanes; ++plane) {
            uint4 b = rows.float_operand(plane, row, t, step);
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
              uint32_t w[4];
              widen_half<T>(w, a[step][tile], 0);
              ptx::mma_m16n8k16<T>(sums[tile], w, {b.x, b.y});
              widen_half<T>(w, a[step][tile], 1);
              ptx::mma_m16n8k16<T>(sums[tile], w, {b.z, b.w});
            }
          }
        }
        float out[2][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          out[i % 2][i / 2] = __fmul_rn(sums[i / 4][i % 4], fp8_factor<T>);
        }
        end(c, 0, out);
      } else {
        multiply_integers(a, c, row, t, end);
      }
    }
  }

  template <typename End>
  __device__ void multiply_integers(
      const uint32_t (&a)[kCodeSteps][2][4], int c, int row, int t, const End& end) {
    constexpr int kHalves = Shape::kHalves ? 2 : 1;
    constexpr int kBegin = kPlanes == 1 ? static_cast<int>(kWholeBits) : 0;
    int sums[2][kPlanes][4];
    int piece = 0;
#pragma unroll
    for (int step = 0; step < kCodeSteps; ++step) {
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        int steps = kPlanes == 1 || Shape::kHalves ? 1 : kCodeSteps / plan.pieces;
        if (step % steps == 0) {
#pragma unroll
          for (int i = 0; i < 8 * kPlanes; ++i) sums[i / 4 / kPlanes][i / 4 % kPlanes][i % 4] = kBegin;
        }
#pragma unroll
        for (int plane = 0; plane < kPlanes; ++plane) {
          uint2 b = rows.operand(plane, row, t, step);
          if (Shape::kHalves && t / 2 != half) b = make_uint2(0, 0);
#pragma unroll
          for (int tile = 0; tile < 2; ++tile) {
            constexpr bool kHasLow = kPlanes == 2;
            if (kHasLow && plane == 1) {
              ptx::mma_m16n8k32_int8<true>(sums[tile][plane], a[step][tile], {b.x, b.y});
            } else {
              ptx::mma_m16n8k32_int8<false>(sums[tile][plane], a[step][tile], {b.x, b.y});
            }
          }
        }
        if ((step + 1) % steps != 0) continue;
        float out[2][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          out[i % 2][i / 2] = whole<Codes, Numbers>(sums[i / 4], i % 4);
        }
        end(c, piece, out);
        ++piece;
      }
    }
  }

  // Where an output's scale is, that has one.
  __device__ float output_scale(int64_t output) const {
    const WeightParams& weight = params.weight;
    if (plan.lines != 0 || output >= weight.num_outputs) return 1.0f;
    int64_t half = weight.num_outputs / 2;
    return weight.scales[is_gated(weight.activation) ? output / 2 + output % 2 * half : output];
  }

  __device__ void run() {
    if (lane < kCodeDepth - 1) ring.prefetch(lane * kSplits + split);
    wait_for_previous_kernel();
#pragma unroll
    for (int i = 0; i < kCodeDepth - 1; ++i) ring.fetch(params.weight, plan, i, i * kSplits + split);
    codes.begin(params.weight);
#pragma unroll
    for (int i = 0; i < kOwnItems; ++i) {
      int item = i * kTurnThreads + turn;
      int64_t row = first_row + item / kCodeSteps;
      own_rows[i] = item < kItems && row < params.rows ? row_at(row) : nullptr;
    }
    load_rows(split);
    if constexpr (kSplits == 1) {
      run_sides();
    } else {
      run_splits();
    }
  }

  // One turn of the ring: rounds the rows of its stage, and asks for what comes later.
  __device__ void begin_turn(int turn_of, int slot) {
    store_rows();
    load_rows((turn_of + 1) * kSplits + split);
    ptx::cp_async_wait<kCodeDepth - 2>();
    if constexpr (kSplits == 1) {
      __syncthreads();
    } else {
      __syncwarp(kFullMask);
    }
    int later = slot == 0 ? kCodeDepth - 1 : slot - 1;
    ring.fetch(params.weight, plan, later, (turn_of + kCodeDepth - 1) * kSplits + split);
  }

  __device__ void run_sides() {
    float totals[kGroups][kColumns][2][4] = {};
    int slot = 0;
    for (int stage = 0; stage < plan.stages; ++stage) {
      begin_turn(stage, slot);
      int left = left_inputs(stage), piece_inputs = kCodeInputs / plan.pieces;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        if (group >= ring.groups) continue;
        multiply(slot, group, [&](int c, int piece, const float (&sums)[2][4]) {
          if (piece * piece_inputs >= left) return;
          int row = 8 * c + lane % 4 * 2;
          float4 scale = make_float4(1.0f, 1.0f, 1.0f, 1.0f), offset = scale;
          bool has_offsets = ring.offsets != nullptr;
          if (plan.lines != 0) {
            int line = group * plan.lines + piece * plan.lines / plan.pieces;
            int at = line * kWeightGroup + lane / 4 * 4;
            scale = *reinterpret_cast<const float4*>(ring.lines(plan, slot) + at);
            if (has_offsets) {
              offset = *reinterpret_cast<const float4*>(ring.offset_lines(plan, slot) + at);
            }
          }
          const float scales[4] = {scale.x, scale.y, scale.z, scale.w};
          const float offsets[4] = {offset.x, offset.y, offset.z, offset.w};
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float step = row_scale(rows, piece, row + r);
            float sum = has_offsets ? row_sum(rows, piece, row + r) : 0.0f;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              float& total = totals[group][c][r][i];
              total = __fmaf_rn(sums[r][i], __fmul_rn(step, scales[i]), total);
              if (has_offsets) total = __fmaf_rn(sum, __fmul_rn(step, offsets[i]), total);
            }
          }
        });
      }
      __syncthreads();
      slot = slot == kCodeDepth - 1 ? 0 : slot + 1;
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < 2 * kColumns; ++i) {
        int64_t row = first_row + i / 2 * 8 + lane % 4 * 2 + i % 2;
        int64_t output = (first_group + group) * kWeightGroup + lane / 4 * 4;
        if (row >= params.rows) continue;
        const float(&sums)[4] = totals[group][i / 2][i % 2];
        finish_quad(row,
                    output,
                    make_float4(__fmul_rn(sums[0], output_scale(output)),
                                __fmul_rn(sums[1], output_scale(output + 1)),
                                __fmul_rn(sums[2], output_scale(output + 2)),
                                __fmul_rn(sums[3], output_scale(output + 3))));
      }
    }
  }

  __device__ void finish_quad(int64_t row, int64_t output, float4 sums) {
    if (params.dtype == DType::kBFloat16) {
      return finish4<bfloat16>(params, plan.quads, row, output, sums);
    }
    if (params.dtype == DType::kFloat16) {
      return finish4<float16>(params, plan.quads, row, output, sums);
    }
    finish4<float>(params, plan.quads, row, output, sums);
  }

  __device__ void run_splits() {
    // Of the lane's output of each group, and of rows that are the warp's.
    constexpr int kOwnRows = Shape::kRows / kSplits;
    float totals[kGroups][kOwnRows] = {};
    int slot = 0;
    for (int first = 0; first < plan.stages; first += kSplits) {
      begin_turn(first / kSplits, slot);
      if (first + split < plan.stages) {
        for (int group = 0; group < ring.groups; ++group) {
          multiply(slot, group, [&](int c, int piece, const float (&sums)[2][4]) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              float* to = left_sums(split, piece, 8 * c + lane % 4 * 2 + r);
              *reinterpret_cast<float4*>(to + group * kWeightGroup + lane / 4 * 4) =
                  make_float4(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
            }
          });
        }
      }
      __syncthreads();
      for (int other = 0; other < min(kSplits, plan.stages - first); ++other) {
        add_stage(totals, first + other, other, slot);
      }
      __syncthreads();
      slot = slot == kCodeDepth - 1 ? 0 : slot + 1;
    }
#pragma unroll
    for (int i = 0; i < kGroups * kOwnRows; ++i) {
      int group = i / kOwnRows, row = warp * kOwnRows + i % kOwnRows;
      int64_t output = (first_group + group) * kWeightGroup + lane;
      finish_one(first_row + row,
                 output,
                 __fmul_rn(totals[group][i % kOwnRows], output_scale(output)));
    }
  }

  // What `other` has left of its stage, to the totals of this thread.
  template <int kOwnRows>
  __device__ void add_stage(float (&totals)[kGroups][kOwnRows], int stage, int other, int slot) {
    Rows of{rows_of(other)};
    const float* scales = reinterpret_cast<const float*>(
        memory + (other * kCodeDepth + slot) * plan.slot_bytes) + kGroups * 4 * ring.kVectors;
    const float* offsets = scales + kGroups * plan.lines * kWeightGroup;
    int piece_inputs = kCodeInputs / plan.pieces;
    int pieces = (left_inputs(stage) + piece_inputs - 1) / piece_inputs;
    for (int piece = 0; piece < pieces; ++piece) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        if (group >= ring.groups) continue;
        int line = group * plan.lines + piece * plan.lines / plan.pieces;
        float scale = plan.lines == 0 ? 1.0f : scales[line * kWeightGroup + lane];
#pragma unroll
        for (int i = 0; i < kOwnRows; ++i) {
          int row = warp * kOwnRows + i;
          float step = row_scale(of, piece, row);
          float sum = left_sums(other, piece, row)[group * kWeightGroup + lane];
          float& total = totals[group][i];
          total = __fmaf_rn(sum, __fmul_rn(step, scale), total);
          if (ring.offsets == nullptr) continue;
          float offset = offsets[line * kWeightGroup + lane];
          total = __fmaf_rn(row_sum(of, piece, row), __fmul_rn(step, offset), total);
        }
      }
    }
  }

  // Called by whole warps: a gate has its up from the next lane.
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

// How much shared memory a block has.
template <typename Codes, typename Numbers, typename Shape>
size_t code_bytes(const CodePlan& plan) {
  constexpr int kRowsBytes = StageRows<Numbers, Shape::kRows>::kBytes;
  int ring = Shape::kThreads / kWarpSize * kCodeDepth * plan.slot_bytes;
  int left = Shape::kSplits == 1
                 ? 0
                 : Shape::kSplits * plan.pieces * Shape::kRows * Shape::kSumBytes;
  return static_cast<size_t>(ring + Shape::kSplits * kRowsBytes + left);
}

template <typename Codes, typename Shape>
CodePlan code_plan(const GemmParams& params) {
  const WeightParams& weight = params.weight;
  int64_t row_group = weight.row_numbers == RowNumbers::kInt8 ? kInt8Group : kIntegerGroup;
  // The greatest common divisor of both groups, that of the row being a power of two.
  int64_t power = weight.group & -weight.group;
  int64_t piece = power == 0 || power > row_group ? row_group : power;
  CodePlan plan{};
  plan.stages = static_cast<int>((weight.num_inputs + kCodeStage - 1) / kCodeStage);
  plan.pieces = static_cast<int>(kCodeStage / piece);
  plan.lines = weight.group == 0 ? 0 : weight.group % kCodeStage == 0 ? 1 : plan.pieces;
  int lines = plan.lines * (weight.offsets != nullptr ? 2 : 1);
  plan.slot_bytes = Shape::kGroups * (2 * Codes::kVectors * kWarpSize * 16 + lines * 128);
  bool wide = params.dtype == DType::kFloat32;
  plan.aligned = wide ? chunk_aligned<float>(params.x, params.x_stride)
                      : chunk_aligned<bfloat16>(params.x, params.x_stride);
  plan.quads =
      weight.num_outputs % 4 == 0 && reinterpret_cast<uintptr_t>(params.out) % 16 == 0;
  return plan;
}

// fn<Codes, Numbers>(): of the weight and the rows.
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
    if (weight.row_numbers == RowNumbers::kInt8) return fn.template operator()<Codes, Int8Numbers>();
    fn.template operator()<Codes, Int16Numbers>();
  };
  if (weight.kind == WeightKind::kInt8) return with_numbers.template operator()<Int8Codes>();
  if (weight.code_values != nullptr) return with_numbers.template operator()<Int4Table>();
  with_numbers.template operator()<Int4Codes>();
}

}  // namespace specops
