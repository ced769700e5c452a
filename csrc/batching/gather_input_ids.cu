// SPDX-License-Identifier: Apache-2.0
#include "batching/gather_input_ids.cuh"
#include "common/launch.cuh"

namespace specops {

void gather_input_ids_cuda(const GatherInputIdsParams& params, CudaStream stream) {
  int64_t blocks = (params.rows + kGatherInputIdsThreads - 1) / kGatherInputIdsThreads;
  launch(gather_input_ids_kernel,
         dim3(static_cast<unsigned>(blocks)),
         kGatherInputIdsThreads,
         0,
         stream,
         params);
}

}  // namespace specops
