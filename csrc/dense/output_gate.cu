// SPDX-License-Identifier: Apache-2.0
#include "common/launch.cuh"
#include "dense/output_gate.cuh"

namespace specops {
namespace {

template <typename T>
void run(const OutputGateParams& params, CudaStream stream) {
  // All heads are aligned if the rows and the length of a head are.
  bool aligned =
      chunk_aligned<T>(params.x, params.x_stride) && chunk_aligned<T>(params.x, params.dim) &&
      chunk_aligned<T>(params.out, params.dim) && chunk_aligned<T>(params.weight, params.dim) &&
      (params.gate_dim == 1 || chunk_aligned<T>(params.gate, params.gate_stride));
  int threads = rms_norm_threads<T>(params.dim);
  launch(output_gate_kernel<T>,
         dim3(static_cast<unsigned>(params.rows * params.heads)),
         dim3(static_cast<unsigned>(threads)),
         threads / kWarpSize * sizeof(float),
         stream,
         params,
         aligned);
}

}  // namespace

void output_gate_cuda(const OutputGateParams& params, CudaStream stream) {
  if (params.dtype == DType::kBFloat16) return run<bfloat16>(params, stream);
  if (params.dtype == DType::kFloat16) return run<float16>(params, stream);
  run<float>(params, stream);
}

}  // namespace specops
