// SPDX-License-Identifier: Apache-2.0
#include "attention/merge_states/merge_states.cuh"
#include "common/launch.cuh"

namespace specops {
namespace {

template <typename T>
void run(const MergeStatesParams& params, CudaStream stream) {
  constexpr int kVector = 16 / sizeof(T);
  auto misaligned = [](const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 != 0;
  };
  bool scalar = params.head_dim % kVector != 0 || misaligned(params.outs) || misaligned(params.out);
  int64_t threads = params.num_items * params.head_dim / (scalar ? 1 : kVector);
  dim3 grid(static_cast<unsigned>((threads + kMergeThreads - 1) / kMergeThreads));
  launch(scalar ? merge_states_kernel<T, 1> : merge_states_kernel<T, kVector>,
         grid,
         kMergeThreads,
         0,
         stream,
         params);
}

}  // namespace

void merge_states_cuda(const MergeStatesParams& params, CudaStream stream) {
  if (params.dtype == DType::kBFloat16) {
    run<bfloat16>(params, stream);
  } else if (params.dtype == DType::kFloat16) {
    run<float16>(params, stream);
  } else {
    run<float>(params, stream);
  }
}

}  // namespace specops
