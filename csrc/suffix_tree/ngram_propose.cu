// SPDX-License-Identifier: Apache-2.0
#include "common/launch.cuh"
#include "suffix_tree/ngram_propose.cuh"

namespace specops {

void ngram_propose_cuda(const NgramProposeParams& params, CudaStream stream) {
  launch(ngram_propose_kernel,
         dim3(static_cast<unsigned>(params.batch)),
         kNgramThreads,
         kNgramSmemBytes,
         stream,
         params);
}

}  // namespace specops
