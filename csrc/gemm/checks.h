// SPDX-License-Identifier: Apache-2.0
// Conversion of a packed weight from a Python argument: a PackedWeight of specops.dense.
#pragma once

#include <string>

#include "common/tensor_view.h"
#include "gemm/weight.h"

namespace specops {

// Limit on the inputs and on the outputs of a weight, so that products of sizes stay far within 64
// bits.
constexpr int64_t kMostInputs = int64_t{1} << 40;

struct WeightKindName {
  const char* name;
  WeightKind kind;
};

constexpr WeightKindName kWeightKinds[] = {
    {"plain", WeightKind::kPlain},
    {"int8", WeightKind::kInt8},
    {"int4", WeightKind::kInt4},
    {"fp8", WeightKind::kFp8},
};

struct RowNumbersName {
  const char* name;
  RowNumbers numbers;
};

constexpr RowNumbersName kRowNumbers[] = {
    {"float", RowNumbers::kFloat},
    {"int16", RowNumbers::kInt16},
    {"int8", RowNumbers::kInt8},
};

struct ActivationName {
  const char* name;
  Activation activation;
};

constexpr ActivationName kActivations[] = {
    {"silu", Activation::kSilu},
    {"gelu_tanh", Activation::kGeluTanh},
    {"swiglu_oai", Activation::kSwigluOai},
};

inline WeightKind read_weight_kind(const Checker& check, const char* argument, Argument given) {
  std::string expected;
  for (const WeightKindName& one : kWeightKinds) {
    expected += (expected.empty() ? "'" : " or '") + std::string(one.name) + "'";
  }
  std::string name = check.text(argument, given, expected);
  for (const WeightKindName& one : kWeightKinds) {
    if (name == one.name) return one.kind;
  }
  check.fail(argument, expected, "'" + name + "'");
}

// Reads an activation; None means no activation.
inline Activation read_activation(const Checker& check, const char* argument, Argument given) {
  if (!given.defined()) return Activation::kNone;
  const char* expected = "'silu', 'gelu_tanh', 'swiglu_oai' or None";
  std::string name = check.text(argument, given, expected);
  for (const ActivationName& one : kActivations) {
    if (name == one.name) return one.activation;
  }
  check.fail(argument, expected, "'" + name + "'");
}

// Reads the number format to which rows of x are rounded, for a weight of `kind`.
inline RowNumbers read_row_numbers(const Checker& check,
                                   const char* argument,
                                   Argument given,
                                   WeightKind kind) {
  std::string expected = is_in_panels(kind) ? "'int16' or 'int8'" : "'float'";
  std::string name = check.text(argument, given, expected);
  for (const RowNumbersName& one : kRowNumbers) {
    bool allowed = is_in_panels(kind) != (one.numbers == RowNumbers::kFloat);
    if (allowed && name == one.name) return one.numbers;
  }
  check.fail(argument, expected, "'" + name + "'");
}

// Reads the group size: how many inputs of a weight share a scale.
inline int64_t read_group(const Checker& check,
                          const char* argument,
                          Argument given,
                          WeightKind kind) {
  int64_t group = check.integer(argument, given, 0, kMostInputs);
  bool fits = group == 0;
  const char* expected = "0 of a plain weight";
  if (kind == WeightKind::kFp8) {
    fits = fits || group == kFp8Group;
    expected = "0 or 128 of fp8";
  } else if (kind != WeightKind::kPlain) {
    fits = group % 32 == 0 || group == 16;
    expected = "0, 16 or a multiple of 32";
  }
  if (!fits) check.fail(argument, expected, std::to_string(group));
  return group;
}

inline DType code_dtype(WeightKind kind) {
  switch (kind) {
    case WeightKind::kInt8:
      return DType::kInt8;
    case WeightKind::kInt4:
      return DType::kUInt8;
    default:
      return DType::kFloat8E4M3;
  }
}

// Shape of the data of a packed weight, for the layouts in weight.h. scale_block: outputs per row
// of scales; 0 if the scales are [num_outputs] or absent. turn: in a gated weight, `turn` gates are
// followed by as many ups.
struct PackedDims {
  Dim blocks{"blocks"}, steps{"steps"}, word{"block of one step"};
  int64_t scale_block = 0, turn = kWeightBlock;
};

inline PackedDims packed_dims(bool on_cuda,
                              WeightKind kind,
                              int64_t element_bytes,
                              int64_t num_outputs,
                              int64_t num_inputs,
                              Activation activation,
                              int64_t group) {
  PackedDims dims;
  if (!on_cuda && is_in_panels(kind)) {
    dims.blocks.value = weight_panels(num_outputs, activation);
    dims.steps.value = weight_chunks(num_inputs);
    dims.word.value = kPanelOutputs * kChunkInputs / (kind == WeightKind::kInt4 ? 2 : 1);
    if (group != 0) dims.scale_block = kPanelOutputs;
  } else if (!on_cuda) {
    int64_t inputs = element_bytes == 4 ? 1 : 2;
    dims.blocks.value = packed_blocks(num_outputs, activation);
    dims.steps.value = (num_inputs + inputs - 1) / inputs;
    dims.word.value = kWeightBlock * inputs;
    if (kind == WeightKind::kFp8) dims.scale_block = kWeightBlock;
  } else if (kind != WeightKind::kPlain) {
    dims.blocks.value = weight_groups(num_outputs);
    dims.steps.value = (num_inputs + kCodeStage - 1) / kCodeStage;
    dims.word.value = kWeightGroup * kCodeStage / (kind == WeightKind::kInt4 ? 2 : 1);
    if (group != 0) dims.scale_block = kWeightGroup;
    dims.turn = 1;
  } else if (element_bytes == 4) {
    dims.blocks.value = weight_groups(num_outputs);
    dims.steps.value = (num_inputs + 3) / 4;
    dims.word.value = kWeightGroup * 4;
  } else {
    dims.blocks.value = weight_groups(num_outputs) * 2;
    dims.steps.value = sum_leaves(num_inputs).stages * 2;
    dims.word.value = kWeightGroup / 2 * kWeightStage / 2;
  }
  return dims;
}

// Returns whether ops on this weight run CUDA kernels, for which the layouts and dtypes differ.
inline bool wants_cuda(const TensorView& weight) {
  return interprets_cuda() ||
         (has_cuda() && weight.is_tensor && weight.dl.device.device_type == kDLCUDA);
}

// Checks that a gated weight has an even number of outputs: as many ups as gates.
inline void check_halves(Checker& check,
                         const char* argument,
                         int64_t num_outputs,
                         Activation activation) {
  bool has_halves = !is_gated(activation) || num_outputs % 2 == 0;
  check.that(has_halves, argument, "gates and as many ups", num_outputs);
}

// Checks a field of a PackedWeight that only some kinds of weights have.
inline const TensorView& check_field(Checker& check,
                                     const char* argument,
                                     const TensorView& field,
                                     bool may_be_there,
                                     DType dtype,
                                     std::initializer_list<Dim*> dims) {
  if (field.defined() && !may_be_there) {
    check.fail(argument, "None of this kind", Checker::describe_object(field.object));
  }
  return check.optional(argument, field, {dtype}, dims);
}

// Checks that input_order contains valid inputs; CUDA kernels check it themselves.
inline void check_order(Checker& check, const TensorView& order, int64_t num_inputs) {
  const int32_t* inputs = order.data<int32_t>();
  if (inputs == nullptr || check.on_cuda()) return;
  for (int64_t k = 0; k < num_inputs; ++k) {
    if (inputs[k] >= 0 && inputs[k] < num_inputs) continue;
    check.fail("weight.input_order",
               "inputs in 0 .. " + std::to_string(num_inputs - 1),
               std::to_string(inputs[k]));
  }
}

// Checks the dtype and shape of a floating-point operand: the rows of x, or a plain weight.
inline const TensorView& check_real(Checker& check,
                                    const char* argument,
                                    const TensorView& view,
                                    bool on_cuda,
                                    std::initializer_list<Dim*> dims,
                                    Layout layout = Layout::kContiguous) {
  if (!on_cuda) {
    return check.tensor(argument, view, {DType::kBFloat16, DType::kFloat32}, dims, layout);
  }
  std::initializer_list<DType> dtypes = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
  return check.tensor(argument, view, dtypes, dims, layout);
}

// Fields of a PackedWeight that ops read. The Python class may have more after them.
struct WeightFields {
  Argument kind;
  TensorView data, scales;
  Argument num_outputs, num_inputs, activation;
  TensorView offsets;
  Argument group, activations;
  TensorView input_order, code_values;
};

inline WeightFields weight_fields(const Checker& check, Argument weight) {
  constexpr Py_ssize_t kFields = 11;
  PyObject* object = weight.object;
  if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) < kFields) {
    check.fail("weight", "a PackedWeight", Checker::describe_object(object));
  }
  auto field = [&](Py_ssize_t i) { return Argument{PyTuple_GET_ITEM(object, i)}; };
  auto tensor = [&](Py_ssize_t i) {
    TensorView view;
    view.object = field(i).object;
    if (field(i).defined()) borrow_tensor(view.object, view);
    return view;
  };
  return {field(0),
          tensor(1),
          tensor(2),
          field(3),
          field(4),
          field(5),
          tensor(6),
          field(7),
          field(8),
          tensor(9),
          tensor(10)};
}

// Checks scales, offsets, input order and value table of a quantized weight whose kind and sizes
// are known.
inline void check_code_fields(Checker& check,
                              const WeightFields& fields,
                              WeightKind kind,
                              int64_t group,
                              PackedDims& dims,
                              Dim& num_outputs,
                              Dim& num_inputs) {
  Dim scale_blocks{"blocks"}, groups{"groups"}, scale_block{"outputs of a block"}, codes{"codes"};
  scale_blocks.value = dims.blocks;
  groups.value = scale_groups(num_inputs, group);
  scale_block.value = dims.scale_block;
  codes.value = 16;
  bool has_codes = kind != WeightKind::kPlain, is_int = is_in_panels(kind);
  if (dims.scale_block != 0) {
    check.tensor(
        "weight.scales", fields.scales, {DType::kFloat32}, {&scale_blocks, &groups, &scale_block});
  } else if (has_codes) {
    check.tensor("weight.scales", fields.scales, {DType::kFloat32}, {&num_outputs});
  } else if (fields.scales.defined()) {
    const char* expected = "None of a plain weight";
    check.fail("weight.scales", expected, Checker::describe_object(fields.scales.object));
  }
  check_field(check,
              "weight.offsets",
              fields.offsets,
              is_int && group != 0,
              DType::kFloat32,
              {&scale_blocks, &groups, &scale_block});
  check_field(
      check, "weight.input_order", fields.input_order, has_codes, DType::kInt32, {&num_inputs});
  check_order(check, fields.input_order, num_inputs);
  check_field(check,
              "weight.code_values",
              fields.code_values,
              kind == WeightKind::kInt4,
              DType::kInt8,
              {&codes});
}

struct PackedWeightArgument {
  WeightParams params;
  DType dtype;    // dtype of data; for a plain weight, also of the rows
  int64_t bytes;  // size of data
};

// Checks the fields of a PackedWeight, and sets the Dims of the caller to its sizes.
inline PackedWeightArgument check_weight_fields(Checker& check,
                                                const WeightFields& fields,
                                                Dim& num_outputs,
                                                Dim& num_inputs) {
  WeightKind kind = read_weight_kind(check, "weight.kind", fields.kind);
  num_outputs.value = check.integer("weight.num_outputs", fields.num_outputs, 0, kMostInputs);
  num_inputs.value = check.integer("weight.num_inputs", fields.num_inputs, 0, kMostInputs);
  Activation activation = read_activation(check, "weight.activation", fields.activation);
  check_halves(check, "weight.num_outputs", num_outputs, activation);
  int64_t group = read_group(check, "weight.group", fields.group, kind);
  RowNumbers numbers = read_row_numbers(check, "weight.activations", fields.activations, kind);
  bool on_cuda = wants_cuda(fields.data);
  bool is_plain = kind == WeightKind::kPlain;
  DType dtype = is_plain ? fields.data.dtype() : code_dtype(kind);
  PackedDims dims =
      packed_dims(on_cuda, kind, dtype_bytes(dtype), num_outputs, num_inputs, activation, group);
  std::initializer_list<Dim*> shape = {&dims.blocks, &dims.steps, &dims.word};
  if (is_plain) {
    check_real(check, "weight.data", fields.data, on_cuda, shape);
  } else {
    check.tensor("weight.data", fields.data, {dtype}, shape);
  }
  check_code_fields(check, fields, kind, group, dims, num_outputs, num_inputs);
  if (check.on_cuda()) {
    check.on_16_bytes("weight.data", fields.data);
    if (dims.scale_block != 0) check.on_16_bytes("weight.scales", fields.scales);
    if (fields.offsets.defined()) check.on_16_bytes("weight.offsets", fields.offsets);
  }
  return {.params = {.kind = kind,
                     .data = fields.data.raw(),
                     .scales = fields.scales.data<float>(),
                     .offsets = fields.offsets.data<float>(),
                     .group = group,
                     .row_numbers = numbers,
                     .input_order = fields.input_order.data<int32_t>(),
                     .code_values = fields.code_values.data<int8_t>(),
                     .num_outputs = num_outputs,
                     .num_inputs = num_inputs,
                     .activation = activation},
          .dtype = dtype,
          .bytes = dims.blocks * dims.steps * dims.word * dtype_bytes(dtype)};
}

// Reads and checks a PackedWeight.
inline PackedWeightArgument check_packed_weight(Checker& check,
                                                Argument weight,
                                                Dim& num_outputs,
                                                Dim& num_inputs) {
  return check_weight_fields(check, weight_fields(check, weight), num_outputs, num_inputs);
}

}  // namespace specops
