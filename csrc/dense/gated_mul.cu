// SPDX-License-Identifier: Apache-2.0
#include "common/launch.cuh"
#include "dense/gated_mul.cuh"

namespace specops {
namespace {

template <typename T>
void run(const GatedMulParams& params, CudaStream stream) {
  int64_t chunks = (params.width + kChunk<T> - 1) / kChunk<T>;
  int64_t pieces = (chunks + kGatedMulThreads - 1) / kGatedMulThreads;
  // Divide a row into pieces of equal length, so that few threads of the last piece are idle.
  int64_t threads = ((chunks + pieces - 1) / pieces + kWarpSize - 1) / kWarpSize * kWarpSize;
  bool aligned = chunk_aligned<T>(params.gate_up, params.gate_up_stride) &&
                 chunk_aligned<T>(params.out, params.width);
  launch(gated_mul_kernel<T>,
         dim3(static_cast<unsigned>(params.rows * pieces)),
         dim3(static_cast<unsigned>(threads)),
         0,
         stream,
         params,
         static_cast<int>(pieces),
         aligned);
}

}  // namespace

void gated_mul_cuda(const GatedMulParams& params, CudaStream stream) {
  if (params.dtype == DType::kBFloat16) return run<bfloat16>(params, stream);
  if (params.dtype == DType::kFloat16) return run<float16>(params, stream);
  run<float>(params, stream);
}

}  // namespace specops
