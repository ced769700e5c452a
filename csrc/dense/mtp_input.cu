// SPDX-License-Identifier: Apache-2.0
#include "common/launch.cuh"
#include "dense/mtp_input.cuh"

namespace specops {
namespace {

template <typename T>
void run(const MtpInputParams& params, CudaStream stream) {
  bool aligned = chunk_aligned<T>(params.embedding, params.width) &&
                 chunk_aligned<T>(params.embedding_norm, params.width) &&
                 chunk_aligned<T>(params.hidden_norm, params.width) &&
                 chunk_aligned<T>(params.hidden, params.hidden_stride) &&
                 chunk_aligned<T>(params.kept, params.width) &&
                 chunk_aligned<T>(params.out, params.width);
  int threads = rms_norm_threads<T>(params.width);
  launch(mtp_input_kernel<T>,
         dim3(static_cast<unsigned>(2 * params.rows)),
         dim3(static_cast<unsigned>(threads)),
         threads / kWarpSize * sizeof(float),
         stream,
         params,
         aligned);
}

}  // namespace

void mtp_input_cuda(const MtpInputParams& params, CudaStream stream) {
  if (params.dtype == DType::kBFloat16) return run<bfloat16>(params, stream);
  if (params.dtype == DType::kFloat16) return run<float16>(params, stream);
  run<float>(params, stream);
}

}  // namespace specops
