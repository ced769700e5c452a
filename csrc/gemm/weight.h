// SPDX-License-Identifier: Apache-2.0
// What a weight is to the kernels that multiply with it: its kind, and where its numbers lie.
//
// Kinds: plain, the weight's own numbers; codes with scales: int8 of 8 bits, int4 of 4, fp8 in e4m3.
//
// Layout on cpu, plain: outputs in blocks of 16, inputs in steps: one float or two bfloat16.
// packed[block][step] holds 16 of these, number i being inputs `step` of output 16 * block + i.
// fp8: steps are two inputs; packed[block][step] is 16 codes of the first, then 16 of the second.
//
// int8 and int4: panels of four blocks, inputs in chunks of 16, so that a panel is read from its
// begin to its end. packed[panel][chunk] is, block by block, lines of 64 bytes, in which four bytes
// are of one output. int8: four lines of four inputs, each code plus 128. int4: two lines of eight
// inputs; the low half of byte i is input i, the high half input 4 + i.
//
// Layout on CUDA, 16-bit types: outputs in groups of 32, two tiles of 16 each; inputs in steps of
// 32, two to a stage. packed[tile][step] is 1,024 bytes: for each half of the step, and each lane =
// 4 * g + t of a warp, the four registers of A of one mma.m16n8k16, two inputs each: with first =
// 32 * step + 8 * t + 4 * half and output = 32 * group + 4 * g + 2 * (tile % 2),
//   inputs first, first + 1 of output; the same of output + 1;
//   inputs first + 2, first + 3 of output; the same of output + 1.
// So one access of 16 bytes is a fragment, with nothing to move between registers, and a lane holds
// four neighbouring outputs of a group when it is done.
//
// Layout on CUDA, float32: packed[group][step] is 512 bytes: four inputs of each of 32 outputs.
//
// Layout on CUDA, codes: stages of 128 inputs, four steps. packed[group][stage][tile] has for each lane
// = 4 * g + t what mma.m16n8k32 takes as its operand A, in vectors of 16 bytes, lane by lane: eight
// inputs, 32 * step + 8 * t on, of output = 32 * group + 4 * g + 2 * tile and the same of output + 1.
// int8 and fp8: a vector is a step: four inputs of output, the same of output + 1; then the other
// four of each. int4: a vector is two steps: a word of output, a word of output + 1 for each; the low
// half of byte i is input i, the high half input 4 + i, and the high bit of a code is changed, which
// makes its value a two's complement.
//
// Numbers past the last output or input are zero; of int8 and int4 they are any code.
//
// A weight of gate and up, so many outputs each, is packed so that whoever computes a gate has its up
// beside it: on CUDA outputs 2 i and 2 i + 1 of the above are gate i and up i, on cpu blocks 2 i and
// 2 i + 1 are block i of the gates and block i of the ups.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/host_device.h"
#include "gemm/gated.h"

namespace specops {

enum class WeightKind : int32_t { kPlain, kInt8, kInt4, kFp8 };

// What rows are rounded to before they are multiplied with codes (integer_rows.h).
enum class RowNumbers : int32_t { kFloat, kInt16, kInt8 };

constexpr int64_t kWeightBlock = 16;  // outputs that share a block

SPECOPS_HOST_DEVICE int64_t weight_blocks(int64_t num_outputs) {
  return (num_outputs + kWeightBlock - 1) / kWeightBlock;
}

// Of all of a packed weight.
SPECOPS_HOST_DEVICE int64_t packed_blocks(int64_t num_outputs, Activation activation) {
  return is_gated(activation) ? 2 * weight_blocks(num_outputs / 2) : weight_blocks(num_outputs);
}

// Of int8 and int4 on cpu.
constexpr int64_t kPanelBlocks = 4;
constexpr int64_t kPanelOutputs = kPanelBlocks * kWeightBlock;
constexpr int64_t kChunkInputs = 16;
constexpr int64_t kFp8Group = 128;  // inputs, and outputs, that share a scale

SPECOPS_HOST_DEVICE bool is_in_panels(WeightKind kind) {
  return kind == WeightKind::kInt8 || kind == WeightKind::kInt4;
}

SPECOPS_HOST_DEVICE int64_t weight_panels(int64_t num_outputs, Activation activation) {
  return (packed_blocks(num_outputs, activation) + kPanelBlocks - 1) / kPanelBlocks;
}

SPECOPS_HOST_DEVICE int64_t weight_chunks(int64_t num_inputs) {
  return (num_inputs + kChunkInputs - 1) / kChunkInputs;
}

// How many groups of inputs have scales of their own.
SPECOPS_HOST_DEVICE int64_t scale_groups(int64_t num_inputs, int64_t group) {
  return group == 0 ? 1 : (num_inputs + group - 1) / group;
}

// What follows is about CUDA.

constexpr int64_t kWeightGroup = 32;  // outputs
constexpr int64_t kWeightStage = 64;  // inputs
constexpr int64_t kCodeStage = 128;   // inputs

SPECOPS_HOST_DEVICE int64_t weight_groups(int64_t num_outputs) {
  return (num_outputs + kWeightGroup - 1) / kWeightGroup;
}

// The sum over inputs is cut into leaves at fixed inputs: up to four of equal length, none shorter
// than 512 (the last one may be). A leaf is one chain of additions; leaves are then added in order.
// This depends on the number of inputs alone: which warp or block computes a leaf is a schedule.
struct SumLeaves {
  int64_t stages;       // of all inputs
  int64_t leaf_stages;  // of a leaf
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
  const void* data;  // as described above
  // Of codes. group 0: [num_outputs], in the order of the weight before packing. Otherwise in the
  // order of the data, on cpu [panels, groups of inputs, 64]; of fp8 [blocks, groups, 16]; on CUDA
  // [groups of outputs, groups of inputs, 32].
  const float* scales;
  const float* offsets;  // as scales, of a group that is not 0; or nullptr
  int64_t group;         // inputs that share a scale; 0: all of an output
  RowNumbers row_numbers;
  const int32_t* input_order;  // [num_inputs], of x; or nullptr: as they are
  const int8_t* code_values;   // [16] of int4; or nullptr: code - 8
  int64_t num_outputs;
  int64_t num_inputs;
  Activation activation;  // if any, the first half of the outputs are gates, the others ups
};

}  // namespace specops
