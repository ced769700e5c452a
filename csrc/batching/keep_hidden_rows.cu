// SPDX-License-Identifier: Apache-2.0
#include "batching/keep_hidden_rows.cuh"
#include "common/launch.cuh"

namespace specops {

void keep_hidden_rows_cuda(const KeepHiddenRowsParams& params, CudaStream stream) {
  auto run = [&](auto kernel) {
    launch(kernel,
           dim3(static_cast<unsigned>(params.batch * params.window)),
           kKeepHiddenThreads,
           0,
           stream,
           params);
  };
  uint64_t together =
      reinterpret_cast<uintptr_t>(params.hidden) | reinterpret_cast<uintptr_t>(params.kept) |
      static_cast<uint64_t>(params.row_bytes) | static_cast<uint64_t>(params.hidden_stride_bytes);
  if (together % sizeof(uint4) == 0) {
    run(keep_hidden_rows_kernel<uint4>);
  } else {
    run(keep_hidden_rows_kernel<uint16_t>);  // odd widths, or unaligned views
  }
}

}  // namespace specops
