// SPDX-License-Identifier: Apache-2.0
#include "common/launch.cuh"
#include "sampling/verify.cuh"

namespace specops {

void verify_cuda(const VerifyParams& params, CudaStream stream) {
  RowPlan plan =
      plan_rows(params.rows, params.vocab_size, dtype_bytes(params.dtype), num_sms(stream));
  int64_t items = params.batch * (params.max_draft_tokens + 1);
  dim3 grid(static_cast<unsigned>(items * plan.splits));
  auto run = [&](auto kernel) {
    launch(kernel, grid, plan.threads, sizeof(RowShared), stream, params, plan);
  };
  if (params.dtype == DType::kBFloat16) {
    run(verify_kernel<bfloat16>);
  } else {
    run(verify_kernel<float>);
  }
}

}  // namespace specops
