// SPDX-License-Identifier: Apache-2.0
#include "attention/compact_kv/compact_kv.cuh"
#include "attention/copy_kv/slot_words.cuh"
#include "common/launch.cuh"

namespace specops {

void compact_kv_cuda(const CompactKvParams& params, CudaStream stream) {
  with_slot_words(params, [&](auto word) {
    using Word = decltype(word);
    int64_t words = params.slot_bytes / static_cast<int64_t>(sizeof(Word));
    int64_t pieces = (words + kCompactKvThreads - 1) / kCompactKvThreads;
    launch(compact_kv_kernel<Word>,
           dim3(static_cast<unsigned>(num_caches(params) * params.batch * pieces)),
           kCompactKvThreads,
           sizeof(CompactKvMoves),
           stream,
           params);
  });
}

}  // namespace specops
