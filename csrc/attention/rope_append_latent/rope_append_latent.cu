// SPDX-License-Identifier: Apache-2.0
#include "attention/rope_append_latent/rope_append_latent.cuh"
#include "common/launch.cuh"

namespace specops {

void rope_append_latent_cuda(const RopeAppendLatentParams& params, CudaStream stream) {
  int64_t blocks = params.rows * (params.num_qo_heads / kLatentWarps + 1);
  auto run = [&](auto kernel) {
    launch(kernel, dim3(static_cast<unsigned>(blocks)), kLatentThreads, 0, stream, params);
  };
  if (params.dtype == DType::kBFloat16) return run(rope_append_latent_kernel<bfloat16>);
  if (params.dtype == DType::kFloat16) return run(rope_append_latent_kernel<float16>);
  run(rope_append_latent_kernel<float>);
}

}  // namespace specops
