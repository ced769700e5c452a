// SPDX-License-Identifier: Apache-2.0
#include "common/launch.cuh"
#include "gemm/rounded_rows.h"
#include "moe/moe_linear.cuh"

namespace specops {
namespace {

using Few = CodeShape<4, 1, 1>;
using Halves = CodeShape<1, 4, 1, true>;  // pieces of 16 inputs

template <typename Codes, typename Numbers, typename Shape>
void run(const ExpertsParams& params, CudaStream stream) {
  CodePlan plan = code_plan<Codes>(params);
  int64_t row_tiles = most_row_tiles(params.rows, params.num_experts);
  int64_t output_tiles = (params.weight.num_outputs + Shape::kOutputs - 1) / Shape::kOutputs;
  launch(moe_codes_kernel<Codes, Numbers, Shape>,
         dim3(static_cast<unsigned>(row_tiles * output_tiles)),
         dim3(Shape::kThreads),
         code_bytes<Codes, Numbers, Shape>(plan),
         stream,
         params,
         plan,
         row_tiles);
}

// Returns whether rounding rows once and multiplying tiles of 64 rows is faster: if experts have more
// rows than a tile of moe_codes_kernel on average. By the meter (tools/gates), a tile of 64 rows
// occupies an SM of sm_90a 1.5 to 1.8 times as long as one of 8.
bool code_tiles_pay(const ExpertsParams& params) {
  int64_t row_tiles = most_row_tiles(params.rows, params.num_experts, kRoundedRows);
  return code_tile_steps(params.weight) != 0 && params.rows > params.num_experts * kExpertRows &&
         params.workspace_size >= rounded_workspace_floats(row_tiles, params.weight);
}

}  // namespace

void moe_codes_cuda(const ExpertsParams& params, CudaStream stream) {
  if (code_tiles_pay(params)) return code_tiles_cuda(params, stream);
  with_codes(params, [&]<typename Codes, typename Numbers>() {
    if constexpr (!Numbers::kIsFloat) {
      if (params.weight.group % 32 != 0) return run<Codes, Numbers, Halves>(params, stream);
    }
    run<Codes, Numbers, Few>(params, stream);
  });
}

}  // namespace specops
