// SPDX-License-Identifier: Apache-2.0
#include "batching/advance_draft_batch.cuh"
#include "common/launch.cuh"

namespace specops {

void advance_draft_batch_cuda(const AdvanceDraftBatchParams& params, CudaStream stream) {
  launch(advance_draft_batch_kernel,
         dim3(1),
         kAdvanceDraftThreads,
         kAdvanceDraftSmemBytes,
         stream,
         params);
}

}  // namespace specops
