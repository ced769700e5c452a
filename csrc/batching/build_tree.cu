// SPDX-License-Identifier: Apache-2.0
#include "batching/build_tree.cuh"
#include "common/launch.cuh"

namespace specops {

void build_tree_cuda(const BuildTreeParams& params, CudaStream stream) {
  launch(build_tree_kernel,
         dim3(static_cast<unsigned>(params.batch)),
         kBuildTreeThreads,
         static_cast<size_t>(params.nodes) * sizeof(int32_t),
         stream,
         params);
}

}  // namespace specops
