// SPDX-License-Identifier: Apache-2.0
#include "common/launch.cuh"
#include "linear_attention/gated_delta_rule.cuh"

namespace specops {

void gated_delta_rule_cuda(const GatedDeltaRuleParams& params, CudaStream stream) {
  int64_t pieces = (params.value_dim + kStateColumns - 1) / kStateColumns;
  int64_t blocks = (params.of.batch + 1) * params.num_value_heads * pieces;
  auto run = [&](auto kernel) {
    launch(kernel,
           dim3(static_cast<unsigned>(blocks)),
           kStateThreads,
           sizeof(DeltaShared),
           stream,
           params);
  };
  if (params.num_decays > 1) {
    if (params.dtype == DType::kBFloat16) return run(gated_delta_rule_kernel<bfloat16, true>);
    if (params.dtype == DType::kFloat16) return run(gated_delta_rule_kernel<float16, true>);
    return run(gated_delta_rule_kernel<float, true>);
  }
  if (params.dtype == DType::kBFloat16) return run(gated_delta_rule_kernel<bfloat16, false>);
  if (params.dtype == DType::kFloat16) return run(gated_delta_rule_kernel<float16, false>);
  run(gated_delta_rule_kernel<float, false>);
}

}  // namespace specops
