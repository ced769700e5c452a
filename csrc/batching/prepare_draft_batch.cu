// SPDX-License-Identifier: Apache-2.0
#include "batching/prepare_draft_batch.cuh"
#include "common/launch.cuh"

namespace specops {

void prepare_draft_batch_cuda(const PrepareDraftBatchParams& params, CudaStream stream) {
  // One block per 256 rows, so that a decoding step waits only for the latency of one row. Large
  // capacities get larger slices, so that few blocks repeat the scan.
  constexpr int64_t kBlocksPerSm = 4;
  int64_t passes = params.total_rows / (kBlocksPerSm * num_sms(stream) * kPrepareDraftThreads) + 1;
  int64_t rows_per_block = passes * kPrepareDraftThreads;
  int64_t blocks =
      params.total_rows == 0 ? 1 : (params.total_rows + rows_per_block - 1) / rows_per_block;
  launch(prepare_draft_batch_kernel,
         dim3(static_cast<unsigned>(blocks)),
         kPrepareDraftThreads,
         kPrepareDraftSmemBytes,
         stream,
         params,
         rows_per_block);
}

}  // namespace specops
