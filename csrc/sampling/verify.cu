// SPDX-License-Identifier: Apache-2.0
#include "common/launch.cuh"
#include "sampling/verify.cuh"

namespace specops {

void verify_cuda(const VerifyParams& params, CudaStream stream) {
  RowPlan plan = plan_rows(params.rows,
                           params.vocab_size,
                           dtype_bytes(params.dtype),
                           {num_sms(stream), max_shared_bytes(stream)});
  int64_t items = params.batch * (params.max_draft_tokens + 1);
  dim3 grid(static_cast<unsigned>(items * plan.splits));
  bool processed = has_processors(params.processors);
  size_t smem_bytes = row_smem_bytes(plan, processed);
  auto run = [&](auto kernel) {
    launch(kernel, grid, plan.threads, smem_bytes, stream, params, plan);
  };
  auto run_dtype = [&](auto example) {
    using T = decltype(example);
    // Only equality with the draft matters, unless a request may ask for more.
    bool rejects = params.strategy.values != nullptr ||
                   params.strategy.value > static_cast<int32_t>(VerifyStrategy::kTargetMatch);
    bool strategies = rejects || params.accept_rates || params.parents;
    if (processed) return run(verify_kernel<T, true, true>);
    strategies ? run(verify_kernel<T, false, true>) : run(verify_kernel<T, false, false>);
  };
  params.dtype == DType::kBFloat16 ? run_dtype(bfloat16{}) : run_dtype(0.0f);
}

}  // namespace specops
