// SPDX-License-Identifier: Apache-2.0
#include "attention/copy_kv/copy_kv.cuh"
#include "attention/copy_kv/slot_words.cuh"
#include "common/launch.cuh"

namespace specops {

void copy_kv_cuda(const CopyKvParams& params, CudaStream stream) {
  with_slot_words(params, [&](auto word) {
    using Word = decltype(word);
    int64_t words = params.slot_bytes / static_cast<int64_t>(sizeof(Word));
    int64_t pieces = (words + kCopyKvThreads - 1) / kCopyKvThreads;
    launch(copy_kv_kernel<Word>,
           dim3(static_cast<unsigned>(num_caches(params) * params.copies * pieces)),
           kCopyKvThreads,
           0,
           stream,
           params);
  });
}

}  // namespace specops
