// SPDX-License-Identifier: Apache-2.0
#include "batching/gather_output_rows.cuh"
#include "common/launch.cuh"

namespace specops {
namespace {

template <typename Word>
void gather_words(const GatherOutputRowsParams& params, CudaStream stream) {
  constexpr int64_t kPieceBytes = kGatherWords * kWarpSize * static_cast<int64_t>(sizeof(Word));
  int64_t pieces_per_row = (params.row_bytes + kPieceBytes - 1) / kPieceBytes;
  int64_t blocks = (params.num_output_rows * pieces_per_row + kGatherWarps - 1) / kGatherWarps;
  launch(gather_output_rows_kernel<Word>,
         dim3(static_cast<unsigned>(blocks)),
         kGatherThreads,
         0,
         stream,
         params);
}

}  // namespace

void gather_output_rows_cuda(const GatherOutputRowsParams& params, CudaStream stream) {
  uint64_t together =
      reinterpret_cast<uintptr_t>(params.hidden) | reinterpret_cast<uintptr_t>(params.out) |
      static_cast<uint64_t>(params.row_bytes) | static_cast<uint64_t>(params.hidden_stride_bytes);
  if (together % sizeof(uint4) == 0) {
    gather_words<uint4>(params, stream);
  } else {
    gather_words<uint16_t>(params, stream);  // odd widths, or unaligned views
  }
}

}  // namespace specops
