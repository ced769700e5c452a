// SPDX-License-Identifier: Apache-2.0
#include "common/launch.cuh"
#include "moe/moe_sort.cuh"

namespace specops {

void moe_sort_cuda(const MoeSortParams& params, CudaStream stream) {
  launch(moe_sort_kernel,
         dim3(static_cast<unsigned>(params.num_experts)),
         dim3(kSortThreads),
         kSortWarps * sizeof(int),
         stream,
         params);
}

}  // namespace specops
