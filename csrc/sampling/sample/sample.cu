// SPDX-License-Identifier: Apache-2.0
#include "common/launch.cuh"
#include "sampling/sample/sample.cuh"

namespace specops {

void sample_cuda(const SampleParams& params, CudaStream stream) {
  bool processed = has_processors(params.processors);
  RowPlan plan = plan_rows(
      params.rows, params.vocab_size, dtype_bytes(params.dtype), processed, device_limits(stream));
  dim3 grid(static_cast<unsigned>(params.rows * plan.splits));
  size_t smem_bytes = row_smem_bytes(plan, processed);
  auto run = [&](auto kernel) {
    launch(kernel, grid, plan.threads, smem_bytes, stream, params, plan);
  };
  if (params.dtype == DType::kBFloat16) {
    processed ? run(sample_kernel<bfloat16, true>) : run(sample_kernel<bfloat16, false>);
  } else {
    processed ? run(sample_kernel<float, true>) : run(sample_kernel<float, false>);
  }
}

void sampling_workspace_cuda(const SamplingWorkspaceParams& params, CudaStream stream) {
  *params.num_bytes = workspace_bytes(
      params.rows, params.vocab_size, params.element_bytes, params.batch, device_limits(stream));
}

}  // namespace specops
