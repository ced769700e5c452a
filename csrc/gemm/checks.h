// SPDX-License-Identifier: Apache-2.0
// How a packed weight enters C++: as one argument, a PackedWeight of specops.dense.
#pragma once

#include <string>

#include "common/tensor_view.h"
#include "gemm/weight.h"

namespace specops {

// Of a weight, and the most outputs: sizes made of them stay far within 64 bits.
constexpr int64_t kMostInputs = int64_t{1} << 40;

struct WeightKindName {
  const char* name;
  WeightKind kind;
};

constexpr WeightKindName kWeightKinds[] = {
    {"plain", WeightKind::kPlain},
    {"int8", WeightKind::kInt8},
};

struct ActivationName {
  const char* name;
  Activation activation;
};

constexpr ActivationName kActivations[] = {
    {"silu", Activation::kSilu},
    {"gelu_tanh", Activation::kGeluTanh},
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

// None: no activation.
inline Activation read_activation(const Checker& check, const char* argument, Argument given) {
  if (!given.defined()) return Activation::kNone;
  const char* expected = "'silu', 'gelu_tanh' or None";
  std::string name = check.text(argument, given, expected);
  for (const ActivationName& one : kActivations) {
    if (name == one.name) return one.activation;
  }
  check.fail(argument, expected, "'" + name + "'");
}

// The shape of a packed weight's data: [blocks, steps, word], as weight.h describes the layouts.
struct PackedDims {
  Dim blocks{"blocks"}, steps{"steps"}, word{"block of one step"};
};

inline PackedDims packed_dims(
    bool on_cuda, DType dtype, int64_t num_outputs, int64_t num_inputs, Activation activation) {
  PackedDims dims;
  if (!on_cuda) {
    int64_t inputs = dtype == DType::kFloat32 ? 1 : 2;
    dims.blocks.value = packed_blocks(num_outputs, activation);
    dims.steps.value = (num_inputs + inputs - 1) / inputs;
    dims.word.value = kWeightBlock * inputs;
  } else if (dtype == DType::kFloat32 || dtype == DType::kInt8) {
    int64_t inputs = 16 / dtype_bytes(dtype);
    dims.blocks.value = weight_groups(num_outputs);
    dims.steps.value = (num_inputs + inputs - 1) / inputs;
    dims.word.value = kWeightGroup * inputs;
  } else {
    dims.blocks.value = weight_groups(num_outputs) * 2;
    dims.steps.value = sum_leaves(num_inputs).stages * 2;
    dims.word.value = kWeightGroup / 2 * kWeightStage / 2;
  }
  return dims;
}

// Whether an op on this weight runs CUDA kernels, which have layouts and dtypes of their own.
inline bool wants_cuda(const TensorView& weight) {
  return interprets_cuda() ||
         (has_cuda() && weight.is_tensor && weight.dl.device.device_type == kDLCUDA);
}

// Gates and ups are of one number.
inline void check_halves(Checker& check,
                         const char* argument,
                         int64_t num_outputs,
                         Activation activation) {
  bool has_halves = !is_gated(activation) || num_outputs % 2 == 0;
  check.that(has_halves, argument, "gates and as many ups", num_outputs);
}

// Codes have scales, and nothing else has.
inline void check_scales(Checker& check,
                         const char* argument,
                         const TensorView& scales,
                         bool has_codes,
                         std::initializer_list<Dim*> dims) {
  if (has_codes) {
    check.tensor(argument, scales, {DType::kFloat32}, dims);
  } else if (scales.defined()) {
    check.fail(argument, "None of a plain weight", Checker::describe_object(scales.object));
  }
}

// What is multiplied: rows, and plain weights.
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

// The fields of a PackedWeight that ops read; Python may add others behind them.
struct WeightFields {
  Argument kind;
  TensorView data, scales;
  Argument num_outputs, num_inputs, activation;
};

inline WeightFields weight_fields(const Checker& check, Argument weight) {
  constexpr Py_ssize_t kFields = 6;
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
  return {field(0), tensor(1), tensor(2), field(3), field(4), field(5)};
}

struct PackedWeightArgument {
  WeightParams params;
  DType dtype;    // of data; of a plain weight also of what is multiplied with it
  int64_t bytes;  // of data, of one expert
};

// Reads and checks a PackedWeight. Its sizes become those of the caller's Dims. num_experts: of a
// weight for each expert, one behind the other, whose tensors have one dimension more in front.
inline PackedWeightArgument check_packed_weight(Checker& check,
                                                Argument weight,
                                                Dim& num_outputs,
                                                Dim& num_inputs,
                                                Dim* num_experts = nullptr) {
  WeightFields fields = weight_fields(check, weight);
  WeightKind kind = read_weight_kind(check, "weight.kind", fields.kind);
  num_outputs.value = check.integer("weight.num_outputs", fields.num_outputs, 0, kMostInputs);
  num_inputs.value = check.integer("weight.num_inputs", fields.num_inputs, 0, kMostInputs);
  Activation activation = read_activation(check, "weight.activation", fields.activation);
  check_halves(check, "weight.num_outputs", num_outputs, activation);
  bool on_cuda = wants_cuda(fields.data);
  DType dtype = kind == WeightKind::kInt8 ? DType::kInt8 : fields.data.dtype();
  PackedDims dims = packed_dims(on_cuda, dtype, num_outputs, num_inputs, activation);
  std::initializer_list<Dim*> one = {&dims.blocks, &dims.steps, &dims.word};
  std::initializer_list<Dim*> each = {num_experts, &dims.blocks, &dims.steps, &dims.word};
  auto shape = num_experts == nullptr ? one : each;
  bool is_plain = kind == WeightKind::kPlain;
  if (is_plain) {
    check_real(check, "weight.data", fields.data, on_cuda, shape);
  } else {
    check.tensor("weight.data", fields.data, {dtype}, shape);
  }
  std::initializer_list<Dim*> one_scale = {&num_outputs};
  std::initializer_list<Dim*> each_scale = {num_experts, &num_outputs};
  auto scales = num_experts == nullptr ? one_scale : each_scale;
  check_scales(check, "weight.scales", fields.scales, !is_plain, scales);
  if (check.on_cuda()) check.on_16_bytes("weight.data", fields.data);
  return {.params = {.kind = kind,
                     .data = fields.data.raw(),
                     .scales = fields.scales.data<float>(),
                     .num_outputs = num_outputs,
                     .num_inputs = num_inputs,
                     .activation = activation},
          .dtype = dtype,
          .bytes = dims.blocks * dims.steps * dims.word * dtype_bytes(dtype)};
}

}  // namespace specops
