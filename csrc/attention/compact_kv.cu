// SPDX-License-Identifier: Apache-2.0
#include "attention/compact_kv.cuh"
#include "common/launch.cuh"

namespace specops {
namespace {

template <typename Word>
void move_words(const CompactKvParams& params, CudaStream stream) {
  int64_t words = params.slot_bytes / static_cast<int64_t>(sizeof(Word));
  int64_t pieces = (words + kCompactKvThreads - 1) / kCompactKvThreads;
  launch(compact_kv_kernel<Word>,
         dim3(static_cast<unsigned>(2 * params.batch * pieces)),
         kCompactKvThreads,
         sizeof(CompactKvMoves),
         stream,
         params);
}

}  // namespace

void compact_kv_cuda(const CompactKvParams& params, CudaStream stream) {
  uint64_t together = reinterpret_cast<uintptr_t>(params.k_cache) |
                      reinterpret_cast<uintptr_t>(params.v_cache) |
                      static_cast<uint64_t>(params.slot_bytes);
  if (together % sizeof(uint4) == 0) {
    move_words<uint4>(params, stream);
  } else {
    move_words<uint16_t>(params, stream);  // an odd head_dim, or a view into another tensor
  }
}

}  // namespace specops
