// SPDX-License-Identifier: Apache-2.0
// Kinds and memory layouts of packed weights, as the kernels read them.
//
// Kinds: plain weights have the original numbers. Quantized weights have scales and values of 8-bit
// int8, 4-bit int4 or fp8 (e4m3).
//
// CPU layout, plain: outputs are in blocks of 16, and inputs in steps of one float or two bfloat16.
// packed[block][step] has 16 such steps; number i has inputs `step` of output 16 * block + i. fp8:
// a step is two inputs, and packed[block][step] has 16 values of the first input, then 16 of the
// second.
//
// CPU layout, int8 and int4: outputs are in panels of four blocks, and inputs in chunks of 16, so
// that a panel is read from begin to end. packed[panel][chunk] has lines of 64 bytes, block by
// block; in a line, four bytes belong to each output. int8: four lines of four inputs; each byte is
// value + 128. int4: two lines of eight inputs; the low half of byte i is input i, the high half is
// input 4 + i.
//
// CUDA layout, 16-bit types: outputs are in groups of 32, with two tiles of 16 each; inputs are in
// steps of 32, with two steps per stage. packed[tile][step] is 1,024 bytes: for each half of the
// step, and each lane = 4 * g + t of a warp, the four A registers of one mma.m16n8k16, with two
// inputs each. With first = 32 * step + 8 * t + 4 * half and output = 32 * group + 4 * g + 2 *
// (tile % 2), the registers are
//   inputs first, first + 1 of output; the same of output + 1;
//   inputs first + 2, first + 3 of output; the same of output + 1.
// Thus one 16-byte access loads a fragment, no data move between registers, and a lane ends up with
// four neighboring outputs of a group.
//
// CUDA layout, float32: packed[group][step] is 512 bytes: four inputs for each of 32 outputs.
//
// CUDA layout, quantized: inputs are in stages of 128, with four steps each.
// packed[group][stage][tile] has, for each lane = 4 * g + t, its operand A of mma.m16n8k32 in
// vectors of 16 bytes, lane by lane. The operand has eight inputs, from 32 * step + 8 * t on, of
// output = 32 * group + 4 * g + 2 * tile and of output + 1. int8 and fp8: a vector is one step:
// four inputs of output, the same of output + 1, then the other four inputs of each. int4: a vector
// is two steps; each has a word of output and a word of output + 1. The low half of byte i is input
// i, the high half is input 4 + i. The high bit of each stored value is flipped, which makes it
// two's complement.
//
// Numbers past the last output or input are zero, except in int8 and int4 weights, where they may
// have any value.
//
// A gated weight has as many gates as ups. It is packed so that a gate and its up are computed
// together. On CUDA, outputs 2 i and 2 i + 1 of the layouts above are gate i and up i. On the CPU,
// blocks 2 i and 2 i + 1 are block i of the gates and block i of the ups.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/error_flag.h"
#include "common/host_device.h"
#include "gemm/gated.h"

namespace specops {

SPECOPS_FAULT(1010,
              kLinearInputOrder) = "linear: weight.input_order must be an input of x{, below #}";

enum class WeightKind : int32_t { kPlain, kInt8, kInt4, kFp8 };

// Number format to which rows of x are rounded for products with quantized weights
// (integer_rows.h).
enum class RowNumbers : int32_t { kFloat, kInt16, kInt8 };

constexpr int64_t kWeightBlock = 16;  // outputs per block

SPECOPS_HOST_DEVICE int64_t weight_blocks(int64_t num_outputs) {
  return (num_outputs + kWeightBlock - 1) / kWeightBlock;
}

// Returns the number of blocks of a packed weight.
SPECOPS_HOST_DEVICE int64_t packed_blocks(int64_t num_outputs, Activation activation) {
  return is_gated(activation) ? 2 * weight_blocks(num_outputs / 2) : weight_blocks(num_outputs);
}

// Sizes of panels and chunks of int8 and int4 weights on the CPU.
constexpr int64_t kPanelBlocks = 4;
constexpr int64_t kPanelOutputs = kPanelBlocks * kWeightBlock;
constexpr int64_t kChunkInputs = 16;
constexpr int64_t kFp8Group = 128;  // number of inputs, and of outputs, that share a scale

SPECOPS_HOST_DEVICE bool is_in_panels(WeightKind kind) {
  return kind == WeightKind::kInt8 || kind == WeightKind::kInt4;
}

SPECOPS_HOST_DEVICE int64_t weight_panels(int64_t num_outputs, Activation activation) {
  return (packed_blocks(num_outputs, activation) + kPanelBlocks - 1) / kPanelBlocks;
}

SPECOPS_HOST_DEVICE int64_t weight_chunks(int64_t num_inputs) {
  return (num_inputs + kChunkInputs - 1) / kChunkInputs;
}

// Returns the number of groups of inputs; each group has one scale per output.
SPECOPS_HOST_DEVICE int64_t scale_groups(int64_t num_inputs, int64_t group) {
  return group == 0 ? 1 : (num_inputs + group - 1) / group;
}

// The rest of this file is for CUDA only, except WeightParams.

constexpr int64_t kWeightGroup = 32;  // outputs per group
constexpr int64_t kWeightStage = 64;  // inputs per stage of 16-bit weights
constexpr int64_t kCodeStage = 128;   // inputs per stage of quantized weights

SPECOPS_HOST_DEVICE int64_t weight_groups(int64_t num_outputs) {
  return (num_outputs + kWeightGroup - 1) / kWeightGroup;
}

// Division of the sum over inputs into leaves, at fixed positions: up to four leaves of equal
// length, none shorter than 512 inputs (except the last). A leaf is one chain of additions; the
// leaves are then added in order. The division depends only on the number of inputs. Which warp or
// block computes a leaf does not affect the result.
struct SumLeaves {
  int64_t stages;       // stages of all inputs
  int64_t leaf_stages;  // stages per leaf
  int64_t leaves;       // at least 1
};

constexpr int64_t kMaxLeaves = 4;

inline SumLeaves sum_leaves(int64_t num_inputs) {
  constexpr int64_t kMinLeafStages = 8;
  int64_t stages = (num_inputs + kWeightStage - 1) / kWeightStage;
  int64_t leaf_stages = (stages + kMaxLeaves - 1) / kMaxLeaves;
  if (leaf_stages < kMinLeafStages) leaf_stages = kMinLeafStages;
  int64_t leaves = (stages + leaf_stages - 1) / leaf_stages;
  return {stages, leaf_stages, leaves > 0 ? leaves : 1};
}

struct WeightParams {
  WeightKind kind;
  const void* data;  // in the layouts above
  // Scales of quantized values. If group is 0: [num_outputs], in the order of the weight before
  // packing. Otherwise in the order of the packed data: on the CPU [panels, groups of inputs, 64],
  // for fp8 [blocks, groups of inputs, 16]; on CUDA [groups of outputs, groups of inputs, 32].
  const float* scales;
  const float* offsets;  // same shape as scales, if group is not 0; or nullptr
  int64_t group;         // inputs that share a scale; 0: all inputs of an output
  RowNumbers row_numbers;
  const int32_t* input_order;  // [num_inputs], indices into x; nullptr: in order
  const int8_t* code_values;   // [16], the values of int4 numbers; nullptr: stored value - 8
  int64_t num_outputs;
  int64_t num_inputs;
  Activation activation;  // if gated, the first half of the outputs are gates, the rest ups
};

}  // namespace specops
