// SPDX-License-Identifier: Apache-2.0
#include "common/launch.cuh"
#include "suffix_tree/ngram_propose.cuh"

namespace specops {

void ngram_propose_cuda(const NgramProposeParams& params, CudaStream stream) {
  launch(ngram_propose_kernel,
         dim3(static_cast<unsigned>(params.batch)),
         kNgramThreads,
         sizeof(NgramShared),
         stream,
         params);
  if (params.max_total_draft_tokens < 0 || params.batch == 0) return;
  launch(ngram_share_kernel, 1, kNgramThreads, kNgramWarps * sizeof(int64_t), stream, params);
}

}  // namespace specops
