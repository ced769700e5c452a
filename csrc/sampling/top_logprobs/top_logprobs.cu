// SPDX-License-Identifier: Apache-2.0
#include "common/launch.cuh"
#include "sampling/top_logprobs/top_logprobs.cuh"

namespace specops {

void top_logprobs_cuda(const TopLogprobsParams& params, CudaStream stream) {
  bool processed = has_processors(params.processors);
  RowPlan plan = plan_rows(
      params.rows, params.vocab_size, dtype_bytes(params.dtype), processed, device_limits(stream));
  dim3 grid(static_cast<unsigned>(params.rows * plan.splits));
  size_t smem_bytes = row_smem_bytes(plan, processed);
  auto run = [&](auto kernel) {
    launch(kernel, grid, plan.threads, smem_bytes, stream, params, plan);
  };
  if (params.dtype == DType::kBFloat16) {
    processed ? run(top_logprobs_kernel<bfloat16, true>)
              : run(top_logprobs_kernel<bfloat16, false>);
  } else {
    processed ? run(top_logprobs_kernel<float, true>) : run(top_logprobs_kernel<float, false>);
  }
}

}  // namespace specops
