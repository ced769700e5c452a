// SPDX-License-Identifier: Apache-2.0
#include "common/launch.cuh"
#include "linear_attention/causal_conv1d.cuh"

namespace specops {

void causal_conv1d_cuda(const CausalConv1dParams& params, CudaStream stream) {
  int64_t pieces = (params.channels + kConvThreads - 1) / kConvThreads;
  int64_t blocks = (params.of.batch + 1) * pieces;
  auto run = [&](auto kernel) {
    launch(kernel, dim3(static_cast<unsigned>(blocks)), kConvThreads, 0, stream, params);
  };
  if (params.dtype == DType::kBFloat16) return run(causal_conv1d_kernel<bfloat16>);
  if (params.dtype == DType::kFloat16) return run(causal_conv1d_kernel<float16>);
  run(causal_conv1d_kernel<float>);
}

}  // namespace specops
