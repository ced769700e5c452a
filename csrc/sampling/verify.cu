// SPDX-License-Identifier: Apache-2.0
#include "common/launch.cuh"
#include "sampling/verify.cuh"

namespace specops {

void verify_cuda(const VerifyParams& params, CudaStream stream) {
  RowPlan plan =
      plan_rows(params.rows, params.vocab_size, dtype_bytes(params.dtype), num_sms(stream));
  int64_t items = params.batch * (params.max_draft_tokens + 1);
  dim3 grid(static_cast<unsigned>(items * plan.splits));
  bool processed = has_processors(params.processors);
  size_t smem_bytes = row_smem_bytes(plan, processed, dtype_bytes(params.dtype));
  auto run = [&](auto kernel) {
    launch(kernel, grid, plan.threads, smem_bytes, stream, params, plan);
  };
  if (params.dtype == DType::kBFloat16) {
    processed ? run(verify_kernel<bfloat16, true>) : run(verify_kernel<bfloat16, false>);
  } else {
    processed ? run(verify_kernel<float, true>) : run(verify_kernel<float, false>);
  }
}

}  // namespace specops
