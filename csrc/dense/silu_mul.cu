// SPDX-License-Identifier: Apache-2.0
#include "common/launch.cuh"
#include "dense/silu_mul.cuh"

namespace specops {
namespace {

template <typename T>
void run(const SiluMulParams& params, CudaStream stream) {
  int64_t chunks = (params.width + kChunk<T> - 1) / kChunk<T>;
  int64_t pieces = (chunks + kSiluMulThreads - 1) / kSiluMulThreads;
  // Pieces of equal length, so that few threads of the last one are idle.
  int64_t threads = ((chunks + pieces - 1) / pieces + kWarpSize - 1) / kWarpSize * kWarpSize;
  bool aligned = chunk_aligned<T>(params.gate_up, params.gate_up_stride) &&
                 chunk_aligned<T>(params.out, params.width);
  launch(silu_mul_kernel<T>,
         dim3(static_cast<unsigned>(params.rows * pieces)),
         dim3(static_cast<unsigned>(threads)),
         0,
         stream,
         params,
         static_cast<int>(pieces),
         aligned);
}

}  // namespace

void silu_mul_cuda(const SiluMulParams& params, CudaStream stream) {
  if (params.dtype == DType::kBFloat16) return run<bfloat16>(params, stream);
  if (params.dtype == DType::kFloat16) return run<float16>(params, stream);
  run<float>(params, stream);
}

}  // namespace specops
