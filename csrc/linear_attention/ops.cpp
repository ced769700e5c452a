// SPDX-License-Identifier: Apache-2.0
// Argument checks and registration of the linear attention ops.
#include "linear_attention/ops.h"

#include <string>

#include "common/ops.h"
#include "common/tensor_view.h"
#include "linear_attention/causal_conv1d.h"
#include "linear_attention/gated_delta_rule.h"
#include "linear_attention/selective_state_update.h"

namespace specops {
namespace {

constexpr auto kFloats = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

// An op with more operations takes more than about 50 us, so it releases the GIL.
constexpr int64_t kGilOperations = int64_t{1} << 20;

// Checks the arrays of slots. The tensors that determine the numbers of rows, slots and positions
// must be checked before.
SlotRows read_slot_rows(Checker& check,
                        const TensorView& slots,
                        const TensorView& qo_indptr,
                        const TensorView& kv_lens,
                        int64_t rows,
                        int64_t num_slots,
                        int64_t window) {
  Dim batch{"batch"}, batch_plus_1{"batch + 1"};
  check.tensor("slots", slots, {DType::kInt32}, {&batch});
  batch_plus_1.value = batch + 1;
  check.tensor("qo_indptr", qo_indptr, {DType::kInt32}, {&batch_plus_1});
  check.tensor("kv_lens", kv_lens, {DType::kInt32}, {&batch});
  return {
      .slots = slots.data<int32_t>(),
      .qo_indptr = qo_indptr.data<int32_t>(),
      .kv_lens = kv_lens.data<int32_t>(),
      .batch = batch,
      .num_slots = num_slots,
      .window = window,
      .rows = rows,
  };
}

// Rejects overlapping tensors, because rows are read again after other rows are written.
void refuse_overlap(const Checker& check,
                    const TensorView& out,
                    const char* argument,
                    const TensorView& view) {
  if (!overlap(out, view)) return;
  check.fail("out", std::string("another tensor than ") + argument, "overlapping memory");
}

void causal_conv1d(const TensorView& x,
                   const TensorView& weight,
                   const TensorView& states,
                   const TensorView& slots,
                   const TensorView& qo_indptr,
                   const TensorView& kv_lens,
                   const TensorView& bias,
                   const TensorView& out) {
  Checker check("causal_conv1d");
  Dim rows{"rows"}, channels{"channels"}, taps{"taps"}, num_slots{"num_slots"}, window{"window"};
  check.tensor("x", x, kFloats, {&rows, &channels}, Layout::kRows);
  DType dtype = x.dtype();
  check.tensor("weight", weight, {dtype}, {&taps, &channels});
  check.that(taps >= 1 && taps <= kMostTaps,
             "weight",
             "of 1 to " + std::to_string(kMostTaps) + " taps",
             taps.value);
  check.tensor("states", states, {dtype}, {&num_slots, &window, &channels});
  int64_t least = taps > 1 ? taps - 1 : 1;
  check.that(window >= least,
             "states",
             "of a window of at least " + std::to_string(least) + " positions",
             window.value);
  SlotRows of = read_slot_rows(check, slots, qo_indptr, kv_lens, rows, num_slots, window);
  check.optional("bias", bias, {dtype}, {&channels});
  check.tensor("out", out, {dtype}, {&rows, &channels});
  if (rows == 0 || channels == 0) return;
  refuse_overlap(check, out, "x", x);
  CausalConv1dParams params{
      .x = x.raw(),
      .weight = weight.raw(),
      .bias = bias.data<void>(),
      .states = states.raw(),
      .out = out.raw(),
      .of = of,
      .channels = channels,
      .taps = taps,
      .x_stride = x.stride(0),
      .dtype = dtype,
      .error = check.error_flag(),
  };
  if (check.on_cuda()) return causal_conv1d_cuda(params, check.stream());
  for (int64_t b = 0; b <= of.batch; ++b) check.refuse(find_fault(params, b));
  ReleaseGil release(rows * channels * taps > kGilOperations);
  causal_conv1d_cpu(params);
}

void check_dim(Checker& check, const char* argument, const Dim& dim, int64_t most) {
  check.that(dim >= kStateDimStep && dim <= most && dim % kStateDimStep == 0,
             argument,
             std::string("of a ") + dim.name + " that is a multiple of " +
                 std::to_string(kStateDimStep) + " up to " + std::to_string(most),
             dim.value);
}

void gated_delta_rule(const TensorView& q,
                      const TensorView& k,
                      const TensorView& v,
                      const TensorView& a,
                      const TensorView& b,
                      const TensorView& a_log,
                      const TensorView& dt_bias,
                      const TensorView& states,
                      const TensorView& slots,
                      const TensorView& qo_indptr,
                      const TensorView& kv_lens,
                      const TensorView& out) {
  Checker check("gated_delta_rule");
  Dim rows{"rows"}, key_heads{"num_key_heads"}, value_heads{"num_value_heads"};
  Dim key_dim{"key_dim"}, value_dim{"value_dim"}, num_slots{"num_slots"}, window{"window"};
  check.tensor("q", q, kFloats, {&rows, &key_heads, &key_dim}, Layout::kRows);
  DType dtype = q.dtype();
  check_dim(check, "q", key_dim, kMostKeyDim);
  check.tensor("k", k, {dtype}, {&rows, &key_heads, &key_dim}, Layout::kRows);
  check.tensor("v", v, {dtype}, {&rows, &value_heads, &value_dim}, Layout::kRows);
  check_dim(check, "v", value_dim, kMostValueDim);
  check.that(
      key_heads >= 1 && value_heads % key_heads == 0,
      "v",
      "of a multiple of num_key_heads=" + std::to_string(key_heads.value) + " (at least 1) heads",
      value_heads.value);
  bool has_channels = a.is_tensor && a.ndim() == 3;
  if (has_channels) {
    check.tensor("a", a, {dtype}, {&rows, &value_heads, &key_dim}, Layout::kRows);
  } else {
    check.tensor("a", a, {dtype}, {&rows, &value_heads}, Layout::kRows);
  }
  check.tensor("b", b, {dtype}, {&rows, &value_heads}, Layout::kRows);
  check.tensor("a_log", a_log, {DType::kFloat32}, {&value_heads});
  if (has_channels) {
    check.tensor("dt_bias", dt_bias, {DType::kFloat32}, {&value_heads, &key_dim});
  } else {
    check.tensor("dt_bias", dt_bias, {DType::kFloat32}, {&value_heads});
  }
  check.tensor("states",
               states,
               {DType::kFloat32},
               {&num_slots, &window, &value_heads, &key_dim, &value_dim});
  check.that(window >= 1, "states", "of a window of at least 1 position", window.value);
  SlotRows of = read_slot_rows(check, slots, qo_indptr, kv_lens, rows, num_slots, window);
  check.tensor("out", out, {dtype}, {&rows, &value_heads, &value_dim});
  if (rows == 0 || value_heads == 0) return;
  refuse_overlap(check, out, "q", q);
  refuse_overlap(check, out, "k", k);
  refuse_overlap(check, out, "v", v);
  GatedDeltaRuleParams params{
      .q = q.raw(),
      .k = k.raw(),
      .v = v.raw(),
      .a = a.raw(),
      .b = b.raw(),
      .a_log = a_log.data<float>(),
      .dt_bias = dt_bias.data<float>(),
      .states = states.data<float>(),
      .out = out.raw(),
      .of = of,
      .num_key_heads = key_heads,
      .num_value_heads = value_heads,
      .key_dim = key_dim,
      .value_dim = value_dim,
      .num_decays = has_channels ? key_dim.value : 1,
      .q_stride = q.stride(0),
      .k_stride = k.stride(0),
      .v_stride = v.stride(0),
      .a_stride = a.stride(0),
      .b_stride = b.stride(0),
      .dtype = dtype,
      .error = check.error_flag(),
  };
  if (check.on_cuda()) return gated_delta_rule_cuda(params, check.stream());
  for (int64_t i = 0; i <= of.batch; ++i) check.refuse(find_fault(params, i));
  ReleaseGil release(rows * value_heads * key_dim * value_dim > kGilOperations);
  gated_delta_rule_cpu(params);
}

void selective_state_update(const TensorView& x,
                            const TensorView& dt,
                            const TensorView& b,
                            const TensorView& c,
                            const TensorView& a_log,
                            const TensorView& d,
                            const TensorView& dt_bias,
                            const TensorView& states,
                            const TensorView& slots,
                            const TensorView& qo_indptr,
                            const TensorView& kv_lens,
                            const TensorView& out) {
  Checker check("selective_state_update");
  Dim rows{"rows"}, heads{"num_heads"}, head_dim{"head_dim"}, groups{"num_groups"};
  Dim state_dim{"state_dim"}, num_slots{"num_slots"}, window{"window"};
  check.tensor("x", x, kFloats, {&rows, &heads, &head_dim}, Layout::kRows);
  DType dtype = x.dtype();
  check_dim(check, "x", head_dim, kMostHeadDim);
  check.tensor("dt", dt, {dtype}, {&rows, &heads}, Layout::kRows);
  check.tensor("b", b, {dtype}, {&rows, &groups, &state_dim}, Layout::kRows);
  check.that(
      groups >= 1 && heads % groups == 0,
      "b",
      "of a number of groups (at least 1) that divides num_heads=" + std::to_string(heads.value),
      groups.value);
  check_dim(check, "b", state_dim, kMostStateDim);
  check.tensor("c", c, {dtype}, {&rows, &groups, &state_dim}, Layout::kRows);
  check.tensor("a_log", a_log, {DType::kFloat32}, {&heads});
  check.tensor("d", d, {DType::kFloat32}, {&heads});
  check.tensor("dt_bias", dt_bias, {DType::kFloat32}, {&heads});
  check.tensor(
      "states", states, {DType::kFloat32}, {&num_slots, &window, &heads, &state_dim, &head_dim});
  check.that(window >= 1, "states", "of a window of at least 1 position", window.value);
  SlotRows of = read_slot_rows(check, slots, qo_indptr, kv_lens, rows, num_slots, window);
  check.tensor("out", out, {dtype}, {&rows, &heads, &head_dim});
  if (rows == 0 || heads == 0) return;
  refuse_overlap(check, out, "x", x);
  refuse_overlap(check, out, "b", b);
  refuse_overlap(check, out, "c", c);
  SelectiveStateUpdateParams params{
      .x = x.raw(),
      .dt = dt.raw(),
      .b = b.raw(),
      .c = c.raw(),
      .a_log = a_log.data<float>(),
      .d = d.data<float>(),
      .dt_bias = dt_bias.data<float>(),
      .states = states.data<float>(),
      .out = out.raw(),
      .of = of,
      .num_heads = heads,
      .num_groups = groups,
      .state_dim = state_dim,
      .head_dim = head_dim,
      .x_stride = x.stride(0),
      .dt_stride = dt.stride(0),
      .b_stride = b.stride(0),
      .c_stride = c.stride(0),
      .dtype = dtype,
      .error = check.error_flag(),
  };
  if (check.on_cuda()) return selective_state_update_cuda(params, check.stream());
  for (int64_t i = 0; i <= of.batch; ++i) check.refuse(find_fault(params, i));
  ReleaseGil release(rows * heads * state_dim * head_dim > kGilOperations);
  selective_state_update_cpu(params);
}

}  // namespace

void register_linear_attention(pybind11::module_& m) {
  register_faults<7000>();
  m.def("causal_conv1d", &causal_conv1d);
  m.def("gated_delta_rule", &gated_delta_rule);
  m.def("selective_state_update", &selective_state_update);
}

}  // namespace specops
