// SPDX-License-Identifier: Apache-2.0
#include "common/launch.cuh"
#include "sampling/commit/commit.cuh"

namespace specops {

void commit_cuda(const CommitParams& params, CudaStream stream) {
  dim3 grid(static_cast<unsigned>(params.batch));
  launch(commit_kernel<>, grid, kCommitThreads, sizeof(CommitShared), stream, params);
}

}  // namespace specops
