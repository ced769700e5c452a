// SPDX-License-Identifier: Apache-2.0
#include "common/launch.cuh"
#include "gemm/code_tiles.cuh"

namespace specops {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename Shape>
void run(const ExpertsParams& params, CudaStream stream) {
  CodeTilePlan plan = code_tile_plan<typename Shape::Codes>(params);
  auto* rounded = reinterpret_cast<unsigned char*>(params.workspace + kWorkspaceCounters);
  int64_t row_tiles = params.expert_indptr == nullptr
                          ? ceil_div(params.rows, kRoundedRows)
                          : most_row_tiles(params.rows, params.num_experts, kRoundedRows);
  int64_t output_tiles = ceil_div(params.weight.num_outputs, Shape::kOutputs);
  constexpr int64_t kBlocksPerStage = kRoundedRows * kCodeSteps / kRoundThreads;
  launch(round_rows_kernel<typename Shape::Numbers>,
         dim3(static_cast<unsigned>(row_tiles * plan.stages * kBlocksPerStage)),
         dim3(kRoundThreads),
         0,
         stream,
         params,
         rounded,
         plan.stages,
         plan.aligned);
  launch(code_tile_kernel<Shape>,
         dim3(static_cast<unsigned>(row_tiles * output_tiles)),
         dim3(Shape::kThreads),
         Shape::kSmemBytes,
         stream,
         params,
         plan,
         rounded,
         row_tiles);
}

// The forms for which code_tile_steps() is not zero.
template <typename Codes, typename Numbers>
void run_codes(const ExpertsParams& params, CudaStream stream) {
  constexpr bool kIsWide = Numbers::kPlanes == 2;
  constexpr int kMost = kIsWide ? kCodeSteps : 1;
  if constexpr (std::is_same_v<Codes, Int8Codes>) {
    if (params.weight.group == 0) {
      return run<CodeTileShape<Codes, Numbers, kMost, false, false>>(params, stream);
    }
    if (kIsWide && code_tile_steps(params.weight) == 1) {
      return run<CodeTileShape<Codes, Numbers, 1, true, false>>(params, stream);
    }
  }
  if constexpr (std::is_same_v<Codes, Int4Codes>) {
    if (params.weight.offsets != nullptr) {
      return run<CodeTileShape<Codes, Numbers, kMost, true, true>>(params, stream);
    }
  }
  run<CodeTileShape<Codes, Numbers, kMost, true, false>>(params, stream);
}

}  // namespace

void code_tiles_cuda(const ExpertsParams& params, CudaStream stream) {
  with_codes(params, [&]<typename Codes, typename Numbers>() {
    if constexpr (!Numbers::kIsFloat) run_codes<Codes, Numbers>(params, stream);
  });
}

}  // namespace specops
