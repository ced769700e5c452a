// SPDX-License-Identifier: Apache-2.0
#include <stdexcept>
#include <string>
#include <type_traits>

#include "common/launch.cuh"
#include "sampling/verify/verify.cuh"

namespace specops {

void verify_cuda(const VerifyParams& params, CudaStream stream) {
  bool processed = has_processors(params.processors);
  RowPlan plan = plan_rows(
      params.rows, params.vocab_size, dtype_bytes(params.dtype), processed, device_limits(stream));
  int64_t items = params.batch * (params.drafts.max_draft_tokens + 1);
  dim3 grid(static_cast<unsigned>(items * plan.splits));
  if (params.stamps != nullptr && params.stamped_blocks < grid.x) {
    throw std::invalid_argument("verify: phase stamps must have a row for each of " +
                                std::to_string(grid.x) + " blocks, got " +
                                std::to_string(params.stamped_blocks));
  }
  size_t smem_bytes = row_smem_bytes(plan, processed);
  auto run = [&](auto kernel) {
    launch(kernel, grid, plan.threads, smem_bytes, stream, params, plan);
  };
  auto run_dtype = [&](auto example) {
    using T = decltype(example);
    // Drafts affect the choices of rows only if a strategy may reject drafts or a policy accepts
    // them. Otherwise a draft is accepted if it equals the choice.
    bool rejects = params.strategy.values != nullptr ||
                   params.strategy.value > static_cast<int32_t>(VerifyStrategy::kTargetMatch);
    bool strategies = rejects || params.accept_rates || params.drafts.parents;
    if constexpr (std::is_same_v<T, bfloat16>) {
      if (params.stamps != nullptr) {
        return strategies ? run(verify_stamped_kernel<T, true>)
                          : run(verify_stamped_kernel<T, false>);
      }
    }
    if (processed) return run(verify_kernel<T, true, true>);
    strategies ? run(verify_kernel<T, false, true>) : run(verify_kernel<T, false, false>);
  };
  params.dtype == DType::kBFloat16 ? run_dtype(bfloat16{}) : run_dtype(0.0f);
}

}  // namespace specops
