// SPDX-License-Identifier: Apache-2.0
#include "batching/prepare_batch.cuh"
#include "common/launch.cuh"

namespace specops {

void prepare_batch_cuda(const PrepareBatchParams& params, CudaStream stream) {
  // One block per 256 rows, so that a decoding step waits only for the latency of one row. Large
  // capacities get larger slices, so that few blocks repeat the scan.
  constexpr int64_t kBlocksPerSm = 4;
  int64_t rows =
      params.total_rows > params.num_output_rows ? params.total_rows : params.num_output_rows;
  int64_t passes = rows / (kBlocksPerSm * num_sms(stream) * kPrepareBatchThreads) + 1;
  int64_t rows_per_block = passes * kPrepareBatchThreads;
  int64_t blocks = rows == 0 ? 1 : (rows + rows_per_block - 1) / rows_per_block;
  launch(prepare_batch_kernel,
         dim3(static_cast<unsigned>(blocks)),
         kPrepareBatchThreads,
         kPrepareBatchSmemBytes,
         stream,
         params,
         rows_per_block);
}

}  // namespace specops
