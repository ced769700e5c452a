// SPDX-License-Identifier: Apache-2.0
#include "common/launch.cuh"
#include "sampling/top_logprobs.cuh"

namespace specops {

void top_logprobs_cuda(const TopLogprobsParams& params, CudaStream stream) {
  RowPlan plan =
      plan_rows(params.rows, params.vocab_size, dtype_bytes(params.dtype), num_sms(stream));
  dim3 grid(static_cast<unsigned>(params.rows * plan.splits));
  auto run = [&](auto kernel) {
    launch(kernel, grid, plan.threads, sizeof(RowShared), stream, params, plan);
  };
  if (params.dtype == DType::kBFloat16) {
    run(top_logprobs_kernel<bfloat16>);
  } else {
    run(top_logprobs_kernel<float>);
  }
}

}  // namespace specops
