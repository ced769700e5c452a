// SPDX-License-Identifier: Apache-2.0
#include "common/launch.cuh"
#include "moe/moe_combine.cuh"

namespace specops {
namespace {

template <typename T>
void run(const MoeCombineParams& params, CudaStream stream) {
  int64_t pieces = (params.width + kCombineThreads - 1) / kCombineThreads;
  launch(moe_combine_kernel<T>,
         dim3(static_cast<unsigned>(params.rows * pieces)),
         dim3(kCombineThreads),
         0,
         stream,
         params);
}

}  // namespace

void moe_combine_cuda(const MoeCombineParams& params, CudaStream stream) {
  if (params.dtype == DType::kBFloat16) return run<bfloat16>(params, stream);
  if (params.dtype == DType::kFloat16) return run<float16>(params, stream);
  run<float>(params, stream);
}

}  // namespace specops
