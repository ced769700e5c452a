// SPDX-License-Identifier: Apache-2.0
#include "common/launch.cuh"
#include "sampling/commit_tokens.cuh"

namespace specops {

void commit_tokens_cuda(const CommitTokensParams& params, CudaStream stream) {
  constexpr int64_t kRequests = kCommitTokensThreads / kWarpSize;
  dim3 grid(static_cast<unsigned>((params.batch + kRequests - 1) / kRequests));
  launch(commit_tokens_kernel<>, grid, kCommitTokensThreads, 0, stream, params);
}

}  // namespace specops
