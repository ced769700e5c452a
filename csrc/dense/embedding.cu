// SPDX-License-Identifier: Apache-2.0
#include "common/launch.cuh"
#include "dense/embedding.cuh"

namespace specops {

void embedding_cuda(const EmbeddingParams& params, CudaStream stream) {
  auto run = [&](auto kernel, int64_t word_bytes) {
    int64_t words = params.row_bytes / word_bytes;
    int64_t pieces = (words + kEmbeddingThreads - 1) / kEmbeddingThreads;
    int64_t threads = ((words + pieces - 1) / pieces + kWarpSize - 1) / kWarpSize * kWarpSize;
    launch(kernel,
           dim3(static_cast<unsigned>(params.rows), static_cast<unsigned>(pieces)),
           dim3(static_cast<unsigned>(threads)),
           0,
           stream,
           params);
  };
  auto misaligned = [&](int64_t bytes) {
    auto rest = [&](const void* p) { return reinterpret_cast<uintptr_t>(p) % bytes; };
    return rest(params.weight) != 0 || rest(params.out) != 0 || params.row_bytes % bytes != 0;
  };
  if (!misaligned(16)) return run(embedding_kernel<uint4>, 16);
  if (!misaligned(4)) return run(embedding_kernel<uint32_t>, 4);
  run(embedding_kernel<uint16_t>, 2);
}

}  // namespace specops
