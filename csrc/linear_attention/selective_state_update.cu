// SPDX-License-Identifier: Apache-2.0
#include "common/launch.cuh"
#include "linear_attention/selective_state_update.cuh"

namespace specops {
namespace {

template <typename T>
void run(const SelectiveStateUpdateParams& params, CudaStream stream) {
  int64_t pieces = (params.head_dim + kStateColumns - 1) / kStateColumns;
  int64_t blocks = (params.of.batch + 1) * params.num_heads * pieces;
  auto start = [&](auto kernel) {
    launch(kernel,
           dim3(static_cast<unsigned>(blocks)),
           kStateThreads,
           sizeof(SelectiveShared),
           stream,
           params);
  };
  if (params.state_dim <= 128) return start(selective_state_update_kernel<T, 128>);
  start(selective_state_update_kernel<T, kMostStateDim>);
}

}  // namespace

void selective_state_update_cuda(const SelectiveStateUpdateParams& params, CudaStream stream) {
  if (params.dtype == DType::kBFloat16) return run<bfloat16>(params, stream);
  if (params.dtype == DType::kFloat16) return run<float16>(params, stream);
  run<float>(params, stream);
}

}  // namespace specops
