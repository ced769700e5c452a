// SPDX-License-Identifier: Apache-2.0
#include "common/launch.cuh"
#include "dense/rms_norm.cuh"

namespace specops {
namespace {

template <typename T>
void run(const RmsNormParams& params, CudaStream stream) {
  bool aligned = chunk_aligned<T>(params.x, params.x_stride) &&
                 chunk_aligned<T>(params.weight, params.width) &&
                 chunk_aligned<T>(params.out, params.width) &&
                 chunk_aligned<T>(params.residual, params.width);
  int threads = rms_norm_threads<T>(params.width);
  launch(rms_norm_kernel<T>,
         dim3(static_cast<unsigned>(params.rows)),
         dim3(static_cast<unsigned>(threads)),
         threads / kWarpSize * sizeof(float),
         stream,
         params,
         aligned);
}

}  // namespace

void rms_norm_cuda(const RmsNormParams& params, CudaStream stream) {
  if (params.dtype == DType::kBFloat16) return run<bfloat16>(params, stream);
  if (params.dtype == DType::kFloat16) return run<float16>(params, stream);
  run<float>(params, stream);
}

}  // namespace specops
