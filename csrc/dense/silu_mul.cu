// SPDX-License-Identifier: Apache-2.0
#include "common/launch.cuh"
#include "dense/silu_mul.cuh"

namespace specops {

void silu_mul_cuda(const SiluMulParams& params, CudaStream stream) {
  int64_t items = params.rows * params.width;
  dim3 grid(static_cast<unsigned>((items + kSiluMulThreads - 1) / kSiluMulThreads));
  auto run = [&](auto kernel) { launch(kernel, grid, kSiluMulThreads, 0, stream, params); };
  if (params.dtype == DType::kBFloat16) {
    run(silu_mul_kernel<bfloat16>);
  } else if (params.dtype == DType::kFloat16) {
    run(silu_mul_kernel<float16>);
  } else {
    run(silu_mul_kernel<float>);
  }
}

}  // namespace specops
